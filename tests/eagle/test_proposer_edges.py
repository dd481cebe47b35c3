"""EAGLE-3 where prompts, positions, settings and memory end."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from specwave.artifacts import UserError
from specwave.decoding import generate
from specwave.eagle import Eagle3, load_drafter
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.frozen import FUSED, FrozenDrafter
from specwave.eagle.start import initialise
from specwave.eagle.vocab import build_vocab_map
from specwave.target import load_target
from specwave.target.linear import FrozenLinear
from specwave.target.tiny import make_tiny

PROMPTS = [[5, 9, 200, 31, 7, 7, 80], [4], [300, 12, 12, 12, 8, 9, 10, 11, 400, 3, 17]]


def drafter_for(target, layers=(1, 4, 6), size=200):
    d2t, t2d = build_vocab_map(torch.randint(0, 9, (target.vocab_size,)), size)
    drafter = Eagle3Drafter(DrafterConfig.of_target(target.arch, layers, size), d2t, t2d)
    initialise(drafter, target, "target", 0)
    return drafter


class Drafted(Eagle3):
    """Keeps (row, committed tokens, tokens left, drafts) of every round."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.drafted = []

    def propose(self, contexts):
        trees = super().propose(contexts)
        for context, tree in zip(contexts, trees, strict=True):
            self.drafted.append((context.row, len(context.tokens), context.remaining, len(tree)))
        return trees


@pytest.mark.parametrize("total_token", [30, 60])
@pytest.mark.parametrize("family", ["llama3", "qwen2"])
def test_trees_give_hugging_face_s_tokens(family, total_token, families, family_folders):
    model = AutoModelForCausalLM.from_pretrained(family_folders[family], dtype=torch.float32)
    target = families[family]
    settings = {"levels": 5, "top_k": 10, "total_token": total_token}
    proposer = Eagle3(drafter_for(target, (2, 4, 5), 500), target, **settings)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        wanted = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, len(prompt) :].tolist()
        assert generate(target, proposer, ids, max_new_tokens=24).tokens == wanted


@pytest.mark.parametrize("settings", [{"levels": 3}, {"levels": 3, "top_k": 4, "total_token": 12}], ids=str)
@pytest.mark.parametrize("room", [1, 2, 5])
def test_a_prompt_up_to_the_targets_last_position(room, settings, tmp_path):
    target = load_target(make_tiny(tmp_path / "short", max_position_embeddings=48), dtype="float32")
    prompt = torch.randint(0, 512, (48 - room,)).tolist()
    plain = generate(target, None, prompt, max_new_tokens=room, eos_ids=())
    proposer = Drafted(drafter_for(target), target, **settings)
    made = generate(target, proposer, [prompt, [7, 8, 9]], max_new_tokens=room, eos_ids=())
    assert made.tokens[0] == plain.tokens
    assert len(made.tokens[1]) == room


def test_one_row_of_a_batch_past_the_drafters_positions(tiny):
    """sglang#3574: it goes on undrafted, the others drafted."""
    drafter = drafter_for(tiny)
    drafter.config = replace(drafter.config, max_length=16)
    proposer = Drafted(drafter, tiny, levels=3)
    prompts = [[8] * 12, PROMPTS[1], [9] * 30]
    plain = generate(tiny, None, prompts, max_new_tokens=10, eos_ids=())
    assert generate(tiny, proposer, prompts, max_new_tokens=10, eos_ids=()).tokens == plain.tokens
    for row, length, left, count in proposer.drafted:
        assert (count > 0) == (1 < length <= 13 and left > 1), (row, length)
    assert {row for row, *_, count in proposer.drafted if count} == {0, 1}


def test_nothing_is_drafted_that_cannot_be_committed(tiny):
    """A row's last round commits the target's token alone; the others of the batch draft on."""
    proposer = Drafted(drafter_for(tiny), tiny, levels=2)
    plain = generate(tiny, None, PROMPTS, max_new_tokens=9, eos_ids=())
    assert generate(tiny, proposer, PROMPTS, max_new_tokens=9, eos_ids=()).tokens == plain.tokens
    assert any(left == 1 for _, _, left, _ in proposer.drafted)
    assert all((count == 0) == (left == 1 or length == 1) for _, length, left, count in proposer.drafted)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"levels": 5}, "levels"),
        ({"top_k": 4}, "top_k"),
        ({"tree": [[0], [1]]}, "tree"),
    ],
)
def test_what_the_clock_chooses_cannot_be_given_to_load_drafter(settings, key, tiny, tmp_path):
    with pytest.raises(UserError) as error:
        load_drafter(tmp_path / "none", tiny, total_token="auto", **settings)
    assert error.value.key == f"decoding.{key}"
    with pytest.raises(TypeError, match="typo"):
        load_drafter(tmp_path / "none", tiny, total_token="auto", typo=3)


def test_what_is_multiplied_in_one_is_not_packed_apart(tiny):
    frozen = FrozenDrafter(drafter_for(tiny), tiny)
    packed = {name.split(".")[-1] for name, part in frozen.named_modules() if hasattr(part, "run")}
    assert packed == {"fc", "o_proj", "down_proj", "lm_head"}
    apart = [part for name, part in frozen.named_modules() if name.split(".")[-1] in FUSED]
    assert len(apart) == len(FUSED)
    assert all(type(part) is torch.nn.Linear for part in apart)
    assert isinstance(frozen._qkv, FrozenLinear)


def test_states_that_are_no_numbers_break_no_other_row(tiny):
    """A drafter may say anything of one row: the batch decodes on, and the output is the target's."""
    proposer = Eagle3(drafter_for(tiny, size=500), tiny, levels=3, top_k=4, total_token=12)
    plain = generate(tiny, None, PROMPTS, max_new_tokens=12, eos_ids=())
    fair = generate(tiny, proposer, PROMPTS, max_new_tokens=12, eos_ids=())
    score = proposer.drafter.logits

    def poisoned(hidden):
        logits = score(hidden).clone()
        logits[0, -1] = torch.nan
        return logits

    proposer.drafter.logits = poisoned
    made = generate(tiny, proposer, PROMPTS, max_new_tokens=12, eos_ids=())
    assert made.tokens == plain.tokens
    assert made.accept_lengths[1:] == fair.accept_lengths[1:]
