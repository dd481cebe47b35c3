"""Proposers for tests: random, always right, never right, going on from a later block, sampled from a given q."""

import torch

from specwave.decoding import BaseProposer, Resume, Tree


class RandomTrees(BaseProposer):
    """Random trees of random size; captures states too, and checks the context invariant at every call."""

    def __init__(self, vocab, size=7, seed=0, layers=(1, 7), chain=False):
        self.generator = torch.Generator().manual_seed(seed)
        self.vocab, self.size, self.layers, self.chain = vocab, size, layers, chain
        self.seen = {}

    def wants(self, contexts):
        from specwave.target import Wants

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
        output = context.session.forward(tokens, plan=plan, logits=None)
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
