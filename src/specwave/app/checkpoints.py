"""What an evaluation decodes with: the folder that `checkpoint` means, the method for it, and its probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specwave.artifacts import UserError
from specwave.benchmark.drafters import BUILTIN, DrafterFolder, builtin_drafter

if TYPE_CHECKING:
    from specwave.app.evaluate import EvaluateConfig


def checkpoint_of(config: EvaluateConfig) -> Any:
    """`checkpoint`, or the drafter that specwave brings where that is asked for, or none is given and one is needed.

    Raises:
        UserError: specwave brings none for this target.
    """
    given = config.checkpoint
    needed = given is None and config.decoding.needs_checkpoint
    if not needed and given != BUILTIN:
        return given
    method = getattr(config.decoding, "takes", "eagle3")
    found = builtin_drafter(config.model.identify().fingerprint, method)
    if found is None:
        why = f"decoding={config.decoding.label} needs a drafter: give its folder" if needed else "give a folder"
        if method != "eagle3":
            why += f" (train.py drafter={method} makes one)"
        rule = f"{why}; specwave brings none for model={config.model.name}"
        raise UserError("checkpoint", "null" if needed else given, rule)
    return found


def method_for(decoding: Any, drafters: Sequence[DrafterFolder]) -> Any:
    """The decoding method to use. A drafter beside plain decoding, the default, is decoded with by its own method."""
    if not drafters or getattr(decoding, "takes_checkpoint", decoding.needs_checkpoint):
        return decoding
    from specwave.decoding import Autoregressive

    if not isinstance(decoding, Autoregressive):
        raise UserError("checkpoint", drafters[0].path, f"decoding={decoding.label} reads no drafter: give null")
    if all(drafter.method == "kangaroo" for drafter in drafters):
        from specwave.skipping.kangaroo import KangarooDecoding

        return KangarooDecoding(batch_invariant=decoding.batch_invariant)
    from specwave.eagle.proposer import Eagle3Decoding

    return Eagle3Decoding(batch_invariant=decoding.batch_invariant)


def check_probe(config: EvaluateConfig) -> None:
    """Refuses, before there is a target, a missing or damaged probe, and one that no method would read."""
    from specwave.copying.folder import find_probe, read_card
    from specwave.copying.switch import no_probe, reads_probe

    decoding, given = config.decoding, config.probe_checkpoint
    if given is not None and not reads_probe(decoding):
        raise UserError("probe_checkpoint", given, f"decoding={decoding.label} reads no probe: give null")
    if hasattr(decoding, "probe"):
        if decoding.probe is None:
            raise no_probe(decoding)
        read_card(find_probe(decoding.probe))
