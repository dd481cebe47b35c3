"""README.md beside an exported drafter: what a hub shows. Written from its card.json alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_SERVED = {
    "vllm": "`config.json` names the layers as vLLM counts them (`eagle_aux_hidden_state_layer_ids`, block inputs).",
    "sglang": "`config.json` names the layers as SGLang counts them (nested in `eagle_config`, block outputs).",
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def readme(card: dict[str, Any], source: str = "") -> str:
    """Markdown with the front matter that hubs read; `source`: where the target lies, named where that is a hub."""
    target, training, data = card["target"], card["training"], card["data"]
    layers = ", ".join(map(str, card["layers"]))
    base = source if _HUB_ID.fullmatch(source) and not Path(source).exists() else ""
    lines = [
        "---",
        "library_name: specwave",
        "license: other",
        *([f"base_model: {base}"] if base else []),
        "tags: [speculative-decoding, eagle3]",
        "---",
        "",
        f"# EAGLE-3 drafter for {target['name']}, layers {layers}",
        "",
        f"Reads the outputs of blocks {layers} (of {target['num_layers']}, counted from 0) of the frozen target, "
        f"fingerprint `{target['fingerprint']}`; specwave refuses it for another one.{_switched(card)}",
        "",
        *_acceptance(training),
        "## Training",
        "",
        f"{_count(training.get('tokens'))} tokens in {_count(training.get('step'))} steps, "
        f"{training.get('steps', '?')} drafts unrolled, loss `{training.get('loss', '?')}`; layers chosen by "
        f"`{training.get('rule') or 'hand'}`.",
        "",
        f"Data: {_count(data.get('samples'))} conversations, {_count(data.get('answer_tokens'))} answer tokens; "
        f"the draft vocabulary covers {_share(data.get('draft_vocabulary_coverage'))} of them.",
        "",
        *_licence(data),
        "## Serving",
        "",
        *(f"- {engine}: {_SERVED[engine]}" for engine in card["serves"]),
        *(f"- {warning}" for warning in card["warnings"]),
        "",
        *_command(card, base or "<the target>"),
        "## What was run, and what was not",
        "",
        *(f"- {line}" for line in _run(card)),
        "",
    ]
    return "\n".join(lines)


def _switched(card: dict[str, Any]) -> str:
    """EAGLE-3.1's switches that are on, and the padding."""
    on, spare = [f"`{name}`" for name, value in card["switches"].items() if value], card["padding_layer"]
    said = f" On are {', '.join(on)}." if on else ""
    if spare is not None:
        said += f" The files name layer {spare} too: it is unused, its columns of `fc` are zero."
    return said


def _command(card: dict[str, Any], base: str) -> list[str]:
    """How vLLM is started with it."""
    if card["format"] == "speculators":
        return ["```", "vllm serve <this folder or repository>", "```", ""]
    drafts = card["training"].get("steps", 3)
    settings = f'{{"method": "eagle3", "model": "<this folder or repository>", "num_speculative_tokens": {drafts}}}'
    return ["```", f"vllm serve {base} --speculative-config '{settings}'", "```", ""]


def _run(card: dict[str, Any]) -> list[str]:
    """What is known of these files and of others of their layout, an engine a line."""
    measured = bool(card["training"].get("validation"))
    lines = ["specwave: " + ("validated with these weights." if measured else "not run with these weights.")]
    if card["format"] == "speculators":
        lines.append("vLLM: not run with files of this format.")
    else:
        lines.append(
            "vLLM: not run with these files. Its CPU build (0.32) has loaded a drafter of three layers in this layout, "
            "without switches, and gave the target's own text. `benchmarks/peers/vllm_cpu.py <this folder>`, in "
            "specwave's repository, loads this one and compares text and acceptance with specwave's."
        )
    lines.append(
        "SGLang was not run at all: how its public code (0.5.23) reads `config.json` is re-enacted in specwave's tests."
    )
    return lines


def _acceptance(training: dict[str, Any]) -> list[str]:
    """τ̂ and the acceptance of each draft on held-out prompts."""
    figures = training.get("validation") or {}
    if not figures:
        return []
    shares = {key: value for key, value in figures.items() if key.startswith("a_")}
    head = ["τ̂ (the target's own token counted)", *(f"draft {int(key[2:]) + 1} accepted" for key in shares)]
    row = [f"{figures['tau_hat']:.3f}", *(f"{value:.1%}" for value in shares.values())]
    if "tau" in figures:
        head, row = [*head, "τ of decoding"], [*row, f"{figures['tau']:.3f}"]
    table = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", f"| {' | '.join(row)} |"]
    return [
        "## On held-out prompts",
        "",
        *table,
        "",
        "Each draft's share is of those whose earlier drafts all held.",
        "",
    ]


def _licence(data: dict[str, Any]) -> list[str]:
    source = data.get("source") or {}
    named = source.get("path") or ", ".join(source[key] for key in ("sharegpt", "ultrachat") if key in source)
    text = named or data.get("converted_from") or "specwave's built-in prompts, answered by the target"
    return [f"Licence: that of the target and of the text it was trained on ({text}); specwave adds none.", ""]


def _count(number: Any) -> str:
    return f"{number:,}" if isinstance(number, int) else "?"


def _share(number: Any) -> str:
    return f"{number:.1%}" if isinstance(number, float) else "?"
