"""What vLLM and specwave made of the same questions with the same drafter, side by side. Pure: plain numbers in, a
Markdown table and the gates that failed out.

Both draft chains of n tokens from the first answer token on, which vLLM takes from its prefill. What is compared:

    here                     vLLM's counters                                  specwave
    rounds                   num_drafts                                       verifications
    drafts accepted at p     num_accepted_tokens_per_pos[p]                   rounds of p + 2 or more committed tokens
    acceptance at p          num_accepted_tokens_per_pos[p] / num_drafts      the same (`vllm` in results.json)
    length as counted        1 + num_accepted_tokens / num_drafts             –
    mean acceptance length   (answer tokens − 1) / num_drafts                 (answer tokens − 1) / rounds = τ

vLLM counts drafts behind the end token and beyond the limit as accepted, τ counts what is committed. So the lengths
compared are those of committed tokens; vLLM's own figure stands beside them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PAIRS = {  # what is held against what: texts of equal rank must be equal
    "plain": ("vLLM, plain", "specwave, plain"),
    "vllm": ("vLLM with drafts", "vLLM, plain"),
    "ours": ("specwave with drafts", "specwave, plain"),
    "engines": ("vLLM with drafts", "specwave, plain"),
}


@dataclass
class Part:
    """What one engine did with one drafter (or none): by question, and of drafts by position too."""

    answers: list[list[int]] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)
    layers: list[int] | None = None  # that the engine says it reads, in its own counting
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def length(self) -> float:
        """Tokens committed by a round, the target's own included; the first token of an answer is no round's."""
        return (sum(map(len, self.answers)) - len(self.answers)) / sum(self.rounds)

    @property
    def counted(self) -> float:
        """As vLLM reports it."""
        return 1 + sum(map(sum, self.accepted)) / sum(self.rounds)

    @property
    def positions(self) -> list[float]:
        """Share of the rounds whose draft was accepted at each position."""
        return [sum(counts) / sum(self.rounds) for counts in zip(*self.accepted, strict=True)]

    def packed(self) -> dict[str, Any]:
        """For a JSON file: answers as one string of ids each."""
        return asdict(self) | {"answers": [" ".join(map(str, answer)) for answer in self.answers]}

    @classmethod
    def unpacked(cls, content: Mapping[str, Any]) -> Part:
        answers = [[int(token) for token in answer.split()] for answer in content["answers"]]
        return cls(**{**content, "answers": answers})


def of_counters(before: Sequence[int], after: Sequence[int]) -> tuple[int, list[int]]:
    """(rounds, drafts accepted by position) of what happened between two readings of vLLM's counters.

    A reading: [num_drafts, num_draft_tokens, num_accepted_tokens, *num_accepted_tokens_per_pos].
    """
    rounds, _, accepted, *by_position = (new - old for old, new in zip(before, after, strict=True))
    if sum(by_position) != accepted:
        raise ValueError(f"vLLM's counters contradict each other: {accepted} accepted, by position {by_position}")
    return rounds, by_position


def of_lengths(accept_lengths: Sequence[int], drafts: int) -> tuple[int, list[int]]:
    """The same of our accept lengths, which count the target's own token."""
    return len(accept_lengths), [sum(length >= place + 2 for length in accept_lengths) for place in range(drafts)]


def named_layers(log: str) -> list[int] | None:
    """The layers that vLLM's log says it reads, the last time; None where it takes its default without a word."""
    found = re.findall(r"auxiliary layers from speculative config: \(([\d, ]*)\)", log)
    return [int(layer) for layer in re.findall(r"\d+", found[-1])] if found else None


def as_many_rounds(vllm: Part, ours: Part) -> tuple[int, int]:
    """(questions with equally many rounds, questions whose answers are equal)."""
    pairs = zip(vllm.answers, ours.answers, vllm.rounds, ours.rounds, strict=True)
    equal = [rounds == own for answer, mine, rounds, own in pairs if answer == mine]
    return sum(equal), len(equal)


def verdict(
    vllm: Part | None,
    ours: Part | None,
    layers: Sequence[int],
    divergences: Sequence[Mapping[str, Any]],
    tolerance: float,
    failure: str = "",
) -> dict[str, Any]:
    """The figures of one drafter and `failures`, the gates that it did not pass.

    Args:
        layers: that vLLM must read: config.json's top-level ids.
        divergences: with `pair`, a key of `PAIRS`, `question` and whether each is a `near_tie`.
        tolerance: of the mean acceptance length, a share.
        failure: why one engine has no part.
    """
    if vllm is None or ours is None:
        return {"failures": [f"not served: {failure}"]}
    failures = []
    if vllm.layers != list(layers):
        failures.append(f"vLLM reads layers {vllm.layers}, config.json names {list(layers)}")
    failures += unexplained(divergences)
    if not sum(vllm.rounds) or not sum(ours.rounds):
        return {"failures": [*failures, "nothing was drafted: ask for more tokens"]}
    deviation = vllm.length / ours.length - 1
    if abs(deviation) > tolerance:
        failures.append(
            f"mean acceptance length {vllm.length:.3f} in vLLM, {ours.length:.3f} here: {deviation:+.1%}, "
            f"{tolerance:.0%} is allowed"
        )
    same, of = as_many_rounds(vllm, ours)
    return {
        "mean_acceptance_length": {"vllm": vllm.length, "vllm_counted": vllm.counted, "specwave": ours.length},
        "acceptance_by_position": {"vllm": vllm.positions, "specwave": ours.positions},
        "deviation": deviation,
        "rounds": {"vllm": sum(vllm.rounds), "specwave": sum(ours.rounds)},
        "as_many_rounds": [same, of],
        "questions": len(vllm.answers),
        "divergences": list(divergences),
        "failures": failures,
    }


def unexplained(divergences: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each pair whose texts differ by more than near-ties."""
    wrong = [each for each in divergences if not each["near_tie"]]
    lines = []
    for pair in dict.fromkeys(each["pair"] for each in wrong):
        questions = ", ".join(str(each["question"]) for each in wrong if each["pair"] == pair)
        lines.append(f"{' and '.join(PAIRS[pair])} differ, and not by a near-tie: questions {questions}")
    return lines


def same_text(found: Mapping[str, Any], pair: str) -> str:
    """Questions of equal text, of all."""
    apart = {str(each["question"]) for each in found["divergences"] if each["pair"] == pair}
    return f"{found['questions'] - len(apart)}/{found['questions']}"


HEAD = (
    "drafter",
    "text as vLLM's plain",
    "text as specwave's plain",
    "mean length, vLLM",
    "specwave",
    "deviation",
    "vLLM's own figure",
    "as many rounds",
    "accepted by position, vLLM",
    "specwave",
    "gates",
)


def markdown(verdicts: Mapping[str, Mapping[str, Any]]) -> str:
    """One row a drafter; what could not be served says why."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for label, found in verdicts.items():
        gates = "; ".join(found["failures"]) or "passed"
        if "deviation" not in found:
            row = [label, *["–"] * (len(HEAD) - 2), gates]
        else:
            length, rates = found["mean_acceptance_length"], found["acceptance_by_position"]
            row = [
                label,
                same_text(found, "vllm"),
                same_text(found, "engines"),
                f"{length['vllm']:.3f}",
                f"{length['specwave']:.3f}",
                f"{found['deviation']:+.1%}",
                f"{length['vllm_counted']:.3f}",
                f"{found['as_many_rounds'][0]}/{found['as_many_rounds'][1]}",
                *(" ".join(f"{rate:.3f}" for rate in rates[engine]) for engine in ("vllm", "specwave")),
                gates,
            ]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |")
    return "\n".join(lines)


def listed(label: str, divergence: Mapping[str, Any]) -> str:
    """One divergence, a line."""
    one, other = PAIRS[divergence["pair"]]
    kind = "near-tie" if divergence["near_tie"] else "DIVERGENCE"
    gap = "–" if divergence["gap"] is None else f"{divergence['gap']:.2e}"
    noise = "–" if divergence["noise"] is None else f"{divergence['noise']:.2e}"
    return (
        f"{kind}: {label}, question {divergence['question']}, token {divergence['position']}: {one} has "
        f"{divergence['candidate']}, {other} {divergence['reference']}; gap {gap}, top two "
        f"{divergence['top2_gap']:.2e}, noise {noise}"
    )
