"""`train.py task=probe` from prompts to a probe that decodes, on a tiny target whose answers run into loops."""

from __future__ import annotations

import csv
import json

import pytest
import torch

from specwave.app import config as configs
from specwave.app.run import Run
from specwave.app.train import main
from specwave.artifacts import UserError
from specwave.copying.folder import read_probe
from specwave.copying.prompts import probe_prompts
from specwave.copying.settings import BuiltinPrompts, JsonlPrompts
from specwave.copying.simulate import LENGTHS
from specwave.copying.switch import SwitchSdDecoding
from specwave.data.conversations import user_prompt_ids
from specwave.decoding import generate
from specwave.target import Wants, load_target
from specwave.target.tiny import make_tiny

DOMAINS = ("code", "prose", "reasoning")
COUNT, NEW = 24, 32


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A model of small weights and prompts for it: of 1,152 tokens that it answered, 464 were copied."""
    folder = tmp_path_factory.mktemp("probe")
    make_tiny(folder / "model", initializer_range=0.12, eos_token_id=None)
    with open(folder / "prompts.jsonl", "w") as stream:
        for number in range(COUNT):
            text = f"say {'ab' * (number % 5)} {number} " + "xy z " * (number % 4)
            domain = DOMAINS[number % 3]
            row = {"prompt": text, "kind": f"{domain[:2]}{number % 2}", "domain": domain}
            stream.write(json.dumps(row) + "\n")
    return folder


def overrides(root, *more):
    return [
        "model=tiny",
        "model.dtype=float32",
        f"model.source={root}/model",
        "task=probe",
        "probe=linear",
        "probe_data=jsonl",
        f"probe_data.path={root}/prompts.jsonl",
        f"probe_data.max_new_tokens={NEW}",
        "probe_data.batch_size=24",
        "probe.states.dtype=float32",
        "probe.resamples=50",
        *more,
    ]


def trained(root, folder, *more):
    """(facts of the run, lines on the console)."""
    config = configs.build("train", configs.check("train", configs.compose("train", overrides(root, *more))))
    folder.mkdir()
    run, said = Run(folder), list[str]()
    run.say = said.append
    main(config, run)
    return run.facts, said


@pytest.fixture(scope="module")
def done(root):
    return root / "run", *trained(root, root / "run")


def read(path):
    with open(path, newline="") as stream:
        return list(csv.DictReader(stream))


def parts_of(root):
    target = load_target(root / "model", dtype="float32")
    data = JsonlPrompts(path=str(root / "prompts.jsonl"), max_new_tokens=NEW, batch_size=24)
    return target, data.parts(target, data.prompts())


def test_what_a_run_leaves(done):
    folder, facts, said = done
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    pictures = {f"{name}.{kind}" for name in ("auc_over_depth", "calibration") for kind in ("png", "svg")}
    tables = {"layers.csv", "triggers.csv", "transfer.csv", "transfer.md"}
    assert names == {"probe/card.json", "probe/probe.safetensors"} | pictures | tables
    card = read_probe(folder).card
    assert [(row["site"], row["layer"]) for row in card["sites"]] == [
        (site, layer) for site in ("attention", "block") for layer in range(8)
    ]
    best = max(card["sites"], key=lambda row: row["validation_auc"])
    assert card["choice"] == {"by": "f1", **{key: best[key] for key in ("site", "layer", "threshold")}}
    assert {key: facts[key] for key in ("site", "layer", "auc", "f1")} == {
        key: best[key] for key in ("site", "layer", "auc", "f1")
    }
    assert (card["offset"], card["n_train"]) == (1, 5)
    assert [row["length"] for row in card["copies"]] == list(LENGTHS)
    for row in card["sites"]:
        assert 0 < row["threshold"] < 1
        assert 0 <= row["auc_low"] < row["auc_high"] <= 1
    assert card["data"]["trained_on"]["tokens"] == facts["tokens"] == NEW * card["data"]["answers"]["train"]
    assert "MB" in said[0]
    assert said[-2] == f"written: {folder / 'probe'}"


def test_parts_share_no_prompt(root):
    _, parts = parts_of(root)
    assert len(parts.all) == COUNT
    named = [{one.template for one in part} for part in (parts.train, parts.validation, parts.test)]
    assert len(set.union(*named)) == sum(map(len, named)) == COUNT
    assert len(parts.validation) > 2
    assert len(parts.test) > 2


def copied(ids, place, n=5):
    """By the definition: inside some window of n tokens that occurred before."""
    starts = range(max(0, place - n + 1), min(place, len(ids) - n) + 1)
    return any(ids[start : start + n] == ids[early : early + n] for start in starts for early in range(start))


def test_figures_are_those_of_the_written_weights(done, root):
    """The test prompts again: direct forwards, labels by their definition, AUC and the rule by counting."""
    folder, *_ = done
    target, parts = parts_of(root)
    probes, every = read_probe(folder), tuple(range(8))
    states, labels, again = {("attention", 2): [], ("block", 7): []}, [], []
    for one in parts.test:
        session = target.session(1, len(one.ids))
        direct = session.forward(torch.tensor([one.ids]), wants=Wants(every, every), logits=False)
        for site, layer in states:
            rows = (direct.attentions if site == "attention" else direct.blocks)[layer][0]
            states[site, layer].append(rows[one.start - 1 : -1])
        for place in range(one.start, len(one.ids)):
            labels.append(copied(one.ids, place))
            again.append(one.ids[place] in one.ids[:place])
    labels, again = torch.tensor(labels), torch.tensor(again)
    for (site, layer), rows in states.items():
        chances = (torch.cat(rows).double() @ probes.weights[site][layer].double()).sigmoid()
        wins = (chances[labels][:, None] > chances[~labels]).double().mean()
        row = next(row for row in probes.card["sites"] if (row["site"], row["layer"]) == (site, layer))
        assert float(wins) == pytest.approx(row["auc"], abs=2e-3)  # states of a batch differ in the last bits
        said = again & (chances >= row["threshold"])
        assert row["precision"] == pytest.approx(float(labels[said].double().mean()), abs=0.05)
        assert row["recall"] == pytest.approx(float(said[labels].double().mean()), abs=0.05)


def test_tables(done):
    folder, facts, said = done
    triggers = read(folder / "triggers.csv")
    whole = next(row for row in triggers if (row["part"], row["domain"]) == ("all", "all"))
    assert (int(whole["prompts"]), int(whole["tokens"])) == (COUNT, COUNT * NEW)
    assert int(whole["copied"]) <= int(whole["repeated"])
    assert facts["accidental"]["all"] == pytest.approx(1 - int(whole["copied"]) / int(whole["repeated"]))
    assert set(facts["accidental"]) == {"all", *DOMAINS}
    for column in ("tokens", "repeated", "copied"):
        by_domain = [int(row[column]) for row in triggers if row["part"] == "all" and row["kind"] == "all"][1:]
        assert sum(by_domain) == int(whole[column])
    tested = next(row for row in triggers if (row["part"], row["domain"]) == ("test", "all"))
    for figure in ("precision", "recall", "f1"):  # the rule that decodes: it stood before, and the probe says so
        assert float(tested[f"probe_{figure}"]) == pytest.approx(facts[figure])
    transfer = read(folder / "transfer.csv")
    assert [(row["trained_on"], row["tested_on"]) for row in transfer] == [
        (one, other) for one in ("all", *DOMAINS) for other in ("all", *DOMAINS)
    ]
    assert float(transfer[0]["auc"]) == pytest.approx(facts["auc"], abs=1e-3)  # the same probe, trained alone
    assert (folder / "transfer.md").read_text() in said[-4]


def test_another_run_takes_up_the_states(done, root):
    """Ablations capture nothing again: fewer prompts, other labels and offset, a site of one's own."""
    folder = root / "again"
    facts, said = trained(
        root, folder, "probe.kinds=[code,re1]", "probe.prompts=5", "probe.n_train=3", "probe.offset=0",
        "probe.threshold=throughput", "probe.site=attention", "probe.layer=2", "probe.resamples=0",
        "probe.transfer=false", "probe.epochs=1",
    )  # fmt: skip
    assert any(line.startswith("states: re-used from") for line in said)
    card = read_probe(folder).card
    assert card["data"]["trained_on"]["prompts"] == 5
    assert (card["offset"], card["n_train"]) == (0, 3)
    assert (card["choice"]["site"], card["choice"]["layer"], card["choice"]["by"]) == ("attention", 2, "throughput")
    simulated = read(folder / "simulated.csv")
    fastest = max(simulated, key=lambda row: float(row["tokens_per_second"]))
    assert float(fastest["threshold"]) == card["choice"]["threshold"] == facts["threshold"]
    assert facts["auc_low"] is None
    assert not (folder / "transfer.csv").exists()


def test_the_probe_decodes(done, root):
    folder, *_ = done
    target, parts = parts_of(root)
    prompts = [one.ids[: one.start] for one in parts.test]
    proposer = SwitchSdDecoding(None, str(folder)).build(target)
    made = generate(target, proposer, prompts, max_new_tokens=NEW)
    assert made.tokens == [one.ids[one.start :] for one in parts.test]
    whys = {why for row in range(len(prompts)) for tally in proposer.ledger.of(row).values() for why in tally["why"]}
    assert whys == {"probe", "probe says no", "no occurrence"}
    assert sum(proposer.ledger.of(row)["copy"]["accepted"] for row in range(len(prompts))) > 0


def test_a_dry_run_says_what_it_would_take(root, tmp_path):
    facts, said = trained(root, tmp_path / "run", "dry_run=true")
    assert facts == {"prompts": COUNT, "bytes_at_most": COUNT * (NEW + 1) * 16 * 64 * 4}
    assert "4,096 bytes a token" in said[0]
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["task=train"], "^task=train: probe=linear is for task=probe"),
        (["probe.layer=8"], "^probe.layer=8: layer 8 is unknown: tiny has layers 0 to 7"),
        (["probe.layer=-1"], "^probe.layer=-1: must be ≥ 0"),
        (["probe.site=mlp"], "choose one of attention, block"),
        (["probe.n_train=1000"], r"^probe.n_train=1000: none of the \d+ training answers has so many tokens"),
        (["probe.n_train=31"], r"^probe.n_train=31: of the \d+ tokens of \d+ training answers none is copied"),
        (["probe.kinds=[poetry]"], r"no training prompt is of the kind poetry; there are co0, co1, code, pr0"),
        (["probe.offset=2"], "^probe.offset=2: must be 1"),
        (["probe.l2=[]"], r"^probe.l2=\[\]: give at least one penalty"),
        (["probe_data.held_out=1"], "^probe_data.held_out=1.0: must be a share"),
        (["probe_data.path=nowhere.jsonl"], "^probe_data.path=nowhere.jsonl: there is no such file"),
        (["probe_data.max_new_tokens=3000"], "^probe_data.max_new_tokens=3000: .* leave no room .*lower it"),
    ],
)
def test_mistakes(more, words, root, tmp_path):
    with pytest.raises(UserError, match=words) as caught:
        trained(root, tmp_path / "run", *more)
    assert "\n" not in str(caught.value)


def test_the_task_needs_a_probe():
    with pytest.raises(UserError, match=r"^probe=none: task=probe trains a probe: add probe=linear"):
        configs.build("train", configs.check("train", configs.compose("train", ["model=tiny", "task=probe"])))


def test_prompts_without_room_are_passed_over_with_a_warning(root, tmp_path):
    short = make_tiny(tmp_path / "short", initializer_range=0.12, eos_token_id=None, max_position_embeddings=48)
    target = load_target(short, dtype="float32")
    data = JsonlPrompts(path=str(root / "prompts.jsonl"), max_new_tokens=8)
    prompts = data.prompts()
    asked = user_prompt_ids(target, [(str(place), one.kind, one.text) for place, one in enumerate(prompts)])
    fitting = [one for one, (_, _, ids) in zip(prompts, asked, strict=True) if len(ids) <= 40]
    assert 0 < len(fitting) < COUNT
    with pytest.warns(UserWarning, match=rf"{COUNT - len(fitting)} of {COUNT} prompts leave no room.*passed over"):
        found = data.answered(target, prompts)
    assert [(one.template, one.kind, one.domain) for one in found] == [
        (one.template, one.kind, one.domain) for one in fitting
    ]
    assert {one.tokens for one in found} == {8}


def test_the_builtin_prompts_are_the_templates():
    assert BuiltinPrompts(count=40, seed=3).prompts() == probe_prompts(40, 3)
