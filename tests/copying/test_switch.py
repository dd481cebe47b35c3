"""SwitchSD: what the probe reads, what it decides, the two ends of its threshold, drafts in one tree, bad folders."""

from __future__ import annotations

import json
import random
import re
import shutil
from functools import partial

import pytest
import torch

from specwave.app import config as configs
from specwave.app.evaluate import main
from specwave.app.run import Run
from specwave.artifacts import UserError
from specwave.copying import BanditSpecDecoding, CopySpecDecoding, LastN, PldDecoding, switch
from specwave.copying.composite import FirstOf
from specwave.copying.folder import read_probe, write_probe
from specwave.copying.hindsight import OracleDecoding
from specwave.copying.lookup import Lookup
from specwave.copying.switch import Probe, Switch, SwitchSdDecoding, merged, reads_probe
from specwave.decoding import Sampling, Tree, generate
from specwave.decoding.loop import ROOM
from specwave.eagle.export import TargetFacts, write_drafter
from specwave.target import Wants, load_target

PROMPTS = [[5, 9, 200, 31, 5, 9, 200, 80, 5, 9], [4], [300, 12, 12, 12, 8, 9, 12, 12, 12, 8], [7, 8, 9] * 5]
FIVE = [[1, 2, 3, 4, 1, 2], [0], [4, 4, 4, 3, 4, 4], [2, 0] * 6]
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(0.8, seed=4),
    "processed": Sampling(0.9, seed=5, top_k=40, top_p=0.95, repetition_penalty=1.2),
}


def copy(length=6):
    return Lookup(partial(LastN, 8, 1, "recent"), lambda _: length)


def probe(target, site="attention", layer=1, threshold=0.5):
    """Random weights: about half of the states are said to be copied."""
    draw = torch.Generator().manual_seed(8)
    return Probe(torch.randn(target.hidden_size, generator=draw), site, layer, threshold)


def constant(target, says):
    """Says the same of every state: σ(0) = 0.5."""
    return Probe(torch.zeros(target.hidden_size), "block", 0, 0.4 if says else 0.6)


# ---------------------------------------------------------------- in the loop


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "greedy"), ("qwen3", "sampled"), ("five", "greedy"), ("five", "processed")],
)
def test_output_is_the_targets(family, kind, families, five, neural):
    target, prompts = (five, FIVE) if family == "five" else (families[family], PROMPTS)
    limit, sampling = (40 if family == "five" else 20), SAMPLINGS[kind]
    plain = generate(target, None, prompts, max_new_tokens=limit, sampling=sampling)
    methods = {
        "chain": Switch(copy(), neural(target), probe(target)),
        "tree": Switch(copy(), neural(target, 3, top_k=3, total_token=12), probe(target, "block", 0)),
        "nothing": Switch(copy(), None, probe(target)),
        "together": Switch(copy(), neural(target, 3, top_k=3, total_token=12), probe(target), together=True),
        "two": Switch(copy(30), PldDecoding(2, 40).build(target), probe(target), together=True),
    }
    for name, proposer in methods.items():
        drafted = generate(target, proposer, prompts, max_new_tokens=limit, sampling=sampling)
        assert drafted.tokens == plain.tokens, name
        alone = generate(target, proposer, prompts[2], max_new_tokens=limit, sampling=sampling, sequence_ids=[2])
        assert alone.tokens == plain.tokens[2], name
        assert alone.accept_lengths == drafted.accept_lengths[2], name


def draws_of(made):
    return made.tokens, made.accept_lengths, made.draft_levels


@pytest.mark.parametrize("together", [False, True])
def test_a_probe_that_always_says_yes_copies_wherever_there_is_a_match(together, tiny, five, neural):
    for target, prompts in ((tiny, PROMPTS), (five, FIVE)):
        run = partial(generate, target, input_ids=prompts, max_new_tokens=24, eos_ids=())
        always = Switch(copy(), None if together else neural(target), constant(target, True), together)
        wanted = FirstOf({"copy": copy(), **({} if together else {"neural": neural(target)})})
        assert draws_of(run(always)) == draws_of(run(wanted))
        account, expected = always.ledger.of(3), wanted.ledger.of(3)
        for source in expected:
            for key in ("rounds", "hits", "drafted", "accepted"):
                assert account[source][key] == expected[source][key]
        assert set(account["copy"]["why"]) == {"probe"}


@pytest.mark.parametrize("together", [False, True])
def test_a_probe_that_always_says_no_leaves_the_neural_proposer_alone(together, tiny, five, neural):
    for target, prompts in ((tiny, PROMPTS), (five, FIVE)):
        run = partial(generate, target, input_ids=prompts, max_new_tokens=24, eos_ids=())
        never = Switch(copy(), neural(target, 3, top_k=3, total_token=9), constant(target, False), together)
        assert draws_of(run(never)) == draws_of(run(neural(target, 3, top_k=3, total_token=9)))
        for row in range(len(prompts)):
            account = never.ledger.of(row)
            assert account["copy"]["rounds"] == 0
            assert set(account["neural"]["why"]) <= {"no occurrence", "probe says no"}


@pytest.mark.parametrize("site", ["attention", "block"])
def test_the_probe_reads_the_state_that_the_last_token_was_chosen_by(site, five):
    """With n tokens committed: a forward over n − 1 of them, its last state; and the rule, round by round."""
    given, seen = probe(five, site, 1), []

    class Watched(Switch):
        def decide(self, contexts):
            why = super().decide(contexts)
            for one in contexts:
                seen.append((list(one.tokens), self.probe.state(one) if len(one.tokens) > 1 else None, why[one.row]))
            return why

    generate(five, Watched(copy(), None, given), FIVE, max_new_tokens=16)
    assert {why for *_, why in seen} == {"probe", "probe says no", "no occurrence"}
    for tokens, state, why in seen:
        assert (why == "no occurrence") == (tokens[-1] not in tokens[:-1])
        if state is None:  # a prompt of one token: nothing has been forwarded
            continue
        session = five.session(1, len(tokens))
        direct = session.forward(torch.tensor([tokens[:-1]]), wants=Wants((1,), (1,)), logits=False)
        expected = (direct.attentions if site == "attention" else direct.blocks)[1][0, -1]
        torch.testing.assert_close(state, expected, atol=1e-4, rtol=1e-4)
        chance = float((expected @ given.weights).sigmoid())
        if tokens[-1] in tokens[:-1] and abs(chance - 0.5) > 1e-3:
            assert why == ("probe" if chance >= 0.5 else "probe says no")


def test_every_round_is_on_the_account_with_its_reason(five, neural):
    proposer = Switch(copy(), neural(five), probe(five), together=True)
    made = generate(five, proposer, FIVE, max_new_tokens=30)
    sources = set()
    for row, lengths in enumerate(made.accept_lengths):
        account = proposer.ledger.of(row)
        sources |= {source for source, tally in account.items() if tally["rounds"]}
        assert sum(tally["rounds"] for tally in account.values()) == len(lengths)
        assert sum(tally["accepted"] for tally in account.values()) == sum(lengths) - len(lengths)
        for source, whys in {"copy+neural": {"probe"}, "copy": {"probe"}}.items():
            if source in account:
                assert set(account[source]["why"]) <= whys
        assert account["copy"]["draft_seconds"] > 0
    assert {"copy+neural", "neural"} <= sources


# ---------------------------------------------------------------- one tree


def paths(tree):
    """Every draft by the tokens from the root to it."""
    found = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_two_trees_of_the_worked_example():
    one, other = Tree.chain([1, 2, 3]), Tree(torch.tensor([1, 4, 9]), torch.tensor([-1, 0, -1]))
    found = merged(one, other)
    assert (found.tokens.tolist(), found.parents.tolist()) == ([1, 2, 3, 4, 9], [-1, 0, 1, 0, -1])
    assert found.check() == 3


def random_tree(draw, size):
    tokens, parents, taken = [], [], set()
    for place in range(size):
        parent, token = draw.randrange(-1, place), draw.randrange(4)
        if (parent, token) not in taken and parent < len(tokens):
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return Tree(torch.tensor(tokens, dtype=torch.int64), torch.tensor(parents, dtype=torch.int64))


def test_merged_trees_hold_the_paths_of_both_once():
    draw = random.Random(0)
    for _ in range(300):
        one, other = random_tree(draw, draw.randrange(1, 9)), random_tree(draw, draw.randrange(1, 12))
        found = merged(one, other)
        found.check()
        ways = paths(found)
        assert len(ways) == len(set(ways))
        assert set(ways) == {*paths(one), *paths(other)}
        assert ways[: len(one)] == paths(one)
        room = draw.randrange(len(one), len(ways) + 1)
        cut = merged(one, other, room)
        cut.check()
        assert paths(cut) == ways[:room]


def test_a_sampled_chain_shares_no_tree():
    sampled = Tree.chain([1, 2], q=torch.full((2, 5), 0.2))
    with pytest.raises(UserError, match=r"decoding.together=true: copies share a tree with deterministic drafts only"):
        merged(Tree.chain([1]), sampled)


def test_a_tree_that_is_too_large_is_cut(five):
    wide = Tree(torch.arange(60), torch.full((60,), -1))
    found = merged(Tree.chain(list(range(10))), wide)
    assert len(found) == ROOM
    assert found.parents[:10].tolist() == list(range(-1, 9))


# ---------------------------------------------------------------- folders


def card_of(target, **changes):
    rows = [
        {"site": site, "layer": layer, "threshold": 0.2 + 0.01 * layer + 0.3 * (site == "block")}
        for site in ("attention", "block")
        for layer in range(target.num_layers)
    ]
    choice = {"site": "attention", "layer": 3, "threshold": 0.77, "by": "throughput"}
    return {"offset": 1, "n_train": 5, "choice": choice, "sites": rows, **changes}


def weights_of(target):
    return torch.arange(2.0 * target.num_layers)[:, None].expand(-1, target.hidden_size)


@pytest.fixture
def folder(tiny, tmp_path):
    write_probe(tmp_path / "probe", tiny, weights_of(tiny), card_of(tiny))
    return tmp_path / "probe"


def test_what_is_written_is_read(folder, tiny):
    found = read_probe(folder)
    assert torch.equal(found.weights["attention"], weights_of(tiny)[:8])
    assert torch.equal(found.weights["block"], weights_of(tiny)[8:])
    assert found.card["target"]["fingerprint"] == tiny.fingerprint
    assert found.card["layer_convention"] == "block_output"
    assert (found.threshold("attention", 3), found.threshold("block", 3)) == (0.77, pytest.approx(0.53))
    assert read_probe(folder.parent).sha256 == found.sha256  # a run's folder


@pytest.mark.parametrize(
    ("changes", "weight", "expected"),
    [
        ({}, 3.0, ("attention", 3, 0.77)),
        ({"site": "block"}, 11.0, ("block", 3, 0.53)),
        ({"layer": 5}, 5.0, ("attention", 5, 0.25)),
        ({"layer": 7, "site": "block", "threshold": 0.9}, 15.0, ("block", 7, 0.9)),
        ({"threshold": 0.1}, 3.0, ("attention", 3, 0.1)),
    ],
)
def test_what_is_not_given_is_the_cards(changes, weight, expected, folder, tiny):
    proposer = SwitchSdDecoding(None, str(folder), **changes).build(tiny)
    assert (proposer.probe.site, proposer.probe.layer, proposer.probe.threshold) == (
        *expected[:2],
        pytest.approx(expected[2]),
    )
    assert set(proposer.probe.weights.tolist()) == {weight}
    used = proposer.settings
    assert (used.site, used.layer, used.threshold) == (*expected[:2], pytest.approx(expected[2]))
    assert used.probe_sha256 == read_probe(folder).sha256
    assert proposer.wants([]) == (
        Wants((), (expected[1],)) if expected[0] == "attention" else Wants((expected[1],), ())
    )


def test_the_copys_length_by_the_card_and_the_clock(folder, tiny, monkeypatch):
    monkeypatch.setattr(switch, "clock", lambda target, invariant: lambda tokens: 1 + 0.01 * tokens)
    settings = SwitchSdDecoding(None, str(folder), length="auto")
    with pytest.raises(UserError, match=r"probe_checkpoint=.*damaged or of another kind .*copies"):
        settings.build(tiny)
    rows = [
        {"length": length, "copies": 9, "drafted": length, "accepted": right, "others": 99 - 9 * right}
        for length, right in ((4, 4), (12, 8), (16, 10), (48, 10))
    ]
    for found, expected in ((rows, 16), (rows[:1], 4)):
        write_probe(folder, tiny, weights_of(tiny), card_of(tiny, copies=found))
        proposer = settings.build(tiny)
        assert proposer.settings.length == expected
        assert proposer.copy.length(None) == expected
    write_probe(folder, tiny, weights_of(tiny), card_of(tiny, copies=[rows[0] | {"length": 65}]))
    with pytest.raises(UserError, match=r"probe_checkpoint=.*of a length that no round verifies"):
        settings.build(tiny)
    for changes in ({"accepted": 5}, {"drafted": 4.5}):
        write_probe(folder, tiny, weights_of(tiny), card_of(tiny, copies=[rows[0] | changes]))
        with pytest.raises(UserError, match=r"probe_checkpoint=.*more are accepted than drafted"):
            settings.build(tiny)
    write_probe(folder, tiny, weights_of(tiny), card_of(tiny, copies=[rows[0] | {"others": -1}]))
    with pytest.raises(UserError, match=r"probe_checkpoint=.*numbers of rounds"):
        settings.build(tiny)
    write_probe(folder, tiny, weights_of(tiny), card_of(tiny, copies=rows))
    for changes in ({"layer": 5}, {"threshold": 0.5}, {"n": 4}, {"occurrence": "first"}):
        with pytest.raises(UserError, match=r"decoding.length=auto: what copies bring is known for the probe's own"):
            SwitchSdDecoding(None, str(folder), length="auto", **changes).build(tiny)
    write_probe(folder, tiny, weights_of(tiny), card_of(tiny, copies=[]))
    with pytest.raises(UserError, match=r"decoding.length=auto: no copy was triggered"):
        settings.build(tiny)


def test_a_copy_goes_on_with_itself_at_the_end_of_the_text(folder, tiny, context_of):
    copy = SwitchSdDecoding(None, str(folder)).build(tiny).copy
    context = context_of([9, 1, 2, 3, 1, 2, 3])
    copy.begin([context])
    assert copy.copied(context) == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]


def test_a_probe_is_found_within_other_methods(folder):
    switch = SwitchSdDecoding(None, str(folder))
    within = [
        BanditSpecDecoding({"a": switch, "b": PldDecoding()}),
        OracleDecoding({"a": switch, "b": None}),
        CopySpecDecoding(switch),
        CopySpecDecoding(OracleDecoding({"a": switch})),
    ]
    assert all(map(reads_probe, [switch, *within]))
    assert not any(map(reads_probe, [PldDecoding(), CopySpecDecoding(None), OracleDecoding({"a": PldDecoding()})]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"threshold": 0.0}, "decoding.threshold=0.0: must be between 0 and 1"),
        ({"threshold": 1.0}, "decoding.threshold=1.0: must be between 0 and 1"),
        ({"n": 65}, "decoding.n=65"),
        ({"length": 0}, "decoding.length=0"),
        ({"length": "long"}, "decoding.length=long: must be auto, or a number from 1 to 64"),
        ({"layer": 8}, "decoding.layer=8: layer 8 is unknown: .* has layers 0 to 7"),
        ({"layer": -1}, "decoding.layer=-1: layer -1 is unknown"),
        ({"probe": None}, "probe_checkpoint=null: decoding=switchsd needs a probe: give the folder"),
        ({"probe": "nowhere"}, "probe_checkpoint=nowhere: there is no such folder"),
    ],
)
def test_mistakes(changes, words, folder, tiny):
    with pytest.raises(UserError, match=words):
        SwitchSdDecoding(**{"neural": None, "probe": str(folder), **changes}).build(tiny)


def test_a_probe_of_another_target_is_refused(folder, families, five):
    other = families["qwen2"]
    settings = SwitchSdDecoding(None, str(folder))
    with pytest.raises(UserError, match=r"this probe was trained on another target .*allow_other_target=true"):
        settings.build(other)
    assert settings.build(other, allow_other_target=True).probe.layer == 3
    with pytest.raises(UserError, match="this probe's target has the number of layers 8"):
        settings.build(five, allow_other_target=True)


def damage(folder, how, target):
    card = json.loads((folder / "card.json").read_text())
    if how == "no card":
        (folder / "card.json").unlink()
    elif how == "no weights":
        (folder / "probe.safetensors").unlink()
    elif how == "cut weights":
        path = folder / "probe.safetensors"
        path.write_bytes(path.read_bytes()[:-4])
    elif how == "nan":
        write_probe(folder, target, weights_of(target) * torch.nan, card_of(target))
    elif how == "layers":
        write_probe(folder, target, weights_of(target)[:-2], card_of(target))
    elif how == "own state":
        write_probe(folder, target, weights_of(target), card_of(target, offset=0))
    else:
        changed = {
            "kind": {"kind": "drafter"},
            "schema": {"schema": 7},
            "convention": {"layer_convention": "input"},
            "sites": {"sites": card["sites"][1:]},
            "choice": {"choice": {**card["choice"], "layer": 9}},
            "layer": {"sites": [{**card["sites"][0], "layer": "0"}, *card["sites"][1:]]},
            "half a layer": {"choice": {**card["choice"], "layer": 3.0}},
            "threshold": {"sites": [{**card["sites"][0], "threshold": 1.0}, *card["sites"][1:]]},
        }
        (folder / "card.json").write_text(json.dumps(card | changed[how]))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no card", "no probe: card.json and probe.safetensors"),
        ("no weights", "probe.safetensors: the file is damaged or of another kind"),
        ("cut weights", "probe.safetensors: the file is damaged or of another kind"),
        ("nan", "holds NaN or infinity"),
        ("layers", "the card says"),
        ("kind", "of kind 'drafter', a linear_probe is expected"),
        ("schema", "the schema of its card is 7"),
        ("convention", "its layer_convention is 'input'"),
        ("sites", "sites and layers of its figures"),
        ("choice", "its choice"),
        ("layer", "a layer that is no whole number"),
        ("half a layer", "a layer that is no whole number"),
        ("threshold", "a threshold outside of 0 … 1"),
        ("own state", "reads a token's own state"),
    ],
)
def test_a_damaged_folder_is_named(how, words, folder, tiny):
    damage(folder, how, tiny)
    with pytest.raises(UserError, match=words) as caught:
        SwitchSdDecoding(None, str(folder)).build(tiny)
    assert caught.value.key == "probe_checkpoint"
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- the door


def evaluate(folder, *overrides):
    small = ("model=tiny", "model.dtype=float32", "limit=2", "max_new_tokens=24")
    config = configs.build("evaluate", configs.check("evaluate", configs.compose("evaluate", [*small, *overrides])))
    folder.mkdir()
    main(config, Run(folder))
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    return json.loads((folder / "results.json").read_text()), rows


@pytest.fixture(scope="module")
def made(drafter_of, tmp_path_factory):
    """A drafter and a probe of model=tiny, which says yes to all: σ(0) = 0.5."""
    target, root = load_target("tiny", dtype="float32"), tmp_path_factory.mktemp("made")
    facts = TargetFacts(target.name, target.fingerprint, target.num_layers)
    write_drafter(root / "drafter", drafter_of(target), facts, dtype=torch.float32)
    weights = torch.zeros(2 * target.num_layers, target.hidden_size)
    choice = {"site": "block", "layer": 2, "threshold": 0.4}
    write_probe(root / "run/probe", target, weights, card_of(target, choice=choice))
    return root


def test_the_door(made, tmp_path):
    overrides = ("decoding=switchsd", f"probe_checkpoint={made}/run", f"checkpoint={made}/drafter")
    results, rows = evaluate(tmp_path / "run", *overrides)
    assert results["method"] == "switchsd"
    assert results["overall"]["exact_match_rate"] == 1.0
    used = results["settings"]["decoding"]
    assert (used["name"], used["site"], used["layer"], used["threshold"]) == ("switchsd", "block", 2, 0.4)
    assert used["probe"] == f"{made}/run"
    assert re.fullmatch("[0-9a-f]{64}", used["probe_sha256"])
    assert used["neural"]["name"] == "eagle3"
    turns = [turn for row in rows for turn in row["specwave"]["sources"]]
    assert {source for turn in turns for source in turn} <= {"copy", "neural", "plain"}
    for source in ("copy", "neural"):
        assert sum(turn.get(source, {"rounds": 0})["rounds"] for turn in turns) > 0
    for row in rows:
        for turn, steps in zip(row["specwave"]["sources"], row["choices"][0]["decoding_steps"], strict=True):
            assert sum(tally["rounds"] for tally in turn.values()) == steps


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["decoding=switchsd"], "^probe_checkpoint=null: decoding=switchsd needs a probe"),
        (["decoding=pld", "probe_checkpoint=HERE/run"], "probe_checkpoint=.*: decoding=pld reads no probe: give null"),
        (["decoding=switchsd", "probe_checkpoint=HERE/drafter"], "its card is of kind None"),
        (["decoding=switchsd", "probe_checkpoint=HERE"], "no probe: card.json"),
        (["decoding=switchsd", "decoding.threshold=1"], "decoding.threshold=1.0: must be between 0 and 1"),
        (["decoding=switchsd", "decoding.site=mlp"], "choose one of attention, block"),
        (["decoding=switchsd", "decoding.neural.levels=0"], "^decoding.neural.levels=0: must be 1 to 64"),
        (
            ["decoding=switchsd", "probe_checkpoint=HERE/run", "decoding.layer=30"],
            "decoding.layer=30: layer 30 is unkn",
        ),
    ],
)
def test_mistakes_at_the_door(overrides, words, made, tmp_path):
    with pytest.raises(UserError, match=words):
        evaluate(tmp_path / "run", *(override.replace("HERE", str(made)) for override in overrides))


def test_a_probe_trained_anew_is_another_method(made, tmp_path):
    """An evaluation does not go on with other weights under the same name."""
    shutil.copytree(made / "run", tmp_path / "probe")
    first, _ = evaluate(tmp_path / "one", "decoding=switchsd", f"probe_checkpoint={tmp_path}/probe", "limit=1")
    target = load_target("tiny", dtype="float32")
    write_probe(tmp_path / "probe/probe", target, torch.ones(16, 64), card_of(target))
    config = configs.build(
        "evaluate",
        configs.check(
            "evaluate",
            configs.compose(
                "evaluate",
                ["model=tiny", "model.dtype=float32", "limit=1", "max_new_tokens=24", "decoding=switchsd",
                 f"probe_checkpoint={tmp_path}/probe"],
            ),
        ),
    )  # fmt: skip
    with pytest.raises(UserError, match=r"resume=.*probe_sha256"):
        main(config, Run(tmp_path / "one", resume=True))
    assert first["method"] == "switchsd"
