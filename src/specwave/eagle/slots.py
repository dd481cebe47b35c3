"""Which slots count, and where the work is.

B rows, T positions, S steps, J keys of step 0, N live slots. x the tokens, ℓ_t = 1 where x_t is answer text. At step s
slot t reads token x_{t+1+s} and is held against y_{t+1+s}, the target's distribution for x_{t+2+s}. Prompt x_0…x_4,
answer x_5…x_8 (x_8 the end token):

    slot t                        3           4           5           6           7
    s = 0: reads → predicts       x_4 → x_5   x_5 → x_6   x_6 → x_7   x_7 → x_8   x_8 → –
           counts: ours           no          yes         yes         yes         no
                   speculators    no          yes         yes         yes         yes
                   eagle          no          no          yes         yes         yes
    s = 1: reads → predicts       x_5 → x_6   x_6 → x_7   x_7 → x_8   x_8 → –     –
           counts: ours           no          yes         yes         no          no
                   speculators    yes         yes         yes         yes         no
                   eagle          no          yes         yes         yes         no
    s = 2: reads → predicts       x_6 → x_7   x_7 → x_8   x_8 → –     –           –
           counts: ours           no          yes         no          no          no
                   speculators    yes         yes         yes         no          no
                   eagle          yes         yes         yes         no          no

(t = 3, s = 0: the target itself makes x_5. t = 4, s = 0: the first draft a server makes.)

    ours          ℓ_{t+1} … ℓ_{t+s+2}: the whole chain is answer text, as every chain of a server is
    speculators   ℓ_{t+1+s}, the token read (speculators, modelopt)
    eagle         ℓ_{t+s}, the token before it (EAGLE, SpecForge, AngelSlim): the first draft of an answer never counts

Under all three argmax y_{t+1+s} must be in the draft vocabulary, and slot and target must be in one document: a row may
hold several, numbered by `documents` [B, T] (negative: padding). Without `documents` a row is one document to its very
end; `eagle` then counts a padded row's last token against the padding, so give it documents.

Knows nothing about drafters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specwave.target.documents import document_spans

COUNT_FROM = ("ours", "speculators", "eagle")
_QUERIES = 256  # of one chunk of attention: its scores are [heads, _QUERIES, T]


def ahead(x_BT: Tensor, by: int) -> Tensor:
    """x_{t+by} at t; zeros where that runs past T."""
    shifted = torch.zeros_like(x_BT)
    if by < x_BT.shape[1]:
        shifted[:, : x_BT.shape[1] - by] = x_BT[:, by:]
    return shifted


def inside(documents_BT: Tensor, by: int) -> Tensor:
    """Whether t + by is in the document of t, bool [B, T]."""
    return ahead(documents_BT + 1, by) == documents_BT + 1  # past T a zero, which no document has


def numbered(documents_BT: Tensor | None, like_BT: Tensor) -> Tensor:
    """The documents, where there are none one per row."""
    return torch.zeros_like(like_BT, dtype=torch.int64) if documents_BT is None else documents_BT


def answer_slots(answer_BT: Tensor, steps: int, documents_BT: Tensor | None = None) -> Tensor:
    """Π_{r=1…s+2} ℓ_{t+r} within one document, bool [S, B, T]."""
    documents_BT = numbered(documents_BT, answer_BT)
    run, slots = ahead(answer_BT, 1), []
    for step in range(steps):
        run = run & ahead(answer_BT, step + 2)
        slots.append(run & inside(documents_BT, step + 2))
    return torch.stack(slots)


def counting_slots(
    answer_BT: Tensor,
    in_vocab_BT: Tensor,
    steps: int,
    count_from: str = "ours",
    documents_BT: Tensor | None = None,
) -> Tensor:
    """M, bool [S, B, T]: the slots whose loss counts (see the head of this file).

    Args:
        answer_BT: ℓ, bool.
        in_vocab_BT: whether argmax y_t is in the draft vocabulary, bool.
    """
    wanted = torch.stack([ahead(in_vocab_BT, step + 1) for step in range(steps)])
    if count_from == "ours":
        return answer_slots(answer_BT, steps, documents_BT) & wanted
    documents_BT = numbered(documents_BT, answer_BT)
    tested = 1 if count_from == "speculators" else 0
    by_answer = [ahead(answer_BT, step + tested) & inside(documents_BT, step + 1) for step in range(steps)]
    return torch.stack(by_answer) & wanted


def targets_needed(answer_BT: Tensor, count_from: str = "ours", documents_BT: Tensor | None = None) -> Tensor:
    """Positions p whose y_p some slot t = p − 1 − s may be held against, bool [B, T]; those of `ours` always."""
    documents_BT = numbered(documents_BT, answer_BT)
    needed = answer_BT & ahead(answer_BT, 1) & inside(documents_BT, 1)
    if count_from == "speculators":
        needed = answer_BT.clone()
    follows = torch.zeros_like(answer_BT)  # p ≥ 1 in its document
    follows[:, 1:] = inside(documents_BT, 1)[:, :-1]
    if count_from == "eagle":
        needed[:, 1:] |= answer_BT[:, :-1]
    return needed & follows


@dataclass
class Layout:
    """Keys and live slots of all documents behind each other: no padding, and no key behind a last live slot."""

    keys: Tensor  # [J]: where a key's token stands in the flattened batch, row·T + t
    positions: Tensor  # [J]: its place within its document
    slots: Tensor  # [N]: a live slot's own key, an index into `keys`; ascending
    chunks: list[tuple[int, int, int, int]]  # of one document: slots a…b−1 see no keys but c…d−1


def lay_out(live_BT: Tensor, documents_BT: Tensor | None = None) -> Layout:
    """The layout of a batch whose slots `live_BT` have work to do."""
    live, length = live_BT.cpu(), live_BT.shape[1]
    nothing = torch.zeros(0, dtype=torch.int64)
    keys, positions, slots, chunks = [nothing], [nothing], [nothing], []
    first_key = first_slot = 0
    for row, start, end in document_spans(numbered(documents_BT, live).cpu()):
        own = live[row, start:end].nonzero().flatten()
        if not len(own):
            continue
        places = torch.arange(int(own[-1]) + 1)
        keys.append(places + row * length + start)
        positions.append(places)
        slots.append(own + first_key)
        for a in range(0, len(own), _QUERIES):
            b = min(a + _QUERIES, len(own))
            chunks.append((first_slot + a, first_slot + b, first_key, first_key + int(own[b - 1]) + 1))
        first_key, first_slot = first_key + len(places), first_slot + len(own)
    device = live_BT.device
    return Layout(torch.cat(keys).to(device), torch.cat(positions).to(device), torch.cat(slots).to(device), chunks)
