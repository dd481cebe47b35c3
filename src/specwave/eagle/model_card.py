"""README.md beside an exported drafter: what a hub shows. Written from its card.json alone."""

from __future__ import annotations

from typing import Any

_SERVED = {
    "vllm": "`config.json` names the layers as vLLM counts them (`eagle_aux_hidden_state_layer_ids`, block inputs).",
    "sglang": "`config.json` names the layers as SGLang counts them (nested in `eagle_config`, block outputs).",
}
_NOT_RUN = (
    "Neither was run on these very files: that the format loads in vLLM and gives the target's own text was checked "
    "with other drafters of the same layout; SGLang was not run at all."
)


def readme(card: dict[str, Any]) -> str:
    """Markdown with the front matter that hubs read."""
    target, training, data = card["target"], card["training"], card["data"]
    layers = ", ".join(map(str, card["layers"]))
    lines = [
        "---",
        "library_name: specwave",
        "tags: [speculative-decoding, eagle3]",
        "---",
        "",
        f"# EAGLE-3 drafter for {target['name']}, layers {layers}",
        "",
        f"Reads the outputs of blocks {layers} (of {target['num_layers']}, counted from 0) of the frozen target, "
        f"fingerprint `{target['fingerprint']}`; specwave refuses it for another one.",
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
        _NOT_RUN,
        "",
    ]
    return "\n".join(lines)


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
