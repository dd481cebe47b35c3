"""One decoding loop for every method."""

from specwave.decoding.loop import Generation, generate, stream
from specwave.decoding.protocol import Autoregressive, BaseProposer, Context, Proposer, Verdict, draw_drafts
from specwave.decoding.sampling import Sampling
from specwave.decoding.tree import Resume, Tree

__all__ = [
    "Autoregressive",
    "BaseProposer",
    "Context",
    "Generation",
    "Proposer",
    "Resume",
    "Sampling",
    "Tree",
    "Verdict",
    "draw_drafts",
    "generate",
    "stream",
]
