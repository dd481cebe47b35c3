"""Processors against transformers' own, the repetition penalty of every node against materialised prefixes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree import lineage, trees
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import logits_process as hf

from specwave.artifacts import UserError
from specwave.decoding import Sampling, generate
from specwave.decoding.processors import keep_min_p, keep_top_k, keep_top_p, met, penalise
from specwave.decoding.sampling import scores
from specwave.decoding.tree import ancestors, nodes

V = 40
NEAR = 1e-5  # HF sums probabilities in float32, we in float64: closer to a border than that they may differ


def seen_of(prefixes, vocab=V):
    seen = torch.zeros(len(prefixes), vocab, dtype=torch.bool)
    for row, prefix in enumerate(prefixes):
        seen[row, list(prefix)] = True
    return seen


def theirs(sampling, model=None):
    """transformers' processors for these settings, in the order `generate` puts them."""
    config = GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k or None,
        top_p=sampling.top_p,
        min_p=sampling.min_p or None,
        repetition_penalty=sampling.repetition_penalty,
    )
    return model._get_logits_processor(generation_config=config, input_ids_seq_length=1)


@pytest.fixture(scope="module")
def model(family_folders):
    return AutoModelForCausalLM.from_pretrained(family_folders["llama"], dtype=torch.float32)


SETTINGS = [
    Sampling(0.7),
    Sampling(1.0, top_k=7),
    Sampling(1.0, top_p=0.8),
    Sampling(1.0, min_p=0.05),
    Sampling(1.0, repetition_penalty=1.4),
    Sampling(1.0, repetition_penalty=0.6),
    Sampling(1.6, top_k=12, top_p=0.9, min_p=0.08, repetition_penalty=1.3),
    Sampling(0.4, top_k=100, top_p=0.3),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.3, 2.0, 8.0]))
def test_scores_are_those_of_transformers(sampling, seed, spread, model):
    """The same tokens kept in the same order of processors, the same distribution over them."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, V, generator=generator) * spread - 1.0
    prefixes = torch.randint(0, V, (6, 9), generator=generator)
    ours = scores(logits, sampling, seen_of(prefixes.tolist()))
    wanted = theirs(sampling, model)(prefixes, logits.clone())
    differs = ours.isfinite() != wanted.isfinite()
    p = ours.softmax(-1)
    for row in differs.any(1).nonzero()[:, 0].tolist():
        assert _at_a_border(logits[row], prefixes[row], sampling), "another set of tokens is kept"
    same = ~differs.any(1)
    torch.testing.assert_close(p[same], wanted.softmax(-1)[same], atol=1e-6, rtol=1e-4)
    assert same.float().mean() > 0.5


def _at_a_border(logits, prefix, sampling):
    """Whether some token's mass or share lies within rounding of what top-p or min-p ask."""
    score = penalise(logits, seen_of([prefix.tolist()])[0], sampling.repetition_penalty).double()
    score = keep_top_k(score / sampling.temperature, sampling.top_k or V)
    p = score.sort(descending=True).values.softmax(-1)
    mass = (p.cumsum(-1) - sampling.top_p).abs().min()
    share = (p / p[0] - sampling.min_p).abs().min()
    return min(float(mass), float(share)) < NEAR


def test_the_order_is_hugging_face_s(model):
    kinds = [type(processor) for processor in theirs(SETTINGS[6], model)]
    assert kinds == [
        hf.RepetitionPenaltyLogitsProcessor,
        hf.TemperatureLogitsWarper,
        hf.TopKLogitsWarper,
        hf.TopPLogitsWarper,
        hf.MinPLogitsWarper,
    ]


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_greedy_with_a_penalty_equals_hugging_face(penalty, family_folders, families):
    for family in ("llama", "qwen3"):
        model = AutoModelForCausalLM.from_pretrained(family_folders[family], dtype=torch.float32)
        for prompt in ([5, 9, 200, 31, 7, 7, 80], [4]):
            ids = torch.tensor([prompt])
            settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "repetition_penalty": penalty}
            wanted = model.generate(ids, **settings)[0, len(prompt) :].tolist()
            sampling = Sampling(repetition_penalty=penalty)
            assert generate(families[family], None, ids, max_new_tokens=24, sampling=sampling).tokens == wanted


# ---------------------------------------------------------------- by hand


def test_worked_example():
    """The table in the module's docstring."""
    logits = torch.tensor([0.50, 0.20, 0.15, 0.10, 0.05]).log()
    three = keep_top_k(logits, 3)
    torch.testing.assert_close(three.softmax(-1), torch.tensor([0.50, 0.20, 0.15, 0, 0]) / 0.85)
    torch.testing.assert_close(keep_top_p(three, 0.8).softmax(-1), torch.tensor([0.50, 0.20, 0, 0, 0]) / 0.70)
    assert keep_min_p(logits, 0.29).isfinite().tolist() == [True, True, True, False, False]
    seen = torch.tensor([True, False, True, False, False])
    scored = penalise(torch.tensor([2.0, 2.0, -2.0, -2.0, 0.0]), seen, 2.0)
    assert scored.tolist() == [1.0, 2.0, -4.0, -2.0, 0.0]


def test_the_likeliest_token_always_stays():
    logits = torch.tensor([[0.0, 5.0, 1.0], [9.0, 9.0, 9.0]])
    for sampling in (Sampling(1.0, top_p=1e-9), Sampling(1.0, min_p=0.999), Sampling(1.0, top_k=1)):
        assert scores(logits, sampling)[0].isfinite().tolist() == [False, True, False]
        assert scores(logits, sampling)[1].isfinite().all()  # ties stay together


def test_greedy_looks_at_no_border():
    logits = torch.randn(3, V)
    assert torch.equal(scores(logits, Sampling(0.0, top_k=1, top_p=0.1, min_p=0.9)), logits)


@given(st.integers(0, 10**6), st.floats(0.01, 0.999))
@settings(deadline=None, max_examples=60)
def test_top_p_is_the_smallest_set_that_holds_the_mass(seed, mass):
    logits = torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 3
    kept = keep_top_p(logits, mass).isfinite()
    p = logits.double().softmax(-1)
    order = sorted(range(V), key=lambda token: -float(p[token]))
    for count in range(1, V + 1):
        if math.fsum(float(p[token]) for token in order[:count]) >= mass:
            break
    assert sorted(order[:count]) == kept.nonzero()[:, 0].tolist()


def test_a_penalty_without_the_tokens_so_far_is_refused():
    with pytest.raises(ValueError, match="tokens so far"):
        scores(torch.randn(V), Sampling(repetition_penalty=1.2))


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("temperature", [-0.1, math.inf, math.nan]),
        ("top_k", [-1, 2.5]),
        ("top_p", [0.0, -0.1, 1.1, math.nan]),
        ("min_p", [-0.1, 1.0, math.nan]),
        ("repetition_penalty", [0.0, -1.0, math.inf, math.nan]),
    ],
)
def test_settings_out_of_range_are_named(key, values):
    for value in values:
        with pytest.raises(UserError, match=rf"^sampling\.{key}={value}: must be"):
            Sampling(**{key: value})


def test_off_has_one_spelling():
    assert Sampling(0.5, top_k=None) == Sampling(0.5, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)


# ---------------------------------------------------------------- what each node has seen


@given(trees(), st.lists(st.integers(0, 5), min_size=1, max_size=8))
@settings(deadline=None, max_examples=80)
def test_a_node_has_met_its_prefix_and_its_path_and_no_sibling(tree, prefix):
    """vllm#6718: the mask of every node against the prefix written out; a pad behind the tree has met the prefix."""
    tokens, parents = nodes(tree)
    tokens, parents = torch.cat([tokens, tokens.new_full((2,), -1)]), torch.cat([parents, parents.new_zeros(2)])
    tokens[0] = prefix[-1]
    sees = ancestors(parents[None])
    found = met(seen_of([prefix], 9), tokens[None], sees)[0]
    for node in range(len(tree) + 3):
        path = [int(tokens[above]) for above in lineage(parents.tolist(), node) if above and tokens[above] >= 0]
        assert set(found[node].nonzero()[:, 0].tolist()) == {*prefix, *path}
