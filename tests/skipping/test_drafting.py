"""Chains drafted with a kept set, against drafts without a cache of their own; coupled draws; stop rules."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specwave.decoding import Sampling
from specwave.decoding.sampling import TARGET, keyed_gumbel, scores
from specwave.skipping.drafting import agreement, choose_coupled, draft_chains
from specwave.skipping.stops import Below

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
NEVER = Below(0.0)


def afresh(opened, target, lengths, contexts, kept, gamma, stop):
    """The same chains: every token from a forward over root and drafts behind a cache of the target's own."""
    chains = []
    for row, context in enumerate(contexts):
        drafts, sampling = [], context.sampling
        while len(drafts) < gamma:
            session, _ = opened(target, lengths)
            tokens = torch.zeros(len(lengths), 1 + len(drafts), dtype=torch.int64)
            tokens[row] = torch.tensor([context.tokens[-1], *drafts])
            logits = session.forward(tokens, plan=kept).logits[row, -1:]
            seen = None
            if sampling.penalised:
                seen = context.seen.clone()[None]
                seen[0, drafts] = True
            processed = scores(logits, sampling, seen)
            noise = 0.0
            if not sampling.greedy:
                place = torch.tensor([len(context.tokens) + len(drafts)])
                noise = keyed_gumbel(sampling.seed, torch.tensor([context.sequence]), TARGET, place, 512)
            drafts.append(int((processed + noise).argmax()))
            if float(processed.softmax(-1)[0, drafts[-1]]) < stop:
                break
        chains.append(drafts)
    return chains


SAMPLINGS = [Sampling(), Sampling(repetition_penalty=1.3), Sampling(0.8, 3), Sampling(0.7, 5, 0, 0.9, 0.0, 1.2)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "penalty", "sampled", "nucleus"])
@pytest.mark.parametrize("lengths", [(9,), (9, 14, 5)])
@pytest.mark.parametrize("stop", [0.0, 0.3])
def test_chains_equal_those_drafted_afresh(sampling, lengths, stop, mild, opened, contexts_of):
    for family in FAMILIES:
        session, prompts = opened(mild[family], lengths)
        contexts = contexts_of(session, prompts, sampling)
        kept = (torch.rand(16, generator=torch.Generator().manual_seed(len(family))) < 0.7).tolist()
        before = session.mark()
        chains = draft_chains(contexts, kept, 5, Below(stop))
        assert session.mark() == before
        expected = afresh(opened, mild[family], lengths, contexts, kept, 5, stop)
        assert [chain.tolist() for chain in chains] == expected


def test_idle_rows_are_left_alone(mild, opened, contexts_of):
    """Rows 0 and 2 of four are live; row 3 idles at the last position there is."""
    target, kept = mild["llama"], [True, True, *[False] * 12, True, True]
    session, prompts = opened(target, (9, 12, 5, 2000))
    session.rollback([8, 11, 4, 2047])
    contexts = contexts_of(session, prompts, Sampling())
    both = draft_chains([contexts[0], contexts[2]], kept, 4, NEVER)
    assert session.mark() == [8, 11, 4, 2047]
    alone = [afresh(opened, target, (9, 12, 5), contexts[:3], kept, 4, 0.0)[row] for row in (0, 2)]
    assert [chain.tolist() for chain in both] == alone


def test_drafts_end_before_the_limit(mild, opened, contexts_of):
    """Of what remains the last token is the target's own."""
    session, prompts = opened(mild["llama"], (9, 14))
    contexts = contexts_of(session, prompts, Sampling())
    contexts[0].limit, contexts[1].limit = 3, 1
    assert [len(chain) for chain in draft_chains(contexts, [True] * 16, 8, NEVER)] == [2, 2]  # the loop cuts row 1
    contexts[0].limit = 1
    assert [len(chain) for chain in draft_chains(contexts, [True] * 16, 8, NEVER)] == [0, 0]


def test_an_error_rolls_back_too(mild, opened, contexts_of, monkeypatch):
    session, prompts = opened(mild["llama"], (9,))
    forward, calls = session.forward, []

    def failing(*args, **more):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("broken")
        return forward(*args, **more)

    monkeypatch.setattr(session, "forward", failing)
    with pytest.raises(RuntimeError, match="broken"):
        draft_chains(contexts_of(session, prompts, Sampling()), [True] * 16, 8, NEVER)
    assert session.mark() == [8]


class Listening:
    """Ends no chain, and keeps what it is told."""

    idle = False

    def __init__(self):
        self.heard = []

    def begin(self, contexts): ...

    def ends(self, contexts, probabilities):
        self.heard.append((list(contexts), probabilities))
        return [False] * len(contexts)

    def observe(self, verdicts): ...


@pytest.mark.parametrize("sampling", SAMPLINGS[::2], ids=["greedy", "sampled"])
def test_a_stop_rule_is_told_every_drafts_probability(sampling, mild, opened, contexts_of):
    session, prompts = opened(mild["llama"], (9, 14))
    contexts, stop = contexts_of(session, prompts, sampling), Listening()
    kept = [True, True, *[False, True] * 6, True, True]
    chains = draft_chains(contexts, kept, 4, stop)
    assert [len(chain) for chain in chains] == [4, 4]
    assert [heard for heard, _ in stop.heard] == [contexts] * 4  # behind the last step too
    for row, prompt in enumerate(prompts):
        whole = torch.cat([prompt, chains[row]])
        alone, _ = opened(mild["llama"], (9, 14))
        tokens = torch.stack([whole[len(prompt) - 1 : -1]] * 2)
        logits = alone.forward(tokens, plan=kept).logits[row]
        given = scores(logits, sampling).softmax(-1).gather(1, chains[row][:, None])[:, 0]
        # float32, one forward over four tokens against four over one
        assert [each[row] for _, each in stop.heard] == pytest.approx(given.tolist(), abs=1e-4)


def test_agreement_counts_equal_choices():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(90, 7, 12, generator=draw)  # more branches than are scored at once
    truth, sampling = torch.randint(12, (7,), generator=draw), Sampling()
    keys = torch.zeros(7, dtype=torch.int64), torch.arange(7)
    found = agreement(lambda hidden: hidden, logits, truth, sampling, *keys)
    expected = [(one.argmax(-1) == truth).float().mean().item() for one in logits]
    assert found == pytest.approx(expected)
    hot = Sampling(1.0, seed=4)
    found = agreement(lambda hidden: hidden, logits, truth, hot, *keys)
    noise = keyed_gumbel(4, keys[0], TARGET, keys[1], 12)
    expected = [(one + noise).argmax(-1).eq(truth).float().mean().item() for one in logits]
    assert found == pytest.approx(expected)
    assert len(set(found)) > 2


def test_coupling_is_right_more_often_than_a_draw_of_ones_own():
    """Two near distributions: with shared noise the draws agree with about 1 − their distance, apart with Σ p·q."""
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 20, generator=draw)
    near = logits + 0.3 * torch.randn(1, 20, generator=draw)
    sampling, count = Sampling(1.0, seed=9), 3000
    sequences, positions = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    target, _ = choose_coupled(logits.expand(count, -1), sampling, sequences, positions)
    coupled, _ = choose_coupled(near.expand(count, -1), sampling, sequences, positions)
    p, q = logits.softmax(-1)[0], near.softmax(-1)[0]
    agree = (target == coupled).float().mean().item()
    assert agree > torch.minimum(p, q).sum().item() - 0.12
    assert agree > 2 * (p * q).sum().item()


class Largest(TorchDispatchMode):
    """The largest tensor that anything but a view makes."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = [one for one in args if isinstance(one, torch.Tensor) and not one.is_mkldnn]  # packed weights have none
        stores = {one.untyped_storage().data_ptr() for one in given}
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in stores:
            self.size = max(self.size, made.numel())
        return made


def test_a_round_copies_no_keys(mild, opened, contexts_of):
    """Behind 1,800 tokens the keys of one block are 1,800 · 2 · 16 numbers; nothing that drafting and verifying make is
    as large."""
    target = mild["llama"]
    session, prompts = opened(target, (1800,))
    contexts = contexts_of(session, prompts, Sampling())
    with Largest() as largest:
        (chain,) = draft_chains(contexts, [True, True, *[False, True] * 6, True, True], 4, NEVER)
        session.forward(torch.cat([prompts[0][-1:], chain])[None])
        session.keep_paths([[0, 2]])
    keys = session.cache.keys[0]
    assert 0 < largest.size < 1799 * keys.shape[1] * keys.shape[3]
