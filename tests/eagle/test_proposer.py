"""EAGLE-3 in the loop: the output is the target's, the drafts are those of a drafter recomputed from scratch."""

import pytest
import torch

from specwave.artifacts import UserError
from specwave.decoding import Sampling, generate
from specwave.eagle import Eagle3, Eagle3Decoding, load_drafter
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.export import TargetFacts, write_drafter
from specwave.eagle.start import initialise
from specwave.eagle.vocab import build_vocab_map

PROMPTS = [[5, 9, 200, 31, 7, 7, 80], [4], [300, 12, 12, 12, 8, 9, 10, 11, 400, 3, 17]]


def drafter_for(target, layers, size=200):
    d2t, t2d = build_vocab_map(torch.randint(0, 9, (target.vocab_size,)), size)
    drafter = Eagle3Drafter(DrafterConfig.of_target(target.arch, layers, size), d2t, t2d)
    initialise(drafter, target, "target", 0)
    return drafter


def from_scratch(drafter, target, tokens, levels):
    """The chain a drafter drafts after `tokens`: no cache, one explicit attention over all slots and levels."""
    ids = torch.tensor([tokens])
    states = target.states(ids[:, :-1], drafter.config.layers)
    hidden = drafter.fuse([states[layer] for layer in drafter.config.layers])
    kept_keys, kept_values, drafts = [], [], []
    embeddings, positions = target.embed(ids[:, 1:]), torch.arange(len(tokens) - 1)[None]
    share = drafter.config.num_heads // drafter.config.num_kv_heads
    for level in range(levels):

        def attend(query, key, value):
            kept_keys.append(key)
            kept_values.append(value)
            keys = torch.cat(kept_keys, 2).repeat_interleave(share, 1)
            values = torch.cat(kept_values, 2).repeat_interleave(share, 1)
            score = query @ keys.transpose(2, 3) / query.shape[-1] ** 0.5
            new, every = query.shape[2], keys.shape[2]
            score = score.masked_fill(~torch.ones(new, every, dtype=torch.bool).tril(every - new), -torch.inf)
            return score.softmax(-1) @ values

        hidden = drafter.forward_step(embeddings, hidden, attend, positions)[:, -1:]
        drafts.append(int(drafter.draft_ids[drafter.logits(hidden)[0, -1].argmax()]))
        embeddings = target.embed(torch.tensor([[drafts[-1]]]))
        positions = torch.tensor([[len(tokens) - 1 + level]])
    return drafts


class Recorded(Eagle3):
    """Keeps every draft with the context it was made for."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.drafted = []

    def propose(self, contexts):
        trees = super().propose(contexts)
        self.drafted += [
            (list(context.tokens), tree.tokens.tolist()) for context, tree in zip(contexts, trees, strict=True)
        ]
        return trees


@pytest.mark.parametrize("layers", [(1, 4, 6), (7,), (0, 7)])
def test_drafts_equal_a_drafter_recomputed_from_scratch(layers, tiny):
    drafter = drafter_for(tiny, layers)
    proposer = Recorded(drafter, tiny, levels=4)
    generate(tiny, proposer, PROMPTS, max_new_tokens=12)
    checked = [(tokens, drafts) for tokens, drafts in proposer.drafted if drafts]
    assert len(checked) > 20
    with torch.no_grad():
        for tokens, drafts in checked:
            assert drafts == from_scratch(drafter, tiny, tokens, 4)


@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=4)])
def test_output_is_the_targets(family, sampling, families):
    target = families[family]
    proposer = Eagle3(drafter_for(target, (2, 4, 5)), target, levels=3)
    plain = generate(target, None, PROMPTS, max_new_tokens=25, sampling=sampling)
    drafted = generate(target, proposer, PROMPTS, max_new_tokens=25, sampling=sampling)
    assert drafted.tokens == plain.tokens
    for row, prompt in enumerate(PROMPTS):
        alone = generate(target, proposer, prompt, max_new_tokens=25, sampling=sampling, sequence_ids=[row])
        assert alone.tokens == plain.tokens[row]
        assert alone.accept_lengths == drafted.accept_lengths[row]


def test_past_the_drafters_positions_decoding_goes_on(tiny):
    """sglang#3574."""
    from dataclasses import replace

    drafter = drafter_for(tiny, (1, 4, 6))
    drafter.config = replace(drafter.config, max_length=14)
    proposer = Recorded(drafter, tiny, levels=3)
    plain = generate(tiny, None, PROMPTS[2], max_new_tokens=20, eos_ids=())
    assert generate(tiny, proposer, PROMPTS[2], max_new_tokens=20, eos_ids=()).tokens == plain.tokens
    assert any(drafts for _, drafts in proposer.drafted)
    assert all(not drafts for tokens, drafts in proposer.drafted if len(tokens) > 11)


def test_a_folder_becomes_a_proposer(tiny, families, tmp_path):
    facts = TargetFacts(tiny.name, tiny.fingerprint, tiny.num_layers)
    drafter = drafter_for(tiny, (5,))
    write_drafter(tmp_path / "d", drafter, facts, dtype=torch.float32)
    loaded = load_drafter(tmp_path / "d", tiny)
    assert loaded.layers == (5,)
    assert loaded.label == "L5"
    direct, again = Recorded(drafter, tiny, levels=3), Recorded(loaded.drafter, tiny, levels=3)
    for proposer in (direct, again):
        generate(tiny, proposer, PROMPTS, max_new_tokens=10)
    assert direct.drafted == again.drafted
    with pytest.raises(UserError, match="another target"):
        load_drafter(tmp_path / "d", families["mistral"])
    load_drafter(tmp_path / "d", families["mistral"], allow_other_target=True)


def test_bad_settings_are_user_errors(tiny):
    for levels in (0, 65):
        with pytest.raises(UserError, match="must be 1 to 64"):
            Eagle3Decoding(levels=levels)
    with pytest.raises(UserError, match="needs a drafter"):
        Eagle3Decoding().build(tiny)
