"""The verification forward: over all blocks, or from the block on that the drafts themselves have come to.

Letters: B rows, K nodes, D hidden size.

A method that drafts by early exit has run blocks 0 … E−1 on the root and on every draft; what they wrote to the cache
is what the whole target would have written, so that only blocks E … N−1 are left. That holds for every row or for none:
the rows of a batch are one forward.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specwave.decoding.tree import Tree
from specwave.target import Output, Session, Wants


def verify(
    session: Session,
    tokens_BK: Tensor,
    positions_BK: Tensor,
    sees_BKK: Tensor,
    slots: Sequence[int],
    trees: Sequence[Tree],
    wants: Wants,
) -> Output:
    """Logits and wanted states of every node.

    Args:
        slots: each tree's row of the batch.
    """
    block, begun = _begun(trees, wants)
    if block == 0:
        return session.forward(tokens_BK, positions_BK, sees_BKK, wants=wants)

    def padded(states: list[Tensor]) -> Tensor:
        if session.batch == 1:
            return states[0][None]
        whole_BKD = states[0].new_zeros(*tokens_BK.shape, states[0].shape[-1])
        for slot, each in zip(slots, states, strict=True):
            whole_BKD[slot, : len(each)] = each
        return whole_BKD

    hidden = padded(begun[block - 1])
    later = Wants(tuple(layer for layer in wants.blocks if layer >= block), wants.attentions)
    output = session.forward(None, positions_BK, sees_BKK, start_block=block, hidden=hidden, wants=later)
    for layer in wants.blocks:
        if layer < block:
            output.blocks[layer] = hidden if layer == block - 1 else padded(begun[layer])
    return output


def _begun(trees: Sequence[Tree], wants: Wants) -> tuple[int, dict[int, list[Tensor]]]:
    """(the block to go on from, by layer each tree's outputs of the one before it and of wanted earlier ones); block 0,
    from the start, where trees differ or do not have what is wanted."""
    resumes = [tree.resume for tree in trees if tree.resume is not None]
    if len(resumes) < len(trees) or len({resume.block for resume in resumes}) > 1:
        return 0, {}
    block, begun = resumes[0].block, dict[int, list[Tensor]]()
    if any(layer < block for layer in wants.attentions):
        return 0, {}
    for layer in {block - 1, *(layer for layer in wants.blocks if layer < block)}:
        states = [output for resume in resumes if (output := resume.output(layer)) is not None]
        if len(states) < len(resumes):
            return 0, {}
        begun[layer] = states
    return block, begun
