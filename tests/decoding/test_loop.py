"""The loop commits what the target would have said, whatever is proposed."""

import pytest
import torch
from stubs import Oracle, RandomTrees, Resuming, ResumingTree
from transformers import AutoModelForCausalLM

from specwave.artifacts import UserError
from specwave.decoding import Sampling, generate

FAMILIES = ["llama", "llama3", "mistral", "qwen2", "qwen3"]
PROMPTS = [[5, 9, 200, 31, 7, 7, 80], [4], [300, 12, 12, 12, 8, 9, 10, 11, 400, 3, 17]]


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_equals_hugging_face(family, families, family_folders):
    """Random weights leave no near-ties at these gaps, so equality is exact."""
    model = AutoModelForCausalLM.from_pretrained(family_folders[family], dtype=torch.float32)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        wanted = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, len(prompt) :].tolist()
        assert generate(families[family], None, ids, max_new_tokens=24).tokens == wanted


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chain", [True, False])
def test_a_random_proposer_changes_nothing(family, chain, families):
    target = families[family]
    plain = generate(target, None, PROMPTS, max_new_tokens=30)
    for seed in range(3):
        proposer = RandomTrees(512, seed=seed, chain=chain)
        assert generate(target, proposer, PROMPTS, max_new_tokens=30).tokens == plain.tokens


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_keyed_noise_makes_sampling_the_same_whatever_is_drafted(temperature, tiny):
    sampling = Sampling(temperature, seed=11)
    plain = generate(tiny, None, PROMPTS, max_new_tokens=30, sampling=sampling)
    other = generate(tiny, None, PROMPTS, max_new_tokens=30, sampling=Sampling(temperature, seed=12))
    assert plain.tokens != other.tokens
    assert generate(tiny, RandomTrees(512), PROMPTS, max_new_tokens=30, sampling=sampling).tokens == plain.tokens
    oracle = Oracle(plain.tokens, 3, 512)
    drafted = generate(tiny, oracle, PROMPTS, max_new_tokens=30, sampling=sampling)
    assert drafted.tokens == plain.tokens
    assert drafted.rounds < plain.rounds


def test_a_batch_equals_its_rows_alone(families):
    for target in families.values():
        together = generate(target, RandomTrees(512, seed=5), PROMPTS, max_new_tokens=20)
        for prompt, tokens in zip(PROMPTS, together.tokens, strict=True):
            assert generate(target, None, prompt, max_new_tokens=20).tokens == tokens


@pytest.mark.parametrize("levels", [1, 3, 7])
def test_always_right_commits_levels_plus_one(levels, tiny):
    limit = 4 * (levels + 1)
    plain = generate(tiny, None, PROMPTS, max_new_tokens=limit, eos_ids=())
    right = generate(tiny, Oracle(plain.tokens, levels, 512), PROMPTS, max_new_tokens=limit, eos_ids=())
    assert right.tokens == plain.tokens
    assert right.accept_lengths == [[levels + 1] * 4] * 3
    assert right.rounds == 4


def test_never_right_commits_one(tiny):
    plain = generate(tiny, None, PROMPTS, max_new_tokens=12, eos_ids=())
    wrong = generate(tiny, Oracle(plain.tokens, 4, 512, shift=1), PROMPTS, max_new_tokens=12, eos_ids=())
    assert wrong.tokens == plain.tokens
    assert wrong.accept_lengths == [[1] * 12] * 3


def test_accept_lengths_count_committed_tokens_only(tiny):
    """vllm#56101: nothing after the end token, nothing past the limit."""
    plain = generate(tiny, None, PROMPTS[0], max_new_tokens=20, eos_ids=()).tokens
    end = plain[9]
    cut = plain[: plain.index(end) + 1]
    for proposer in (None, Oracle([plain], 6, 512), RandomTrees(512)):
        result = generate(tiny, proposer, PROMPTS[0], max_new_tokens=20, eos_ids=(end,))
        assert result.tokens == cut  # transformers#47912
        assert sum(result.accept_lengths) == len(cut)
    result = generate(tiny, Oracle([plain], 6, 512), PROMPTS[0], max_new_tokens=11, eos_ids=())
    assert result.tokens == plain[:11]  # transformers PR#46993
    assert sum(result.accept_lengths) == 11


def test_rows_that_end_early_leave_the_others_alone(tiny):
    plain = generate(tiny, None, PROMPTS, max_new_tokens=25, eos_ids=()).tokens
    stop = plain[1][2]
    wanted = [row[: row.index(stop) + 1] if stop in row else row for row in plain]
    assert len({len(row) for row in wanted}) > 1
    assert generate(tiny, RandomTrees(512), PROMPTS, max_new_tokens=25, eos_ids=(stop,)).tokens == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_resuming_from_a_block_equals_a_fresh_forward(family, families):
    target = families[family]
    plain = generate(target, None, PROMPTS[0], max_new_tokens=20)
    assert generate(target, Resuming(512, 3), PROMPTS[0], max_new_tokens=20).tokens == plain.tokens


@pytest.mark.parametrize("limit", [3, 4, 5, 8])
@pytest.mark.parametrize("wants", [(), (0, 6)])
def test_a_resumed_tree_that_is_cut_or_wanted_whole_is_verified_whole(limit, wants, tiny):
    """Near the limit drafts are cut out of the middle of a depth-first tree, whose early keys keep their old order."""
    prompt = PROMPTS[2]
    plain = generate(tiny, None, [prompt], max_new_tokens=limit, eos_ids=()).tokens
    proposer = ResumingTree(plain, 512, 3, wants)
    assert generate(tiny, proposer, [prompt], max_new_tokens=limit, eos_ids=()).tokens == plain


def test_observed_states_cover_exactly_the_committed_context(tiny):
    """The invariant, with values: what the proposer was shown, put together, is the states of the whole sequence."""
    proposer = RandomTrees(512, seed=2)
    result = generate(tiny, proposer, PROMPTS, max_new_tokens=20, eos_ids=())
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, result.tokens, strict=True)):
        whole = torch.tensor([prompt + tokens])
        for layer in (1, 7):
            seen = torch.cat(proposer.seen[row][layer])
            assert len(seen) == whole.shape[1] - 1
            torch.testing.assert_close(seen, tiny.states(whole, [layer])[layer][0, :-1], atol=1e-3, rtol=1e-3)


def test_an_idle_row_at_the_end_of_the_context_stops_nobody(tiny):
    """A finished row stays in the batch until half of it idles; its pads must not ask for positions beyond the last."""
    prompts = [[7] * (2048 - 20), PROMPTS[0] * 4, PROMPTS[2] * 4]
    plain = generate(tiny, None, prompts, max_new_tokens=20, eos_ids=()).tokens
    drafts = [plain[0], *([(token + 1) % 512 for token in row] for row in plain[1:])]
    assert generate(tiny, Oracle(drafts, 4, 512), prompts, max_new_tokens=20, eos_ids=()).tokens == plain


def test_a_tiny_temperature_is_greedy(tiny):
    greedy = generate(tiny, None, PROMPTS[0], max_new_tokens=12)
    for temperature in (1e-6, 1e-40, 1e-50):  # the last is 0 in float32
        cold = generate(tiny, None, PROMPTS[0], max_new_tokens=12, sampling=Sampling(temperature))
        assert cold.tokens == greedy.tokens


def test_a_tree_beyond_the_room_is_named(tiny):
    plain = generate(tiny, None, PROMPTS[0], max_new_tokens=90, eos_ids=()).tokens
    with pytest.raises(ValueError, match="at most 64"):
        generate(tiny, Oracle([plain], 65, 512), PROMPTS[0], max_new_tokens=90, eos_ids=())


def test_tokens_stream_as_they_are_committed(tiny):
    got = {}
    result = generate(
        tiny,
        RandomTrees(512),
        PROMPTS,
        max_new_tokens=9,
        on_tokens=lambda row, tokens: got.setdefault(row, []).extend(tokens),
    )
    assert [got[row] for row in range(3)] == result.tokens


def test_no_end_token_works(five):
    """transformers PR#46790."""
    assert five.eos_ids == ()
    assert len(generate(five, None, [1, 2], max_new_tokens=15).tokens) == 15


@pytest.mark.parametrize(
    ("prompt", "limit", "named"),
    [
        ([], 5, "at least one token"),
        ([[1], []], 5, "at least one token"),
        ([1], 0, "at least 1"),
        ([1] * 2040, 9, "fit"),
        ([512], 5, "0 to 511"),
        ([-1], 5, "0 to 511"),
        ([0.5], 5, "0 to 511"),
    ],
)
def test_what_cannot_be_decoded_is_a_user_error(prompt, limit, named, tiny):
    with pytest.raises(UserError, match=named):
        generate(tiny, None, prompt, max_new_tokens=limit)
