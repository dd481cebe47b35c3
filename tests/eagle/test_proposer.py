"""EAGLE-3 in the loop: the output is the target's, the drafts are those of a drafter recomputed from scratch."""

from dataclasses import asdict

import pytest
import torch
import yaml

from specwave.artifacts import UserError, conf_dir
from specwave.decoding import BaseProposer, Sampling, Tree, generate, stream
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


def afresh(drafter, target, tokens, path=()):
    """(logits [V_d] after the drafts `path`, keys [G, T, d] and values of the true slots): no cache, one explicit
    attention over all slots and drafts."""
    ids = torch.tensor([tokens])
    states = target.states(ids[:, :-1], drafter.config.layers)
    hidden = drafter.fuse([states[layer] for layer in drafter.config.layers])
    kept_keys, kept_values = [], []
    embeddings, positions = target.embed(ids[:, 1:]), torch.arange(len(tokens) - 1)[None]
    share = drafter.config.num_heads // drafter.config.num_kv_heads

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
    for level, token in enumerate(path):
        position = torch.tensor([[len(tokens) - 1 + level]])
        hidden = drafter.forward_step(target.embed(torch.tensor([[token]])), hidden, attend, position)
    return drafter.logits(hidden)[0, -1], kept_keys[0][0], kept_values[0][0]


def from_scratch(drafter, target, tokens, levels):
    """The chain a drafter drafts after `tokens`."""
    drafts = []
    for _ in range(levels):
        drafts.append(int(drafter.draft_ids[afresh(drafter, target, tokens, drafts)[0].argmax()]))
    return drafts


def grown_afresh(drafter, target, tokens, shape):
    """The tree drafted after `tokens`, every node's logits from a path of its own: ([target ids], [parents], logits of
    every reading [N, V_d])."""
    growth, paths, read = shape.start(1), [()], []
    while True:
        read.append(torch.stack([afresh(drafter, target, tokens, path)[0] for path in paths]))
        frontier = growth.add(read[-1][None])
        if frontier is None:
            ids, parents = growth.finish()
            return drafter.draft_ids[ids[0]].tolist(), parents[0].tolist(), read
        ids = drafter.draft_ids[frontier.ids[0]].tolist()
        source = [0] * len(ids) if frontier.source is None else frontier.source[0].tolist()
        paths = [(*paths[above], token) for above, token in zip(source, ids, strict=True)]


class Recorded(Eagle3):
    """Keeps every draft with the context it was made for."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.drafted = []

    def propose(self, contexts):
        trees = super().propose(contexts)
        for context, tree in zip(contexts, trees, strict=True):
            self.drafted.append((list(context.tokens), tree.tokens.tolist(), tree.parents.tolist()))
        return trees


class Compared(Eagle3):
    """Holds every tree, every logit and the cache of every round against a drafter without a cache."""

    def __init__(self, drafter, target, **settings):
        super().__init__(drafter, target, **settings)
        self.original, self.trees, self.read = drafter, 0, []
        score = self.drafter.logits
        self.drafter.logits = lambda hidden: self.read.append(score(hidden)) or self.read[-1]

    def propose(self, contexts):
        self.read = []
        trees = super().propose(contexts)
        for context, tree in zip(contexts, trees, strict=True):
            if len(context.tokens) == 1 or context.remaining == 1:
                assert len(tree) == 0
                continue
            place = self.places[context.row]
            ids, parents, read = grown_afresh(self.original, self.target, context.tokens, self.shape)
            for ours, theirs in zip(self.read, read, strict=True):
                # Float32: sums in another order through one block of width 64.
                torch.testing.assert_close(ours[place], theirs, rtol=1e-5, atol=1e-5)
            assert (tree.tokens.tolist(), tree.parents.tolist()) == (ids, parents)
            self.check_cache(place, context.tokens)
            self.trees += 1
        return trees

    def check_cache(self, place, tokens):
        """What a round leaves behind: the slots of the committed tokens' true states and nothing else."""
        cache, count = self.drafts.cache, len(tokens) - 1
        assert cache.lengths[place] == count
        _, keys, values = afresh(self.original, self.target, tokens)
        torch.testing.assert_close(cache.keys[0][place, :, :count], keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(cache.values[0][place, :, :count], values, rtol=1e-5, atol=1e-5)


FIXED = [[0], [1], [3], [0, 0], [0, 2], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 1]]


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["batch", "alone"])
@pytest.mark.parametrize(
    "settings",
    [
        {"levels": 4},
        {"levels": 4, "top_k": 4, "total_token": 20},
        {"levels": 2, "top_k": 5},
        {"levels": 1, "top_k": 6, "total_token": 4},
        {"levels": 3, "tree": FIXED},
    ],
    ids=["chain", "dynamic", "all", "one level", "fixed"],
)
def test_trees_equal_those_of_a_drafter_without_a_cache(settings, prompts, tiny):
    proposer = Compared(drafter_for(tiny, (1, 4, 6)), tiny, **settings)
    with torch.no_grad():
        generate(tiny, proposer, prompts, max_new_tokens=9)
    assert proposer.trees > 6 * len(prompts)


@pytest.mark.parametrize("settings", [{"levels": 3}, {"levels": 3, "top_k": 4, "total_token": 16}])
def test_a_row_of_a_batch_drafts_what_it_drafts_alone(settings, families):
    target = families["qwen3"]
    drafter = drafter_for(target, (2, 4, 5))
    together = Recorded(drafter, target, **settings)
    prompts = [*PROMPTS, [8] * 30]
    generate(target, together, prompts, max_new_tokens=15)
    for prompt in prompts:
        alone = Recorded(drafter, target, **settings)
        generate(target, alone, prompt, max_new_tokens=15)
        mine = [entry for entry in together.drafted if entry[0][: len(prompt)] == prompt]
        assert mine == alone.drafted


@pytest.mark.parametrize("total_token", [30, 60])
@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3"])
def test_output_with_trees_is_the_targets(family, total_token, families):
    target = families[family]
    proposer = Eagle3(drafter_for(target, (2, 4, 5), 500), target, levels=5, top_k=10, total_token=total_token)
    prompts = [*PROMPTS, [8] * 30]
    plain = generate(target, None, prompts, max_new_tokens=40)
    drafted = generate(target, proposer, prompts, max_new_tokens=40)
    assert drafted.tokens == plain.tokens
    assert drafted.rounds < plain.rounds  # some drafts were accepted
    for row, prompt in enumerate(prompts):
        alone = generate(target, proposer, prompt, max_new_tokens=40)
        assert alone.tokens == plain.tokens[row]
        assert alone.accept_lengths == drafted.accept_lengths[row]
    sampling = Sampling(0.8, seed=4)
    keyed = generate(target, None, prompts, max_new_tokens=20, sampling=sampling)
    assert generate(target, proposer, prompts, max_new_tokens=20, sampling=sampling).tokens == keyed.tokens


class Sometimes(BaseProposer):
    """Asks its child for a row's draft every `turn[row]` rounds only, as composites do."""

    def __init__(self, child, turn):
        self.child, self.turn, self.round = child, turn, 0
        self.wants, self.begin, self.end, self.observe = child.wants, child.begin, child.end, child.observe

    def propose(self, contexts):
        self.round += 1
        asked = [context for context in contexts if self.round % self.turn[context.row] == 0]
        made = dict(zip([context.row for context in asked], self.child.propose(asked), strict=True))
        return [made.get(context.row, Tree.empty()) for context in contexts]


def test_rows_left_alone_for_long_catch_up(tiny):
    """Row 1 has 17 slots to catch up on when row 0 is near the end of the cache: padding must not reach past it."""
    child = Compared(drafter_for(tiny, (1, 4, 6)), tiny, levels=2, top_k=2, total_token=5)
    prompts = [[8] * 30, PROMPTS[1]]
    plain = generate(tiny, None, prompts, max_new_tokens=32, eos_ids=())
    with torch.no_grad():
        drafted = generate(tiny, Sometimes(child, [1, 18]), prompts, max_new_tokens=32, eos_ids=())
    assert drafted.tokens == plain.tokens
    assert child.trees > 18


def test_rows_that_end_leave_the_drafters_batch(tiny):
    """Half of the batch or more idling: the drafter's cache shrinks, the rest drafts on as it would alone."""
    drafter = drafter_for(tiny, (1, 4, 6))
    prompts = [*PROMPTS, [9] * 5, [31, 7] * 3]
    plain = generate(tiny, None, prompts, max_new_tokens=24, eos_ids=())
    lone = plain.tokens[4]
    stop = next(token for token in plain.tokens[0] if token not in lone)
    ends = {stop, *(row[3] for row in plain.tokens[1:4])} - set(lone)
    together, alone = (Compared(drafter, tiny, levels=2, top_k=3, total_token=8) for _ in range(2))
    with torch.no_grad():
        drafted = generate(tiny, together, prompts, max_new_tokens=24, eos_ids=tuple(ends))
        assert drafted.tokens[4] == generate(tiny, alone, prompts[4], max_new_tokens=24, eos_ids=()).tokens
    assert together.drafts.cache.batch < 5


@pytest.mark.parametrize("layers", [(1, 4, 6), (7,), (0, 7)])
def test_drafts_equal_a_drafter_recomputed_from_scratch(layers, tiny):
    drafter = drafter_for(tiny, layers)
    proposer = Recorded(drafter, tiny, levels=4)
    generate(tiny, proposer, PROMPTS, max_new_tokens=12)
    checked = [(tokens, drafts) for tokens, drafts, _ in proposer.drafted if drafts]
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
    assert any(drafts for _, drafts, _ in proposer.drafted)
    assert all(not drafts for tokens, drafts, _ in proposer.drafted if len(tokens) > 11)
    assert not any(proposer.waiting.values())  # nothing is kept for drafts that will not be made


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


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"levels": 0}, "decoding.levels=0: must be 1 to 64"),
        ({"levels": 65}, "decoding.levels=65: must be 1 to 64"),
        ({"top_k": 0}, "decoding.top_k=0: must be 1 (a chain) to 64"),
        ({"top_k": 10, "total_token": 1}, "decoding.total_token=1: counts the root"),
        ({"total_token": "most"}, "decoding.total_token=most: must be auto, null, or a number from 2 to 65"),
        ({"total_token": "auto", "levels": 3}, "decoding.levels=3: total_token=auto chooses it"),
        ({"total_token": "auto", "top_k": 3}, "decoding.top_k=3: total_token=auto chooses it"),
        ({"top_k": 10, "total_token": 66}, "decoding.total_token=66: counts the root"),
        ({"total_token": 30}, "decoding.total_token=30: top_k=1 is a chain"),
        ({"levels": 6, "top_k": 10}, "decoding.total_token=null: there are 510 candidates, one round verifies 64"),
        ({"tree": []}, "decoding.tree=[]: a fixed tree names"),
        ({"tree": [[0], [1, 0]]}, "decoding.tree=[[0], [1, 0]]: [1, 0] hangs on [1], which is missing"),
        ({"tree": [[0]]}, "decoding.levels=2: the tree has 1 levels: give decoding.levels=1"),
        ({"tree": FIXED, "levels": 3, "top_k": 4}, "decoding.top_k=4: the tree says"),
        ({"tree": FIXED, "levels": 3, "total_token": 10}, "decoding.total_token=10: the tree says"),
        ({"tree": [[i] for i in range(65)], "levels": 1}, "decoding.tree=65 drafts: one round verifies 64"),
    ],
)
def test_bad_settings_are_user_errors(settings, words):
    with pytest.raises(UserError) as caught:
        Eagle3Decoding(**settings)
    assert str(caught.value).startswith(words)


def test_what_needs_a_drafter_says_so(tiny):
    with pytest.raises(UserError, match="needs a drafter"):
        Eagle3Decoding().build(tiny)
    with pytest.raises(UserError, match="knows 3 tokens"):
        Eagle3(drafter_for(tiny, (5,), 3), tiny, levels=1, tree=[[0], [3]])


def test_settings_reach_the_trees(tiny, tmp_path):
    """What conf/decoding/eagle3.yaml says is the default; every key changes what is drafted."""
    content = yaml.safe_load((conf_dir() / "decoding/eagle3.yaml").read_text(encoding="utf-8"))
    assert content.pop("_target_") == "specwave.eagle.Eagle3Decoding"
    assert content == asdict(Eagle3Decoding())
    facts = TargetFacts(tiny.name, tiny.fingerprint, tiny.num_layers)
    write_drafter(tmp_path / "d", drafter_for(tiny, (5,)), facts, dtype=torch.float32)
    for settings, sizes in (
        ({}, {2}),
        ({"levels": 5}, {5}),
        ({"levels": 3, "top_k": 6, "total_token": 30}, {29}),
        ({"levels": 2, "top_k": 7}, {7 + 49}),
        ({"levels": 3, "tree": FIXED}, {9}),
    ):
        built = Eagle3Decoding(**settings).build(tiny, tmp_path / "d")
        sized = []
        propose = built.propose
        built.propose = lambda contexts, propose=propose, sized=sized: sized.append(propose(contexts)) or sized[-1]
        generate(tiny, built, PROMPTS[0], max_new_tokens=6)
        assert {len(tree) for trees in sized for tree in trees} - {0} == sizes  # with one token left, none


def test_a_drafter_decodes_one_prompt_at_a_time(tiny):
    """A second decoding takes the drafter over: the first one says so, and closing it leaves the second whole."""
    drafter = Eagle3(drafter_for(tiny, (1, 4)), tiny, levels=2)
    plain = generate(tiny, None, PROMPTS[0], max_new_tokens=12).tokens
    first = stream(tiny, drafter, PROMPTS[2], max_new_tokens=12, skip_special_tokens=False)
    next(first)
    second = stream(tiny, drafter, PROMPTS[0], max_new_tokens=12, skip_special_tokens=False)
    pieces = [next(second)]
    first.close()
    assert "".join([*pieces, *second]) == tiny.tokenizer.decode(plain)
    again = stream(tiny, drafter, PROMPTS[2], max_new_tokens=12, skip_special_tokens=False)
    next(again)
    generate(tiny, drafter, PROMPTS[0], max_new_tokens=4)
    with pytest.raises(ValueError, match="has begun another decoding since"):
        list(again)
