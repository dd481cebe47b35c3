"""The one place where a token is committed: prefill, then propose → verify → accept → roll back, for a batch of rows.

The invariant of `protocol.py` holds at every call of a proposer: tokens[0:n] committed, cache and states cover [0:n−1),
tokens[n−1] is the next root. So the prefill runs over the prompt without its last token, which is the first root:
every committed token comes from a verification, and the accept lengths of a sequence add up to its new tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specwave.artifacts import UserError
from specwave.decoding.accept import accept_chain, match_tree
from specwave.decoding.protocol import BaseProposer, Context, Proposer, Verdict
from specwave.decoding.sampling import Sampling, choose
from specwave.decoding.tree import Tree, ancestors, nodes
from specwave.target import Output, Session, Target, Wants

ROOM = 64  # slots beyond the longest sequence: the drafts that one round may verify
GREEDY = Sampling()


@dataclass
class Generation:
    """New tokens (a flat list for one prompt, a list per row for a batch) and what they cost.

    `accept_lengths` counts the tokens committed per verification, the target's own included: their mean is τ.
    """

    tokens: list[Any]
    accept_lengths: list[Any]
    rounds: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


@dataclass
class _Clock:
    device: torch.device
    at: float = field(default_factory=time.perf_counter)

    def lap(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        before, self.at = self.at, time.perf_counter()
        return self.at - before


@torch.inference_mode()
def generate(
    target: Target,
    proposer: Proposer | None,
    input_ids: Tensor | Sequence[int] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    sequence_ids: Sequence[int] | None = None,
    eos_ids: Sequence[int] | None = None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> Generation:
    """Decodes prompts with one method.

    Args:
        proposer: the method; None is plain decoding.
        input_ids: [1, T] or a list of ids: one prompt; [B, T] or a list of lists (any lengths): a batch.
        max_new_tokens: limit per row, end token included.
        sequence_ids: keys of the rows' noise; 0, 1, … by default.
        eos_ids: tokens that end a row (kept in its output); the target's by default, () for none.
        on_tokens: called with (row, committed tokens) after every round.

    Raises:
        UserError: an empty prompt or batch, or one that does not fit the target's context.
    """
    prompts, single = _prompts(input_ids)
    method: Proposer = proposer if proposer is not None else BaseProposer()
    stops = frozenset(target.eos_ids if eos_ids is None else eos_ids)
    longest = max(len(prompt) for prompt in prompts)
    if max_new_tokens < 1:
        raise UserError("max_new_tokens", max_new_tokens, "must be at least 1")
    if longest + max_new_tokens > target.max_length:
        rule = f"prompt ({longest} tokens) and new tokens must fit the target's {target.max_length} positions"
        raise UserError("max_new_tokens", max_new_tokens, rule)
    clock, start = _Clock(target.device), time.perf_counter()
    result = Generation([[] for _ in prompts], [[] for _ in prompts])
    for prompt in prompts:
        if not all(isinstance(token, int) and 0 <= token < target.vocab_size for token in prompt):
            raise UserError("input_ids", prompt[:8], f"token ids are whole numbers 0 to {target.vocab_size - 1}")
    if sequence_ids is not None and len(sequence_ids) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts need as many sequence_ids, got {len(sequence_ids)}")
    session = target.session(len(prompts), longest + max_new_tokens + ROOM)
    keys = list(sequence_ids) if sequence_ids is not None else list(range(len(prompts)))
    live = [
        Context(row, keys[row], list(prompt), len(prompt), max_new_tokens, session, row)
        for row, prompt in enumerate(prompts)
    ]
    _prefill(session, live, method.wants(live))
    method.begin(live)
    result.prefill_seconds = clock.lap()
    while live:
        trees = [tree.cut(context.remaining - 1) for tree, context in zip(method.propose(live), live, strict=True)]
        result.draft_seconds += clock.lap()
        verdicts = _verify(session, live, trees, sampling, stops, method.wants(live))
        result.rounds += 1
        result.verify_seconds += clock.lap()
        for verdict in verdicts:
            row = verdict.context.row
            result.tokens[row] += verdict.tokens
            result.accept_lengths[row].append(len(verdict.tokens))
            if on_tokens is not None:
                on_tokens(row, verdict.tokens)
        method.observe(verdicts)
        live = _retire(session, method, live, stops)
        result.draft_seconds += clock.lap()
    result.seconds = time.perf_counter() - start
    if single:
        result.tokens, result.accept_lengths = result.tokens[0], result.accept_lengths[0]
    return result


def _prompts(input_ids: Any) -> tuple[list[list[int]], bool]:
    rows = input_ids.tolist() if isinstance(input_ids, Tensor) else [*input_ids]
    rows = [row.tolist() if isinstance(row, Tensor) else row for row in rows]
    if not rows:
        raise UserError("input_ids", "[]", "a prompt of at least one token is needed")
    if not isinstance(rows[0], (list, tuple)):
        return [list(rows)], True
    prompts = [list(row) for row in rows]
    if not all(prompts):
        raise UserError("input_ids", "[]", "each prompt needs at least one token")
    return prompts, isinstance(input_ids, Tensor) and len(prompts) == 1


def _prefill(session: Session, contexts: Sequence[Context], wants: Wants) -> None:
    """Everything but the last token of each prompt; rows are padded on the right, where no causal query looks."""
    counts = [len(context.tokens) - 1 for context in contexts]
    if max(counts) == 0:
        return
    padded = torch.zeros(len(contexts), max(counts), dtype=torch.int64)
    for row, context in enumerate(contexts):
        padded[row, : counts[row]] = torch.tensor(context.tokens[:-1])
    output = session.forward(padded.to(session.target.device), wants=wants, logits=None)
    session.advance(counts)
    for row, context in enumerate(contexts):
        context.blocks = {layer: states[row, : counts[row]] for layer, states in output.blocks.items()}
        context.attentions = {layer: states[row, : counts[row]] for layer, states in output.attentions.items()}


def _verify(
    session: Session,
    contexts: Sequence[Context],
    trees: Sequence[Tree],
    sampling: Sampling,
    stops: frozenset[int],
    wants: Wants,
) -> list[Verdict]:
    """One forward over root and drafts of every row; commits what stands. Rows of the batch without a context idle."""
    device, size = session.target.device, 1 + max(len(tree) for tree in trees)
    roots, keys = [0] * session.batch, [0] * session.batch
    for context in contexts:
        roots[context.slot], keys[context.slot] = context.tokens[-1], context.sequence
    starts, sequences = torch.tensor(session.lengths, device=device), torch.tensor(keys, device=device)
    if size > 1 + ROOM:
        raise ValueError(f"a tree of {size - 1} drafts: one round verifies at most {ROOM}")
    if size == 1:
        output = session.forward(torch.tensor(roots, device=device)[:, None], wants=wants)
        assert output.logits is not None
        chosen = choose(output.logits, sampling, sequences[:, None], starts[:, None] + 1)
        paths, finals = [[0]] * session.batch, chosen[:, 0].tolist()
    else:
        tokens = torch.full((session.batch, size), -1, dtype=torch.int64, device=device)
        parents = torch.zeros_like(tokens)
        for context, tree in zip(contexts, trees, strict=True):
            if len(tree):
                tree.check()
                own, above = nodes(tree)
                tokens[context.slot, : len(own)], parents[context.slot, : len(own)] = own, above
        tokens[:, 0] = torch.tensor(roots, device=device)
        sees = ancestors(parents)
        positions = starts[:, None] + sees.sum(-1) - 1
        positions = positions.clamp(max=session.target.max_length - 1)  # pads of a row at the end of the context
        output = _forward(session, tokens.clamp(min=0), positions, sees, contexts, trees, wants)
        paths, finals = _accept(tokens, parents, sees, positions + 1, output, trees, contexts, sampling, sequences)
    verdicts: list[Verdict] = []
    kept: list[list[int]] = [[] for _ in range(session.batch)]
    for context, tree in zip(contexts, trees, strict=True):
        path = paths[context.slot]
        drafted = tree.tokens.tolist() if len(path) > 1 else []
        committed = [drafted[node - 1] for node in path[1:]] + [finals[context.slot]]
        committed = _until_stop(committed[: context.remaining], stops)
        path = path[: len(committed)]
        kept[context.slot] = path
        context.tokens += committed
        context.blocks = {layer: states[context.slot, path] for layer, states in output.blocks.items()}
        context.attentions = {layer: states[context.slot, path] for layer, states in output.attentions.items()}
        logits = None if output.logits is None else output.logits[context.slot, : len(tree) + 1]
        verdicts.append(Verdict(context, tree, path, committed, logits))
    session.keep_paths(kept)
    return verdicts


def _forward(
    session: Session,
    tokens: Tensor,
    positions: Tensor,
    sees: Tensor,
    contexts: Sequence[Context],
    trees: Sequence[Tree],
    wants: Wants,
) -> Output:
    """The verification forward; from a later block on where every row's tree says that the earlier ones have run."""
    resumes = [tree.resume for tree in trees]
    first = resumes[0]
    if first is None or any(resume is None or resume.block != first.block for resume in resumes):
        return session.forward(tokens, positions, sees, wants=wants)
    hidden = first.hidden.new_zeros(*tokens.shape, first.hidden.shape[-1])
    for context, resume in zip(contexts, resumes, strict=True):
        assert resume is not None
        hidden[context.slot, : len(resume.hidden)] = resume.hidden
    return session.forward(None, positions, sees, start_block=first.block, hidden=hidden, wants=wants)


def _accept(
    tokens: Tensor,
    parents: Tensor,
    sees: Tensor,
    positions: Tensor,
    output: Output,
    trees: Sequence[Tree],
    contexts: Sequence[Context],
    sampling: Sampling,
    sequences: Tensor,
) -> tuple[list[list[int]], list[int]]:
    """(accepted nodes per row, the target's token behind them per row); the round's one transfer to the host."""
    assert output.logits is not None
    sampled = [tree for tree in trees if tree.q is not None]
    if sampled and not sampling.greedy:
        if any(tree.q is None and len(tree) for tree in trees):
            raise ValueError("sampled and deterministic drafts in one batch: verify them in batches of their own")
        q = torch.zeros_like(output.logits)
        for context, tree in zip(contexts, trees, strict=True):
            if tree.q is not None:
                q[context.slot, : len(tree)] = tree.q.to(q)
        end, final = accept_chain(tokens, q, output.logits, sampling, sequences, positions)
        on_path = torch.arange(tokens.shape[1], device=end.device) <= end[:, None]
    else:
        chosen = choose(output.logits, sampling, sequences[:, None], positions)
        end, on_path = match_tree(tokens, parents, sees, chosen)
        final = chosen.gather(1, end[:, None])[:, 0]
    table = torch.cat([final[:, None], on_path.long()], 1).tolist()
    return [[node for node, taken in enumerate(row[1:]) if taken] for row in table], [row[0] for row in table]


def _until_stop(tokens: list[int], stops: frozenset[int]) -> list[int]:
    for place, token in enumerate(tokens):
        if token in stops:
            return tokens[: place + 1]
    return tokens


def _retire(session: Session, method: Proposer, live: list[Context], stops: frozenset[int]) -> list[Context]:
    """Drops finished rows; the batch itself shrinks only when half of it idles (each time the cache is copied)."""
    going = [context for context in live if context.remaining > 0 and context.tokens[-1] not in stops]
    for row in {context.row for context in live} - {context.row for context in going}:
        method.end(row)
    if going and len(going) <= session.batch // 2:
        session.select_rows([context.slot for context in going])
        for slot, context in enumerate(going):
            context.slot = slot
    return going
