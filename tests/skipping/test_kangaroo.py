"""Kangaroo in the loop: chains of an adapter, two early exits, verification from the exit on; nothing but the speed."""

import json
from dataclasses import asdict, replace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from specwave.artifacts import UserError, conf_dir
from specwave.decoding import Sampling, Tree, generate
from specwave.eagle import load_drafter
from specwave.skipping import Adaptive, KangarooDecoding, LayerSkipDecoding, adapter_folder
from specwave.skipping.adapter import Adapter, AdapterConfig, initialise
from specwave.skipping.adapter_folder import read_adapter, write_adapter
from specwave.skipping.kangaroo import DoubleExit, Readings
from specwave.skipping.options import Kangaroo
from specwave.target import Session, load_target
from specwave.target.decoder import attend_causal
from specwave.target.tiny import make_tiny

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
PROMPTS = [[5, 9, 200, 31, 7, 7, 80], [4, 8], [300, 12, 12, 12, 8, 9, 10, 11, 400, 3, 17], [9] * 5]
NAMES = ["greedy", "nucleus", "penalty"]
SAMPLINGS = [Sampling(), Sampling(0.7, seed=11, top_p=0.9), Sampling(1.1, 3, repetition_penalty=1.2)]
EXIT = 3


def adapter_for(target, block=EXIT, noise=0.01):
    """One that starts as the plain exit and differs from it by chance."""
    adapter = Adapter(AdapterConfig.of_target(target.arch, block))
    initialise(adapter, target)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        weight = adapter.self_attn["o_proj"].weight
        weight.copy_(noise * torch.randn(weight.shape, generator=draw))
    return adapter.requires_grad_(False)


def method(target, kind=DoubleExit, block=EXIT, noise=0.01, **settings):
    return kind(target, adapter_for(target, block, noise), KangarooDecoding(**{"gamma": 4, "stop": 0.0} | settings))


def by_hand(target, adapter, tokens, count):
    """Greedy drafts, each by the adapter over the whole text, without a cache."""
    text = list(tokens)
    for _ in range(count):
        states = target.states(torch.tensor([text]), [adapter.config.exit - 1])[adapter.config.exit - 1]
        turn = tuple(table[: len(text), None] for table in target.rope)
        text.append(int(target.lm_head(adapter(states, turn, attend_causal)[0, -1]).argmax()))
    return text[len(tokens) :]


# ---------------------------------------------------------------- drafts


class Checked(DoubleExit):
    """Every draft of every round against the one by hand; each third round's drafts are given up for others, and each
    fifth is drafted by nobody."""

    rounds, drafted = 0, 0

    def propose(self, contexts):
        trees, self.rounds = super().propose(contexts), self.rounds + 1
        for context, tree in zip(contexts, trees, strict=True):
            assert tree.tokens.tolist() == by_hand(self.target, self.adapter, context.tokens, len(tree))
            self.drafted += len(tree)
        if self.rounds % 5 == 0:
            return [Tree.empty() for _ in contexts]
        return [Tree.chain([3, 4, 5]) for _ in contexts] if self.rounds % 3 == 0 else trees


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS, [[7], *PROMPTS]], ids=["one", "four", "a root alone"])
def test_chains_are_what_the_adapter_makes_of_the_whole_text(prompts, mild):
    """Whoever drafted the rounds before, while rows of other lengths end and leave the batch."""
    target = mild[FAMILIES[len(prompts) % 4]]
    free = generate(target, None, prompts, max_new_tokens=24, eos_ids=()).tokens
    ends = (free[0][-1],) if len(prompts) == 1 else tuple({free[0][2], free[1][9], free[2][17]})
    expected = generate(target, None, prompts, max_new_tokens=24, eos_ids=ends).tokens
    checked = method(target, Checked)
    assert generate(target, checked, prompts, max_new_tokens=24, eos_ids=ends).tokens == expected
    assert checked.drafted > 20


def test_rows_that_are_not_asked_keep_what_they_know(mild):
    """As within a composite whose rows go different ways: one row of three is drafted for at a time."""
    target = mild["llama"]

    class One(Checked):
        def propose(self, contexts):
            mine = contexts[self.rounds % len(contexts)]
            (tree,) = super().propose([mine])
            return [tree if context is mine else Tree.empty() for context in contexts]

    plain = generate(target, None, PROMPTS[1:], max_new_tokens=16).tokens
    assert generate(target, method(target, One), PROMPTS[1:], max_new_tokens=16).tokens == plain


def test_an_untaught_adapter_drafts_as_the_plain_exit(mild):
    """Its output projection is zero: LayerSkip's chains, token for token."""
    for family, sampling in zip(FAMILIES, [*SAMPLINGS, SAMPLINGS[0]], strict=True):
        target = mild[family]
        plain = LayerSkipDecoding(exit=EXIT, gamma=4).build(target)
        made = [
            generate(target, one, PROMPTS, max_new_tokens=20, sampling=sampling)
            for one in (plain, method(target, noise=0.0))
        ]
        assert made[0].tokens == made[1].tokens
        assert made[0].accept_lengths == made[1].accept_lengths


# ---------------------------------------------------------------- exact


@pytest.fixture
def forwards(monkeypatch):
    """(first block, last block or None, tokens a row) of every forward that is not a prompt's."""
    seen, forward = [], Session.forward

    def noted(self, tokens, *args, **more):
        new = (tokens if tokens is not None else more["hidden"]).shape[1]
        if more.get("logits", True) or more.get("end_block") is not None:
            seen.append((more.get("start_block", 0), more.get("end_block"), new))
        return forward(self, tokens, *args, **more)

    monkeypatch.setattr(Session, "forward", noted)
    return seen


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "four"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
def test_output_is_the_targets(prompts, family, sampling, mild, forwards):
    target = mild[family]
    plain = generate(target, None, prompts, max_new_tokens=24, sampling=sampling)
    forwards.clear()
    made = generate(target, method(target, stop=0.02), prompts, max_new_tokens=24, sampling=sampling)
    assert made.tokens == plain.tokens
    assert made.rounds < plain.rounds  # some drafts were accepted
    assert {start for start, _, new in forwards if new > 1} == {EXIT}  # every verification went on from the exit
    assert {end for start, end, _ in forwards if start == 0} <= {EXIT, None}


def test_going_on_is_verifying_afresh(mild):
    """The same trees without the states to go on from: the same logits at every node of every round."""

    class Noted(DoubleExit):
        afresh = False

        def propose(self, contexts):
            trees = super().propose(contexts)
            return [replace(tree, resume=None) for tree in trees] if self.afresh else trees

        def observe(self, verdicts):
            super().observe(verdicts)
            self.logits += [(verdict.context.row, verdict.logits.clone()) for verdict in verdicts]

    for sampling in SAMPLINGS[:2]:
        found = []
        for afresh in (False, True):
            noted = method(mild["qwen3"], Noted)
            noted.afresh, noted.logits = afresh, []
            tokens = generate(mild["qwen3"], noted, PROMPTS, max_new_tokens=16, sampling=sampling).tokens
            found.append((tokens, noted.logits))
        assert found[0][0] == found[1][0]
        for (row, one), (other, two) in zip(found[0][1], found[1][1], strict=True):
            assert row == other
            torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-3)  # float32, other shapes of the same sums


def test_batch_invariant_decoding(mild_folders):
    """In bfloat16 too, every token is plain decoding's; where linear layers round by their shape it is refused."""
    half = load_target(mild_folders["llama"], dtype="bfloat16", device="cpu")
    if half.least_rows is None:
        with pytest.raises(UserError, match="batch_invariant"):
            generate(half, None, PROMPTS, max_new_tokens=12, batch_invariant=True)
        return
    plain = generate(half, None, PROMPTS, max_new_tokens=12, batch_invariant=True).tokens
    assert generate(half, method(half), PROMPTS, max_new_tokens=12, batch_invariant=True).tokens == plain


# ---------------------------------------------------------------- the two exits, by hand


@pytest.mark.parametrize(
    ("probabilities", "stop", "drafts"),
    [
        ([0.9, 0.7, 0.5, 0.95, 0.9, 0.8], 0.6, 3),  # the table at the head of kangaroo.py
        ([0.59, 0.9, 0.9, 0.9, 0.9, 0.9], 0.6, 1),
        ([0.9, 0.7, 0.61, 0.95, 0.9, 0.8], 0.6, 6),  # ended by its length
        ([0.9, 0.7, 0.5, 0.3, 0.9, 0.8], 0.4, 4),
    ],
)
def test_a_chain_ends_behind_its_first_unlikely_draft(probabilities, stop, drafts, mild, forwards, monkeypatch):
    target, given = mild["llama"], iter(probabilities)

    def scripted(self, contexts, hidden_RD):
        p = next(given)
        logits = torch.full((1, target.vocab_size), (1 - p) / (target.vocab_size - 1)).log()
        logits[0, 40] = torch.tensor(p).log()
        return logits

    monkeypatch.setattr(Readings, "read", scripted)

    class Once(DoubleExit):
        trees = None

        def propose(self, contexts):
            if self.trees is None:
                self.trees = super().propose(contexts)
                return self.trees
            return [Tree.empty() for _ in contexts]

    once = method(target, Once, gamma=6, stop=stop)
    generate(target, once, PROMPTS[0], max_new_tokens=12)
    assert len(once.trees[0]) == drafts
    assert list(given) == probabilities[drafts:]  # the adapter read root and all drafts but the last
    assert forwards[: drafts + 2] == [(0, EXIT, 1)] * (drafts + 1) + [(EXIT, None, drafts + 1)]


# ---------------------------------------------------------------- settings and the folder


def test_the_yaml_repeats_the_defaults():
    for path, settings in (("decoding", KangarooDecoding()), ("drafter", Kangaroo())):
        content = yaml.safe_load((conf_dir() / f"{path}/kangaroo.yaml").read_text(encoding="utf-8"))
        place = "skipping" if path == "decoding" else "skipping.options"
        assert content.pop("_target_") == f"specwave.{place}.{type(settings).__name__}"
        assert content == asdict(settings)
    assert KangarooDecoding.label == KangarooDecoding.takes == adapter_folder.METHOD
    assert KangarooDecoding(stop=Adaptive()).rule() == Adaptive()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: KangarooDecoding(gamma=0), "decoding.gamma=0: must be 1 to 64"),
        (lambda: KangarooDecoding(stop=1.5), "decoding.stop=1.5: is a probability"),
        (lambda: KangarooDecoding(stop=None), "decoding.stop=null: a probability"),
        (lambda: Kangaroo(exit=0), "drafter.exit=0: a number of blocks"),
        (lambda: Kangaroo(exit=2.5), "drafter.exit=2.5: a number of blocks"),
        (lambda: Kangaroo(exit=float("nan")), "drafter.exit=nan: a number of blocks"),
        (lambda: Kangaroo(lr=0.0), "drafter.lr=0.0: must be > 0"),
        (lambda: Kangaroo(clip=float("inf")), "drafter.clip=inf: must be > 0"),
        (lambda: Kangaroo(betas=[0.9]), "drafter.betas=[0.9]: must be two"),
        (lambda: Kangaroo(weight_decay=-1.0), "drafter.weight_decay=-1.0: must be"),
        (lambda: Kangaroo(warmup=1.0), "drafter.warmup=1.0: must be in"),
        (lambda: Kangaroo(export_dtype="float16"), "drafter.export_dtype=float16: must be one of"),
    ],
)
def test_bad_settings_are_user_errors(make, words):
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value).startswith(words)


@pytest.fixture
def folder(mild, tmp_path):
    write_adapter(tmp_path / "kangaroo", adapter_for(mild["llama"]), mild["llama"], dtype=torch.float32)
    return tmp_path / "kangaroo"


def test_a_folder_gives_the_adapter_back(folder, mild):
    adapter, card = read_adapter(folder)
    mine = adapter_for(mild["llama"])
    assert adapter.config == mine.config
    assert all(torch.equal(mine.state_dict()[name], tensor) for name, tensor in adapter.state_dict().items())
    assert (card["method"], card["exit"]) == ("kangaroo", EXIT)
    assert card["target"]["fingerprint"] == mild["llama"].fingerprint
    built = KangarooDecoding(gamma=4, stop=0.0).build(mild["llama"], folder)
    made = generate(mild["llama"], built, PROMPTS, max_new_tokens=12)
    assert (
        made.accept_lengths == generate(mild["llama"], method(mild["llama"]), PROMPTS, max_new_tokens=12).accept_lengths
    )


def test_an_adapter_that_was_not_written_to_the_end_is_none(folder, mild, monkeypatch):
    before = (folder / "model.safetensors").read_bytes()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(adapter_folder, "write_json", full)
    with pytest.raises(OSError, match="no space"):
        write_adapter(folder, adapter_for(mild["llama"], noise=0.5), mild["llama"], dtype=torch.float32)
    assert (folder / "model.safetensors").read_bytes() != before
    with pytest.raises(UserError, match=r"card\.json is missing"):
        read_adapter(folder)


def changed(name, **more):
    def change(folder):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | more))

    return change


def tensors(**more):
    def change(folder):
        weights = load_file(folder / "model.safetensors") | more
        save_file({name: one for name, one in weights.items() if one is not None}, folder / "model.safetensors")

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "card.json").unlink(), "card.json is missing"),
        (lambda folder: (folder / "card.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"torn"), "damaged"),
        (lambda folder: (folder / "model.safetensors").unlink(), "damaged"),
        (changed("card.json", method="eagle3"), "its card is of method 'eagle3'"),
        (changed("card.json", schema=9), "the schema of its card is 9"),
        (changed("card.json", layer_convention="block_input"), "layer_convention is 'block_input'"),
        (changed("card.json", exit=4), "another exit"),
        (changed("card.json", target={"name": "x"}), "damaged"),
        (changed("config.json", exit=8), "another exit"),
        (lambda folder: [changed(name, exit=8)(folder) for name in ("card.json", "config.json")], "an exit at 8 of 8"),
        (lambda folder: [changed(name, exit=0)(folder) for name in ("card.json", "config.json")], "an exit at 0 of 8"),
        (changed("config.json", head_dim=7), "damaged"),
        (tensors(**{"norm.weight": torch.full((64,), torch.nan)}), "norm.weight holds NaN"),
        (tensors(**{"norm.weight": None}), "damaged"),
        (tensors(**{"lm_head.weight": torch.zeros(2, 2)}), "damaged"),
    ],
)
def test_damaged_folders_are_user_errors(change, words, folder, mild):
    change(folder)
    with pytest.raises(UserError) as caught:
        KangarooDecoding().build(mild["llama"], folder)
    assert caught.value.key == "checkpoint"
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_adapters_of_other_targets_are_refused(folder, mild, five, tmp_path):
    with pytest.raises(UserError, match=r"checkpoint=null: decoding=kangaroo needs its adapter"):
        KangarooDecoding().build(mild["llama"])
    with pytest.raises(UserError, match=r"card\.json is missing"):
        KangarooDecoding().build(mild["llama"], tmp_path / "nowhere")
    other = load_target(make_tiny(tmp_path / "other"), dtype="float32")  # as large, other weights
    with pytest.raises(UserError, match="was trained for another target"):
        KangarooDecoding().build(other, folder)
    built = KangarooDecoding().build(other, folder, allow_other_target=True)
    plain = generate(other, None, PROMPTS[0], max_new_tokens=8).tokens
    assert generate(other, built, PROMPTS[0], max_new_tokens=8).tokens == plain
    with pytest.raises(UserError, match=r"this adapter's target has .*=.*: train one for it"):
        KangarooDecoding().build(five, folder, allow_other_target=True)
    with pytest.raises(UserError, match="method 'kangaroo', no EAGLE-3 drafter: use decoding=kangaroo"):
        load_drafter(folder, mild["llama"])
