"""Keyed sampling commits the same tokens whatever is drafted, with every processor; what sampled drafts may be."""

import pytest
import torch
from stubs import Coached, Oracle, RandomTrees, SampledChain, SelfDrafting

from specwave.decoding import BaseProposer, Context, Sampling, Tree, draw_drafts, generate
from specwave.decoding.accept import Nodes, match_tree, walk_tree
from specwave.decoding.processors import met
from specwave.decoding.sampling import choose
from specwave.decoding.tree import ancestors, nodes

PROMPTS = [[5, 9, 200, 31, 7, 7, 80], [4], [300, 12, 12, 12, 8, 9, 10, 11, 400, 3, 17]]
V, LIMIT = 512, 30
SETTINGS = [
    Sampling(0.8, seed=3),
    Sampling(1.0, seed=3, top_k=20),
    Sampling(1.3, seed=3, top_p=0.7),
    Sampling(1.0, seed=3, min_p=0.1),
    Sampling(0.9, seed=3, repetition_penalty=1.5),
    Sampling(0.0, repetition_penalty=1.5),
    Sampling(1.2, seed=3, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
]


@pytest.fixture(scope="module")
def plains(tiny):
    return {sampling: generate(tiny, None, PROMPTS, max_new_tokens=LIMIT, sampling=sampling) for sampling in SETTINGS}


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("kinds", [("chain",), ("tree",), ("tree", "none", "chain")], ids=", ".join)
def test_deterministic_drafts_reproduce_plain_sampling(sampling, kinds, tiny, plains):
    """SWIFT's bypass, vllm#6718: every committed token has passed the processors of prefix and path."""
    plain = plains[sampling]
    proposer = Coached(plain.tokens, 4, V, kinds)
    drafted = generate(tiny, proposer, PROMPTS, max_new_tokens=LIMIT, sampling=sampling)
    assert drafted.tokens == plain.tokens
    assert drafted.rounds < plain.rounds  # drafts were accepted, and rejected
    assert max(map(max, drafted.accept_lengths)) > 2
    assert any(1 in lengths for lengths in drafted.accept_lengths)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_a_batch_samples_as_its_rows_alone(sampling, tiny, plains):
    """Rows that end shrink the batch: the noise and the tokens met stay with the row."""
    for row, prompt in enumerate(PROMPTS):
        alone = generate(tiny, None, prompt, max_new_tokens=LIMIT, sampling=sampling, sequence_ids=[row])
        assert alone.tokens == plains[sampling].tokens[row]


def test_rows_that_end_early_keep_the_others_tokens_met(tiny):
    sampling = Sampling(0.7, seed=5, repetition_penalty=1.5)
    plain = generate(tiny, None, PROMPTS, max_new_tokens=LIMIT, sampling=sampling, eos_ids=()).tokens
    ends = (plain[0][2], plain[1][4])
    wanted = []
    for row in plain:
        at = next((place for place, token in enumerate(row) if token in ends), len(row))
        wanted.append(row[: at + 1])
    assert len({*map(len, wanted)}) > 1
    for proposer in (None, Coached(plain, 3, V)):
        made = generate(tiny, proposer, PROMPTS, max_new_tokens=LIMIT, sampling=sampling, eos_ids=ends)
        assert made.tokens == wanted


def test_each_processor_changes_what_is_drawn(tiny, plains):
    drawn = [tuple(map(tuple, plain.tokens)) for plain in plains.values()]
    assert len(set(drawn)) == len(SETTINGS)


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_the_walk_comes_to_where_matching_every_node_comes(penalty):
    """The readable reference: choose at all nodes, each with the tokens of its own path, then match."""
    generator, sampling = torch.Generator().manual_seed(1), Sampling(1.0, seed=2, repetition_penalty=penalty)
    accepted = 0
    for _ in range(100):
        count = int(torch.randint(1, 12, (1,), generator=generator))
        above = [int(torch.randint(-1, i, (1,), generator=generator)) if i else -1 for i in range(count)]
        used, drafts = set(), []  # no parent has the same child twice
        for parent in above:
            token = next(t for t in torch.randperm(12, generator=generator).tolist() if (parent, t) not in used)
            used.add((parent, token))
            drafts.append(token)
        tokens, parents = nodes(Tree(torch.tensor(drafts), torch.tensor(above)))
        tokens[0] = 2
        sees = ancestors(parents[None])
        logits = torch.randn(1, count + 1, 12, generator=generator)
        seen = torch.zeros(1, 12, dtype=torch.bool)
        seen[0, [2, 3]] = True
        positions, sequence = sees.sum(-1) + 9, torch.tensor([7])
        known = seen if penalty != 1 else None
        drafted = Nodes(tokens[None], parents[None], sees, positions, sequence, count, known)
        on_path, final = walk_tree(drafted, logits, sampling)
        every = met(seen, tokens[None], sees)
        chosen = choose(logits, sampling, sequence[:, None], positions, every)
        end, wanted = match_tree(tokens[None], parents[None], sees, chosen)
        assert torch.equal(on_path, wanted)
        assert int(final) == int(chosen[0, end])
        accepted += int(on_path.sum()) - 1
    assert accepted > 10


# ---------------------------------------------------------------- sampled drafts


class Branching(BaseProposer):
    def propose_row(self, context):
        return Tree(torch.tensor([1, 2]), torch.tensor([-1, -1]), q=torch.full((2, V), 1 / V))


class Mixed(BaseProposer):
    def propose_row(self, context):
        return Tree.chain([3], q=torch.full((1, V), 1 / V) if context.row else None)


def test_sampled_trees_are_refused_with_the_reason(tiny):
    with pytest.raises(ValueError, match="recursive residuals"):
        generate(tiny, Branching(), PROMPTS[0], max_new_tokens=5, sampling=Sampling(1.0))


def test_sampled_and_deterministic_drafts_in_one_batch_are_refused(tiny):
    with pytest.raises(ValueError, match="batches of their own"):
        generate(tiny, Mixed(), PROMPTS, max_new_tokens=5, sampling=Sampling(1.0))


def test_greedy_takes_a_sampled_chain_as_guesses(tiny):
    plain = generate(tiny, None, PROMPTS, max_new_tokens=12)
    q = torch.full((V,), 1 / V)
    assert generate(tiny, SampledChain(q, 3, seed=4), PROMPTS, max_new_tokens=12).tokens == plain.tokens


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_drafts_drawn_from_the_targets_own_distribution_are_all_accepted(sampling, tiny):
    """transformers#32867: p is the processed distribution, q what was drawn from; where they are the same, p/q = 1."""
    limit, levels = 16, 3
    proposer = SelfDrafting(tiny, levels, bend=0.0)
    made = generate(tiny, proposer, PROMPTS, max_new_tokens=limit, sampling=sampling, eos_ids=())
    assert made.accept_lengths == [[levels + 1] * 4] * 3
    bent = generate(tiny, SelfDrafting(tiny, levels, 3.0), PROMPTS, max_new_tokens=limit, sampling=sampling, eos_ids=())
    assert any(1 in lengths for lengths in bent.accept_lengths)


def test_drafts_are_drawn_from_the_q_that_is_handed_out():
    sampling = Sampling(0.8, seed=1, top_k=3, repetition_penalty=2.5)
    logits, draws = torch.tensor([2.0, 1.0, 0.5, 0.2, -1.0, 1.5]), 20_000
    seen = torch.tensor([True, False, False, False, False, False])
    rows = [Context(row, row, [0, 0], 1, 9, None, row, sampling=sampling, seen=seen) for row in range(draws)]
    drafted = torch.full((draws, 1), 5)
    tokens, q = draw_drafts(logits.expand(draws, -1), rows, drafted)
    wanted = torch.tensor([2.0 / 2.5, 1.0, 1.5 / 2.5]).div(0.8).softmax(-1)  # tokens 0 and 5 were met, 2 to 4 are out
    torch.testing.assert_close(q[7], torch.tensor([wanted[0], wanted[1], 0, 0, 0, wanted[2]]))
    counts = torch.bincount(tokens, minlength=6) / draws
    # 4 standard errors of a share near 1/2
    torch.testing.assert_close(counts, q[0], atol=4 * 0.5 / draws**0.5, rtol=0)
    assert draw_drafts(logits[None], [Context(0, 0, [0], 1, 9, None, 0)])[1] is None


def test_a_penalty_reaches_into_an_accepted_run(tiny):
    """Penalised greedy decoding of an oracle's drafts: the second of two equal drafts has met the first."""
    sampling = Sampling(repetition_penalty=3.0)
    plain = generate(tiny, None, PROMPTS, max_new_tokens=24, sampling=sampling, eos_ids=())
    right = generate(tiny, Oracle(plain.tokens, 5, V), PROMPTS, max_new_tokens=24, sampling=sampling, eos_ids=())
    assert right.tokens == plain.tokens
    assert right.accept_lengths == [[6] * 4] * 3
    unlike = generate(tiny, None, PROMPTS, max_new_tokens=24, eos_ids=())
    assert unlike.tokens != plain.tokens


def test_a_random_proposer_changes_no_penalised_token(families):
    sampling = Sampling(1.1, seed=9, top_p=0.95, repetition_penalty=1.3)
    for target in families.values():
        plain = generate(target, None, PROMPTS, max_new_tokens=20, sampling=sampling)
        drafted = generate(target, RandomTrees(V, seed=4), PROMPTS, max_new_tokens=20, sampling=sampling)
        assert drafted.tokens == plain.tokens
