"""How long training probes takes once the states are captured: all sites, read from disk as in `train.py task=probe`.

    python benchmarks/probe.py [--tokens 300000] [--layers 30] [--width 576] [--folder states]

Quiet machine; 1 GB of disk for every 14,000 tokens of the default's size, removed at the end. The states are random,
with a direction planted that tells copied tokens from others, the better the deeper the layer: how long training takes
does not depend on what they say, and the AUCs show that they were learnt from. A tenth more tokens are held out.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from specwave.copying.answers import Answer, Labelled
from specwave.copying.assess import train
from specwave.copying.batches import logits
from specwave.copying.capture import KEY, AnswerPlan, States, all_columns
from specwave.copying.judge import auc
from specwave.copying.settings import LinearProbe
from specwave.data.filling import fill
from specwave.data.states import Column, Index, Reader

ANSWER = 192  # tokens
SHARD = 4096  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=300_000, help="that are trained on")
    parser.add_argument("--layers", type=int, default=30, help="two sites each")
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--folder", help="where the states are kept meanwhile; a temporary one by default")
    arguments = parser.parse_args()

    count = max(2, arguments.tokens // ANSWER)
    made = [answer(number) for number in range(count + max(2, count // 10))]
    settings = LinearProbe()
    training, held = (Labelled(part, settings.n_train) for part in (made[:count], made[count:]))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        began = time.perf_counter()
        states = random_states(Path(folder), made, settings.n_train, arguments.layers, arguments.width)
        print(f"states written in {time.perf_counter() - began:.0f} s")
        began = time.perf_counter()
        probes = train(states, training, held, settings)
        seconds = time.perf_counter() - began
        areas = auc(logits(probes, states, held, settings.offset), held.all_copied)
    print(
        f"{len(states.names)} probes of width {arguments.width} on {training.tokens:,} tokens, {settings.epochs} "
        f"epochs, {len(settings.l2)} penalties, {torch.get_num_threads()} threads: {seconds:.1f} s,"
        f" {1e6 * seconds / training.tokens:.0f} µs a token"
    )
    print(f"AUC on {held.tokens:,} held-out tokens: {areas.min():.3f} to {areas.max():.3f} by layer")


def answer(number: int) -> Answer:
    """Random tokens, with runs copied from before."""
    draw = random.Random(number)
    ids = [draw.randrange(49_152) for _ in range(40)]
    while len(ids) < 40 + ANSWER:
        place, length = draw.randrange(len(ids) - 12), draw.randrange(6, 12)
        ids += ids[place : place + length] if draw.random() < 0.1 else [draw.randrange(49_152) for _ in range(length)]
    return Answer(ids[: 40 + ANSWER], 40, id=str(number))


def random_states(folder: Path, answers: Sequence[Answer], n: int, layers: int, width: int) -> States:
    """As `capture` leaves them, of no target."""
    columns = {name: Column(width, "bfloat16") for name in all_columns(layers)}
    plan = AnswerPlan(answers)
    planned = [answers[place] for place in plan.places]
    index = Index({}, columns, plan.sha256, SHARD, len(plan.shards(SHARD)))
    index = fill(folder, index, plan, partial(shard, planned, n, columns), print, key=KEY, holds="random numbers")
    return States(Reader(folder, index, KEY), layers, torch.device("cpu"))


def shard(planned: Sequence[Answer], n: int, columns: dict[str, Column], rows: range, bar: tqdm) -> dict[str, Tensor]:
    part = Labelled(planned[rows.start : rows.stop], n)
    none = torch.zeros(1, dtype=torch.bool)  # behind an answer's rows, which begin a token before it (offset 1)
    copied = torch.cat([torch.cat([labels, none]) for labels in part.copied])
    found = {}
    for place, (name, column) in enumerate(columns.items()):
        depth = place % (len(columns) // 2) / (len(columns) // 2)
        states = torch.randn(len(copied), column.width)
        states[:, 0] += 3 * depth * (2 * copied.float() - 1)
        found[name] = states.to(torch.bfloat16)
    bar.update(len(copied))
    return found


if __name__ == "__main__":
    main()
