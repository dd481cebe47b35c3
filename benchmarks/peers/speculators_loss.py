"""Our objective against speculators 0.9.0's eager losses on the same tensors, value and gradient, and the time of both.

    python benchmarks/peers/speculators_loss.py

Fetches the package from PyPI into a temporary folder, without what it depends on: its loss files need only torch. Both
sides get one drafter, one conversation and its target logits, here of the whole vocabulary, because speculators counts
slots whose target has no draft id too. Ours runs with `count_from=speculators`. Theirs is a sum of means over steps as
ours is, over logits of the plain unrolled drafter. Exit 1 where anything differs by more than 1e-5 of its size.

Timed is one step from the states handed on to the gradients of states and head, the target's softmax included, in
float32 at SmolLM2-135M's width: medians, in turns.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from specwave.eagle.divergence import chunked_loss
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.loss import ttt_loss
from specwave.eagle.reference import unrolled_logits
from specwave.eagle.targets import read_target
from specwave.eagle.vocab import build_vocab_map

VERSION = "0.9.0"
PAIRS = {"forward_kl": "kl_div_loss", "lk": "neg_log_acceptance_loss"}  # ours, theirs; their `ce_loss` has hard labels
STEPS, DECAY, LENGTH, VOCAB, WIDTH = 4, 0.8, 60, 40, 24
SLOTS, WIDE, NAMES, TURNS = 1024, 576, 4096, 9  # of the timing; NAMES: draft tokens


def fetch(folder: str) -> tuple[ModuleType, ModuleType]:
    """Their eager losses and step alignment, without the packages' own `__init__`, which import much more."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", folder, f"speculators=={VERSION}"], check=True)
    for name in ("speculators", "speculators.models", "speculators.models.eagle3"):
        empty = ModuleType(name)
        empty.__path__ = [str(Path(folder, *name.split(".")))]
        sys.modules[name] = empty
    return import_module("speculators.losses.eager"), import_module("speculators.models.eagle3.metrics")


def timed(losses: ModuleType) -> None:
    """Prints a row for each loss."""
    head, hidden = torch.nn.Linear(WIDE, NAMES, bias=False), torch.randn(SLOTS, WIDE, requires_grad=True)
    scores, place = torch.randn(SLOTS, NAMES) * 2, torch.arange(SLOTS)
    whole, weight = torch.ones(SLOTS), torch.full((SLOTS,), 1 / SLOTS)

    def ours(name: str) -> None:
        target = scores.softmax(-1)
        chunked_loss(head, [head.weight], hidden, target, whole, place, weight, name)[0].backward()

    def theirs(name: str) -> None:
        getattr(losses, PAIRS[name])(head(hidden)[None], scores[None]).mean().backward()

    for name in PAIRS:
        times: dict[Callable[[str], None], list[float]] = {ours: [], theirs: []}
        for turn in range(2 * TURNS):
            way = (ours, theirs)[(turn + turn // 2) % 2]  # which begins changes from pair to pair
            head.zero_grad()
            hidden.grad = None
            start = time.perf_counter()
            way(name)
            times[way].append(time.perf_counter() - start)
        mine, its = (1000 * statistics.median(found[1:]) for found in times.values())
        print(
            f"{name:<11} {SLOTS} slots: ours {mine:.1f} ms, {PAIRS[name]} {its:.1f} ms; ours / theirs {mine / its:.3f}"
        )


def main() -> int:
    torch.manual_seed(0)
    config = DrafterConfig(
        layers=(1, 4),
        target_hidden_size=WIDTH,
        hidden_size=WIDTH,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        intermediate_size=40,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        rms_eps=1e-5,
        max_length=LENGTH,
        rope={"rope_type": "default", "rope_theta": 100.0},
    )
    drafter = Eagle3Drafter(config, *build_vocab_map(torch.ones(VOCAB, dtype=torch.int64), VOCAB))
    ids, answer = torch.randint(0, VOCAB, (1, LENGTH)), torch.rand(1, LENGTH) < 0.8
    states = {layer: torch.randn(1, LENGTH, WIDTH) for layer in config.layers}
    table, target = torch.randn(VOCAB, WIDTH), torch.randn(1, LENGTH, VOCAB) * 2
    given = (ids, answer, states, target, table, lambda x: x, drafter.draft_ids, drafter.t2d)
    batch = read_target(*given, count_from="speculators", with_mass=True)
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        losses, metrics = fetch(folder)
        for name, theirs in PAIRS.items():
            ours = ttt_loss(drafter, batch, STEPS, DECAY, loss=name, count_from="speculators").loss
            logits = unrolled_logits(drafter, [state[0] for state in states.values()], table[ids[0]], STEPS)
            wanted = {theirs: (getattr(losses, theirs), 1.0)}
            peer = torch.zeros(())
            for step, found in enumerate(logits):  # (x_1, g_0, y_1, ℓ_1): their `shift_batch`
                correct = torch.ones(1, LENGTH - 1, dtype=torch.bool)
                tensors = (found[None, :-1], target[:, 1:], answer[:, 1:], correct)
                peer = peer + metrics.compute_metrics(*tensors, step, DECAY, wanted)[0]
            parameters = list(drafter.parameters())
            have, want = torch.autograd.grad(ours, parameters), torch.autograd.grad(peer, parameters)
            slope = max(float((a - b).norm() / b.norm()) for a, b in zip(have, want, strict=True))
            value = abs(ours.item() - peer.item()) / peer.item()
            print(f"{name:<11} ours {ours.item():.7f}  {theirs} {peer.item():.7f}  gradients differ by {slope:.1e}")
            worst = max(worst, slope, value)
        timed(losses)
    return int(worst > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
