"""Run folders of evaluations that never ran: made-up answers through specwave's own writers."""

from __future__ import annotations

import random
from pathlib import Path

from specwave.benchmark.answers import AnswerFile, Turn, failed_row, finished_row
from specwave.benchmark.metrics import Verdict
from specwave.benchmark.questions import CATEGORIES, Question
from specwave.benchmark.results import Baseline, build_results, save_results
from specwave.benchmark.rows import failed

MT_BENCH = CATEGORIES[:8]  # two turns each


def questions(each: int = 2) -> list[Question]:
    """`each` of all 13 categories, as Spec-Bench numbers them; two turns in those of MT-bench."""
    return [
        Question(81 + place, category, ("One?", "Two?") if category in MT_BENCH else ("One?",))
        for place, category in enumerate(category for category in CATEGORIES for _ in range(each))
    ]


def turn(draw: random.Random, levels: int, bias: float, slow: float) -> Turn:
    """An answer of some rounds whose drafts are accepted with a chance of `bias` each."""
    lengths = []
    for _ in range(draw.randint(4, 12)):
        kept = 0
        while kept < levels and draw.random() < bias:
            kept += 1
        lengths.append(kept + 1)
    rounds, tokens = len(lengths), [draw.randrange(100) for _ in range(sum(lengths))]
    prefill, draft = 0.02 * slow, 0.004 * levels * rounds * draw.uniform(0.9, 1.2)
    verify, accept = 0.03 * rounds * slow * draw.uniform(0.95, 1.1), 0.001 * rounds
    return Turn(
        text=f"made up, {len(tokens)} tokens",
        tokens=tokens,
        accept_lengths=lengths,
        seconds=prefill + draft + verify + 0.001 * rounds,
        prefill_seconds=prefill,
        draft_seconds=draft,
        verify_seconds=verify,
        accept_seconds=accept,
        draft_levels=[levels] * rounds,
    )


def answers(
    folder: Path, asked: list[Question], levels: int, bias: float = 0.0, seed: int = 0, lose: int = 0, repeat: int = 1
) -> AnswerFile:
    """answers.jsonl of one method; `lose` of the questions failed."""
    made = AnswerFile(folder, {})
    for place, question in enumerate(asked):
        draw = random.Random(f"{seed} {question.id}")
        if place < lose:
            made.add(failed_row(question, f"t-{folder.name}", RuntimeError("out of <memory>")))
            continue
        easy = bias + 0.05 * (CATEGORIES.index(question.category) % 4 if question.category in CATEGORIES else 0)
        turns = [[turn(draw, levels, easy, 1.0 + place % 3) for _ in question.turns] for _ in range(repeat)]
        made.add(finished_row(question, f"t-{folder.name}", turns, 1 << 30))
    made.close()
    return made


def settings(levels: int, **more) -> dict:
    decoding = {"name": "eagle3", "levels": levels, "top_k": 10, "total_token": 30} if levels else {"name": "plain"}
    same = {"target": "smollm2_135m", "fingerprint": "f", "dtype": "bfloat16", "device": "cpu", "max_new_tokens": 64}
    same |= {"sampling": {"temperature": 0.0, "seed": 0}, "benchmark": {"name": "builtin", "fingerprint": "q"}}
    return same | {"decoding": decoding} | more


METHODS = {  # label → layers, rule, chance of a draft, questions lost
    "L2-15-27": ([2, 15, 27], "eagle3", 0.62, 0),
    "L29": ([29], "eagle2", 0.5, 1),
    "L4-17-29": ([4, 17, 29], None, 0.64, 0),
}


def run_folder(
    folder: Path,
    asked: list[Question] | None = None,
    methods: dict | None = None,
    levels: int = 5,
    repeat: int = 1,
    more: dict | None = None,
) -> Path:
    """A run folder as an evaluation of several drafters leaves it: baseline/ and a folder for each method. `more`:
    settings."""
    asked = questions() if asked is None else asked
    plain = answers(folder / "baseline", asked, 0, repeat=repeat).rows
    exact = {row["question_id"]: Verdict(True, None) for row in plain}
    save_results(
        folder / "baseline",
        build_results(
            label="plain", method="autoregressive", rows=plain, baseline=Baseline(plain), verdicts=exact,
            divergences=[], settings=settings(0),
        ),
    )  # fmt: skip
    for seed, (label, (layers, rule, bias, lose)) in enumerate((METHODS if methods is None else methods).items()):
        rows = answers(folder / label, asked, levels, bias, seed, lose, repeat).rows
        other = {"question_id": asked[-1].id, "turn": 0, "position": 7, "top2_gap": 0.125, "gap": 0.125, "noise": None}
        verdicts = {row["question_id"]: Verdict(row["question_id"] != asked[-1].id, None) for row in rows}
        save_results(
            folder / label,
            build_results(
                label=label, method="eagle3", rows=rows, baseline=Baseline(plain),
                verdicts={name: verdict for name, verdict in verdicts.items() if name in exact},
                divergences=[] if failed(rows[-1]) else [other | {"near_tie": False}],
                settings=settings(levels, checkpoint=f"/made/up/{label}", **(more or {})), layers=layers,
                rules=[rule] if rule else [],
            ),
        )  # fmt: skip
    return folder
