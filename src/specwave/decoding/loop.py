"""The one place where a token is committed: prefill, then propose → verify → accept → roll back, for a batch of rows.

The invariant of `protocol.py` holds at every call of a proposer: tokens[0:n] committed, cache and states cover [0:n−1),
tokens[n−1] is the next root. So the prefill runs over the prompt without its last token, which is the first root:
every committed token comes from a verification, and the accept lengths of a sequence add up to its new tokens.

`rounds` is that loop, a generator that stops after every round; `generate` runs it to the end, `stream` hands on the
text of each round.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from specwave.artifacts import UserError
from specwave.decoding.accept import Nodes, accept
from specwave.decoding.laps import Laps
from specwave.decoding.presence import Presence
from specwave.decoding.protocol import BaseProposer, Context, Proposer, Verdict
from specwave.decoding.request import Prompts, Request, check_request, noise_keys
from specwave.decoding.resume import verify
from specwave.decoding.sampling import Sampling, choose
from specwave.decoding.stops import Ends
from specwave.decoding.text import Detokeniser
from specwave.decoding.tree import Tree, ancestors, nodes
from specwave.target import Output, Session, Target, Wants

ROOM = 64  # slots beyond the longest sequence: the drafts that one round may verify
PREFILL = 1024  # prompt tokens of one forward: what attention scores and captured states of a long prompt may take
GREEDY = Sampling()
_latest: dict[int, Session] = {}  # by id of a proposer that is at work: the decoding it began last


@dataclass
class Generation:
    """New tokens (a flat list for one prompt, a list per row for a batch) and what they cost.

    `accept_lengths` counts the tokens committed per verification, the target's own included: their mean is τ.
    `draft_levels`, shaped like them, are the levels that each round's draft had. `seconds` is the loop's own time:
    what the reader of a round does is not in it. `accept_seconds`, the part of `verify_seconds` after the forward:
    choosing tokens, committing, rolling back. `warmup_seconds`, what recording forwards took (`target.recorded`) and
    what a proposer set aside (`Session.aside_seconds`), is part of no other figure.
    """

    tokens: list[Any]
    accept_lengths: list[Any]
    rounds: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    warmup_seconds: float = 0.0
    accept_seconds: float = 0.0
    draft_levels: list[Any] = field(default_factory=list)


def generate(
    target: Target,
    proposer: Proposer | None,
    input_ids: Prompts,
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    sequence_ids: Sequence[int] | None = None,
    eos_ids: Sequence[int] | None = None,
    stop: Sequence[str] | str | None = None,
    batch_invariant: bool = False,
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> Generation:
    """Decodes prompts with one method.

    Args:
        proposer: the method; None is plain decoding.
        input_ids: [1, T] or a list of ids: one prompt; [B, T] or a list of lists (any lengths): a batch.
        max_new_tokens: limit per row, end token included.
        sequence_ids: keys of the rows' noise; 0, 1, … by default.
        eos_ids: tokens that end a row (kept in its output); the target's by default, () for none.
        stop: a string or strings that end a row when its output's text holds one. The output ends with the token that
            completes it, so the stop text stays in it, as with Hugging Face.
        batch_invariant: compute each token's states to the same bits whatever it is computed among, so that in half
            precision too every method gives plain decoding's tokens, and a batch those of its rows alone.
        on_tokens: called with (row, committed tokens) after every round.

    Raises:
        UserError: an empty prompt or batch, one that does not fit the target's context, an empty stop string.
        ValueError: the proposer's trees are none.
        FloatingPointError: the target's logits are no numbers.
    """
    request = check_request(target, input_ids, max_new_tokens, sampling, sequence_ids, eos_ids, stop, batch_invariant)
    result = Generation([[] for _ in request.prompts], [[] for _ in request.prompts])
    with closing(rounds(target, proposer, request, result)) as decoding:
        for verdicts in decoding:
            for verdict in verdicts:
                if on_tokens is not None:
                    on_tokens(verdict.context.row, verdict.tokens)
    if request.single:
        result.tokens, result.accept_lengths = result.tokens[0], result.accept_lengths[0]
        result.draft_levels = result.draft_levels[0]
    return result


def stream(
    target: Target,
    proposer: Proposer | None,
    input_ids: Prompts,
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    sequence_id: int = 0,
    eos_ids: Sequence[int] | None = None,
    stop: Sequence[str] | str | None = None,
    batch_invariant: bool = False,
    skip_special_tokens: bool = True,
) -> Iterator[str]:
    """The text of one prompt's output as it comes: at most one piece per round, whole characters only.

    Joined, the pieces are the tokenizer's text of `generate`'s tokens under the same arguments (not cleaned up; an
    output that ends within a character ends with U+FFFD). A reader that stops early ends the decoding.

    Raises:
        UserError: as `generate`, and for more than one prompt; at the call, not at the first piece.
    """
    request = check_request(target, input_ids, max_new_tokens, sampling, None, eos_ids, stop, batch_invariant)
    if len(request.prompts) > 1:
        raise UserError("input_ids", f"{len(request.prompts)} prompts", "a stream decodes one prompt")
    request = replace(request, keys=noise_keys([sequence_id]))
    text = Detokeniser(target.tokenizer, skip_special_tokens)

    def pieces() -> Iterator[str]:
        with closing(rounds(target, proposer, request, Generation([[]], [[]]))) as decoding:
            for (verdict,) in decoding:
                if piece := "".join(map(text.push, verdict.tokens)):
                    yield piece
        if rest := text.flush():
            yield rest

    return pieces()


@torch.inference_mode()
def rounds(
    target: Target, proposer: Proposer | None, request: Request, result: Generation
) -> Generator[list[Verdict], None, None]:
    """Decodes, filling `result`; yields what each round committed. Closed early or failing, it frees what its rows
    hold."""
    method: Proposer = proposer if proposer is not None else BaseProposer()
    clock, result.draft_levels = Laps(target.device, result), [[] for _ in request.prompts]
    session = target.session(len(request.prompts), request.longest + request.limit + ROOM, request.batch_invariant)
    clock.watch(session)
    live = [
        Context(row, key, list(prompt), len(prompt), request.limit, session, row, sampling=request.sampling)
        for row, (key, prompt) in enumerate(zip(request.keys, request.prompts, strict=True))
    ]
    presence = Presence(live, target.vocab_size, target.device) if request.sampling.penalised else None
    try:
        _prefill(session, live, method.wants(live))
        _latest[id(method)] = session
        method.begin(live)
        clock.lap("prefill_seconds")
        while live:
            trees = _drafts(method.propose(live), live, target.device)
            clock.lap("draft_seconds")
            verdicts = _verify(session, live, trees, request, presence, method.wants(live), clock)
            result.rounds += 1
            clock.lap("verify_seconds", "accept_seconds")
            for verdict in verdicts:
                result.tokens[verdict.context.row] += verdict.tokens
                result.accept_lengths[verdict.context.row].append(len(verdict.tokens))
                result.draft_levels[verdict.context.row].append(verdict.levels)
            method.observe(verdicts)
            live = _retire(session, method, live, request.ends)
            clock.lap("draft_seconds")
            clock.pause()
            yield verdicts
            clock.resume()
        clock.settle()
    except BaseException:  # a failure, or the reader has enough
        if _latest.get(id(method)) is session:  # rows are numbers: those of a decoding begun since are not ours to end
            for context in live:
                method.end(context.row)
        raise
    finally:
        if _latest.get(id(method)) is session:
            del _latest[id(method)]


def _drafts(trees: Sequence[Tree], contexts: Sequence[Context], device: torch.device) -> list[Tree]:
    """A round's trees without what can no longer be committed, on the target's device wherever they were made."""
    return [tree.cut(context.remaining - 1).to(device) for tree, context in zip(trees, contexts, strict=True)]


def _prefill(session: Session, contexts: Sequence[Context], wants: Wants) -> None:
    """Everything but the last token of each prompt, a chunk at a time; rows are padded on the right, where no causal
    query looks."""
    counts = [len(context.tokens) - 1 for context in contexts]
    padded = torch.zeros(len(contexts), max(counts), dtype=torch.int64)
    for row, context in enumerate(contexts):
        padded[row, : counts[row]] = torch.tensor(context.tokens[:-1])
    parts = []
    for start in range(0, max(counts), PREFILL):
        part = padded[:, start : start + PREFILL].to(session.target.device)
        parts.append(session.forward(part, wants=wants, logits=False))
        session.advance([min(max(count - start, 0), part.shape[1]) for count in counts])
    for row, context in enumerate(contexts if parts else ()):
        count = counts[row]
        for layer in wants.blocks:
            context.blocks[layer] = torch.cat([part.blocks[layer][row] for part in parts])[:count]
        for layer in wants.attentions:
            context.attentions[layer] = torch.cat([part.attentions[layer][row] for part in parts])[:count]


def _verify(
    session: Session,
    contexts: Sequence[Context],
    trees: Sequence[Tree],
    request: Request,
    presence: Presence | None,
    wants: Wants,
    clock: Laps,
) -> list[Verdict]:
    """One forward over root and drafts of every row; commits what stands. Rows of the batch without a context idle."""
    device, size = session.target.device, 1 + max(len(tree) for tree in trees)
    roots, keys = [0] * session.batch, [0] * session.batch
    for context in contexts:
        roots[context.slot], keys[context.slot] = context.tokens[-1], context.sequence
    starts, sequences = torch.tensor(session.lengths, device=device), torch.tensor(keys, device=device)
    seen = None if presence is None else presence.of_slots(contexts, session.batch)
    if size > 1 + ROOM:
        raise ValueError(f"a tree of {size - 1} drafts: one round verifies at most {ROOM}")
    if size == 1:
        output = session.forward(torch.tensor(roots, device=device)[:, None], wants=wants)
        clock.lap("verify_seconds")
        assert output.logits is not None
        chosen = choose(output.logits[:, 0], request.sampling, sequences, starts + 1, seen)
        paths, finals, drafts = [[0]] * session.batch, chosen.tolist(), [[0]] * session.batch
        levels = [0] * len(contexts)
    else:
        tokens = torch.full((session.batch, size), -1, dtype=torch.int64, device=device)
        parents = torch.zeros_like(tokens)
        for context, tree in zip(contexts, trees, strict=True):
            if len(tree):
                mine = slice(len(tree) + 1)
                tokens[context.slot, mine], parents[context.slot, mine] = nodes(tree)
        tokens[:, 0] = torch.tensor(roots, device=device)
        depth = max(len(tree) if tree.depth is None else tree.depth for tree in trees)
        above = parents.clamp(0, size - 1)  # what is no tree is named when it has come to the host
        sees = ancestors(above, depth)
        positions = starts[:, None] + sees.sum(-1) - 1
        positions = positions.clamp(max=session.target.max_length - 1)  # pads of a row at the end of the context
        slots = [context.slot for context in contexts]
        output = verify(session, tokens.clamp(min=0), positions, sees, slots, trees, wants)
        clock.lap("verify_seconds")
        drafted = Nodes(tokens, above, sees, positions + 1, sequences, depth, seen)
        paths, finals, drafts, levels = _accept(drafted, parents, output, trees, contexts, request.sampling)
    verdicts: list[Verdict] = []
    kept: list[list[int]] = [[] for _ in range(session.batch)]
    for context, tree, deep in zip(contexts, trees, levels, strict=True):
        path = paths[context.slot]
        run = [drafts[context.slot][node] for node in path[1:]] + [finals[context.slot]]
        if min(run) < 0:
            place = f"row {context.row}, position {len(context.tokens) + len(run) - 1}"
            remedy = "are its weights whole? float16 overflows where bfloat16 and float32 do not"
            raise FloatingPointError(f"{place}: the target's logits are no finite numbers; {remedy}")
        committed = request.ends.cut(context, run)
        path = path[: len(committed)]
        kept[context.slot] = path
        context.tokens += committed
        context.blocks = {layer: states[context.slot, path] for layer, states in output.blocks.items()}
        context.attentions = {layer: states[context.slot, path] for layer, states in output.attentions.items()}
        logits = None if output.logits is None else output.logits[context.slot, : len(tree) + 1]
        verdicts.append(Verdict(context, tree, path, committed, logits, deep))
    session.keep_paths(kept)
    if presence is not None:
        presence.add([(verdict.context.row, verdict.tokens) for verdict in verdicts])
    return verdicts


def _accept(
    drafted: Nodes,
    parents_BK: Tensor,
    output: Output,
    trees: Sequence[Tree],
    contexts: Sequence[Context],
    sampling: Sampling,
) -> tuple[list[list[int]], list[int], list[list[int]], list[int]]:
    """Per row: accepted nodes, the target's token behind them, the nodes' tokens; per tree, how deep it is. The round's
    one transfer to the host.

    Raises:
        ValueError: a tree that is none.
    """
    assert output.logits is not None
    q = None
    if not sampling.greedy and any(tree.q is not None for tree in trees):
        if any(tree.q is None and len(tree) for tree in trees):
            raise ValueError("sampled and deterministic drafts in one batch: verify them in batches of their own")
        q = torch.zeros_like(output.logits)
        for context, tree in zip(contexts, trees, strict=True):
            if tree.q is not None:
                q[context.slot, : len(tree)] = tree.q.to(q)
    on_path, final = accept(drafted, output.logits, sampling, q)
    count = on_path.shape[1]
    table = torch.cat([final[:, None], on_path, drafted.tokens, parents_BK], 1).tolist()
    levels = []
    for context, tree in zip(contexts, trees, strict=True):
        above = table[context.slot][1 + 2 * count :]
        levels.append(tree.check([node - 1 for node in above[1 : len(tree) + 1]]))
    paths = [[node for node, taken in enumerate(row[1 : 1 + count]) if taken] for row in table]
    return paths, [row[0] for row in table], [row[1 + count : 1 + 2 * count] for row in table], levels


def _retire(session: Session, method: Proposer, live: list[Context], ends: Ends) -> list[Context]:
    """Drops finished rows; the batch itself shrinks only when half of it idles (each time the cache is copied)."""
    going = [context for context in live if not ends.over(context)]
    for row in {context.row for context in live} - {context.row for context in going}:
        method.end(row)
    if going and len(going) <= session.batch // 2:
        session.select_rows([context.slot for context in going])
        for slot, context in enumerate(going):
            context.slot = slot
    return going
