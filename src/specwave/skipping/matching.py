"""How often a kept set would have drafted what the target committed: one pass over tokens that are already there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specwave.decoding import Sampling
from specwave.skipping.drafting import agreement
from specwave.skipping.windows import Evidence
from specwave.target import Target
from specwave.target.sublayers import Trial


@torch.inference_mode()
def match_rate(target: Target, trial: Trial, evidence: Evidence, kept: Sequence[bool], sampling: Sampling) -> float:
    """The share of the windows' positions where a draft of `kept` would have been the target's token.

    A draft there stands behind the target's own tokens, and behind those of its window runs on the kept set's own keys,
    as it would when drafting. All positions run at once, so each is asked given that all before it were right.

    Args:
        trial: over `evidence.windows`, whose rows are committed.
        kept: 2N flags.
    """
    hidden_1TD = evidence.states[0][None]
    for sub_layer, runs in enumerate(kept):
        if runs:
            hidden_1TD = trial.run(sub_layer, hidden_1TD)
    keys = evidence.sequences, evidence.positions
    return agreement(target.logits, hidden_1TD, evidence.tokens, sampling, *keys, evidence.seen)[0]
