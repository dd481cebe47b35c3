"""Proposers for tests: random, always right, never right, coached, resumed from a later block, sampled from a q."""

import torch

from specwave.decoding import BaseProposer, Resume, Tree, draw_drafts
from specwave.decoding.tree import ancestors, nodes
from specwave.target import Wants


class RandomTrees(BaseProposer):
    """Random trees of random size; captures states too, and checks the context invariant at every call."""

    def __init__(self, vocab, size=7, seed=0, layers=(1, 7), chain=False):
        self.generator = torch.Generator().manual_seed(seed)
        self.vocab, self.size, self.layers, self.chain = vocab, size, layers, chain
        self.seen = {}

    def wants(self, contexts):
        return Wants(blocks=self.layers)

    def _covers(self, context):
        for layer in self.layers:
            if layer in context.blocks:
                self.seen.setdefault(context.row, {}).setdefault(layer, []).append(context.blocks[layer].clone())
        if context.blocks:
            covered = sum(len(part) for part in self.seen[context.row][self.layers[0]])
            assert covered == len(context.tokens) - 1

    def begin(self, contexts):
        for context in contexts:
            self._covers(context)

    def propose_row(self, context):
        assert context.session.lengths[context.slot] == len(context.tokens) - 1
        count = int(torch.randint(0, self.size + 1, (1,), generator=self.generator))
        tokens = torch.randint(0, self.vocab, (count,), generator=self.generator)
        if self.chain:
            return Tree.chain(tokens)
        parents = [int(torch.randint(-1, i, (1,), generator=self.generator)) if i else -1 for i in range(count)]
        return Tree(tokens, torch.tensor(parents, dtype=torch.int64))

    def observe(self, verdicts):
        for verdict in verdicts:
            if verdict.context.tokens[-1] == verdict.tokens[-1] and len(verdict.path) == len(verdict.tokens):
                self._covers(verdict.context)


class Oracle(BaseProposer):
    """Drafts `levels` tokens of known outputs; `shift` makes every one of them wrong."""

    def __init__(self, outputs, levels, vocab, shift=0):
        self.outputs, self.levels, self.vocab, self.shift = outputs, levels, vocab, shift

    def propose_row(self, context):
        done = len(context.tokens) - context.prompt_length
        tokens = self.outputs[context.row][done : done + self.levels]
        return Tree.chain([(token + self.shift) % self.vocab for token in tokens])


class Resuming(BaseProposer):
    """Drafts random chains and runs the first blocks on them itself, so that verification goes on from `block`."""

    def __init__(self, vocab, block, seed=0):
        self.generator, self.vocab, self.block = torch.Generator().manual_seed(seed), vocab, block

    def propose_row(self, context):
        drafts = torch.randint(0, self.vocab, (3,), generator=self.generator)
        tokens = torch.cat([torch.tensor(context.tokens[-1:]), drafts])[None]
        plan = [layer < self.block for layer in range(context.session.arch.num_layers) for _ in range(2)]
        output = context.session.forward(tokens, plan=plan, logits=False)
        return Tree.chain(drafts, resume=Resume(self.block, output.hidden[0]))


class SampledChain(BaseProposer):
    """Chains drawn from a fixed distribution q, with noise of their own."""

    def __init__(self, q, levels, seed):
        self.q, self.levels, self.seed = q, levels, seed

    def propose_row(self, context):
        from specwave.decoding.sampling import DRAFT, keyed_gumbel

        position = torch.arange(self.levels) + len(context.tokens)
        noise = keyed_gumbel(self.seed, torch.tensor(context.sequence), DRAFT, position, len(self.q))
        return Tree.chain((self.q.log() + noise).argmax(-1), q=self.q.expand(self.levels, -1))


class Coached(BaseProposer):
    """Drafts known outputs as a tree: the right chain, every third draft wrong by chance, a wrong sibling before each
    draft. `kinds` says what is drafted, round by round in turn: "tree", "chain" or "none"."""

    def __init__(self, outputs, levels, vocab, kinds=("tree",), seed=0):
        self.outputs, self.levels, self.vocab, self.kinds = outputs, levels, vocab, kinds
        self.generator, self.round = torch.Generator().manual_seed(seed), 0

    def propose(self, contexts):
        self.round += 1
        return super().propose(contexts)

    def propose_row(self, context):
        kind = self.kinds[self.round % len(self.kinds)]
        done = len(context.tokens) - context.prompt_length
        right = torch.tensor(self.outputs[context.row][done : done + self.levels], dtype=torch.int64)
        if kind == "none" or not len(right):
            return Tree.empty()
        wrong, siblings = torch.randint(self.vocab, (2, len(right)), generator=self.generator)
        chain = torch.where(torch.rand(len(right), generator=self.generator) < 1 / 3, wrong, right)
        if kind == "chain":
            return Tree.chain(chain)
        above = (torch.arange(len(right)) * 2 - 1).repeat_interleave(2)  # drafts 1, 3, 5, … are the chain
        return Tree(torch.stack([siblings, chain], 1).flatten(), above)


class SelfDrafting(BaseProposer):
    """Sampled chains from the target's own logits, bent: q is near the processed distribution, and is what was drawn
    from."""

    def __init__(self, target, levels, bend=0.5):
        self.target, self.levels, self.bend = target, levels, bend

    def propose_row(self, context):
        drafts, rows = torch.empty(1, 0, dtype=torch.int64), []
        last = self.target.num_layers - 1
        for _ in range(self.levels):
            ids = torch.cat([torch.tensor([context.tokens]), drafts], 1)
            logits = self.target.logits(self.target.states(ids, [last])[last][:, -1])
            logits = logits + self.bend * torch.linspace(-1, 1, logits.shape[-1])
            token, q = draw_drafts(logits, [context], drafts)
            drafts = torch.cat([drafts, token[:, None]], 1)
            rows.append(q)
        return Tree.chain(drafts[0], q=None if rows[0] is None else torch.cat(rows))


class ResumingTree(BaseProposer):
    """Trees in depth-first order, a wrong branch before one whose first draft is right, verified from `block` on."""

    def __init__(self, outputs, vocab, block, wants=()):
        self.outputs, self.vocab, self.block, self.layers = outputs, vocab, block, wants

    def wants(self, contexts):
        return Wants(blocks=tuple(self.layers))

    def propose_row(self, context):
        done = len(context.tokens) - context.prompt_length
        right = self.outputs[context.row][done : done + 1] or [0]
        drafts = torch.tensor([(right[0] + 1) % self.vocab, 5, 6, right[0], 7, 8])
        tree = Tree(drafts, torch.tensor([-1, 0, 1, -1, 3, 4]))
        tokens = torch.cat([torch.tensor(context.tokens[-1:]), drafts])[None]
        sees = ancestors(nodes(tree)[1][None])
        plan = [layer < self.block for layer in range(context.session.arch.num_layers) for _ in range(2)]
        positions = len(context.tokens) - 2 + sees.sum(-1)
        output = context.session.forward(tokens, positions, sees, plan=plan, logits=False)
        return Tree(drafts, tree.parents, resume=Resume(self.block, output.hidden[0]))
