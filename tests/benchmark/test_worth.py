"""A study of drafters that never were: τ made from a known slope is found again, its sign too, in numbers and words."""

import csv
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from specwave.app.worth import write_study
from specwave.artifacts import Selection, UserError
from specwave.benchmark.paper import certainty
from specwave.benchmark.results import Result
from specwave.benchmark.worth import ALL_SIZES, ONE_SIZE, RANDOM, Worth, estimates, read
from specwave.benchmark.worth_text import sentence, signed

SETS = [(layer,) for layer in range(9)] + [(layer, 20) for layer in range(9)] + [(layer, 20, 25) for layer in range(10)]
SLOPE, NOISE = -0.2, 0.01  # τ per nat, of sets of one size; between seeds


def entropy(layers):
    return 0.3 * layers[0] / 9 + 0.4 * len(layers)


class Made:
    """A folder with a selection, drafters' cards, and their results."""

    def __init__(self, root):
        self.root, self.draw = root, np.random.default_rng(0)
        self.easy = 1.6 + 0.2 * self.draw.normal(size=39)
        beam = [
            {
                "layers": list(layers), "entropy": entropy(layers), "origin": ["random"] if place % 2 else ["top"],
                "predictors": {"entropy": entropy(layers), "entropy_frobenius": 1 - entropy(layers), "ridge": 0.1,
                               "cka": None if len(layers) == 1 else 0.5 + 0.01 * layers[0]},
            }
            for place, layers in enumerate(SETS)
        ]  # fmt: skip
        chosen = Selection(
            "made_up", "f", 30, "spread", 1, [0], 0.0, beam, [0.0] * 30, [0.0] * 29, {}, settings={}
        )  # fmt: skip
        chosen.save(root / "select" / "selection.json")
        self.worth = Worth(str(root / "select"), [str(root / "short")])
        self.results = [self.drafter(layers, 0) for layers in SETS] + [self.drafter(layers, 1) for layers in SETS[::4]]
        for layers in SETS:
            self.card(root / "short" / "drafters" / self.name(layers), layers, 2, 1.2 - 0.1 * entropy(layers))

    def name(self, layers):
        return "L" + "-".join(map(str, layers))

    def card(self, folder, layers, seed, tau_hat, fingerprint="f"):
        folder.mkdir(parents=True, exist_ok=True)
        card = {
            "layers": list(layers), "switches": {}, "data": {"seed": seed}, "target": {"fingerprint": fingerprint},
            "training": {"step": 350, "validation": {} if tau_hat is None else {"tau_hat": tau_hat}},
        }  # fmt: skip
        (folder / "card.json").write_text(json.dumps(card))
        return folder

    def drafter(self, layers, seed, fingerprint="f", validated=True, questions="q"):
        folder = self.root / f"seed{seed}" / self.name(layers)
        tau_hat = 1.5 + SLOPE * entropy(layers) + 0.3 * len(layers) if validated else None
        self.card(folder, layers, seed, tau_hat, fingerprint)
        tau = self.easy + SLOPE * entropy(layers) + 0.3 * len(layers) + NOISE * self.draw.normal() + 0.05 * seed
        records = [
            {"question_id": place, "category": "qa", "accepted": 1000 * own, "rounds": 1000}
            for place, own in enumerate(tau)
        ]
        settings = {"checkpoint": str(folder), "fingerprint": "f", "target": "made_up", "decoding": {"levels": 3}}
        settings |= {"benchmark": {"fingerprint": questions}}
        overall = {"tau": float(tau.mean()), "tokens_per_second": None, "speedup": None}
        content = {"method": "eagle3", "label": self.name(layers), "per_question": records, "settings": settings}
        return Result(self.root / "evaluate" / f"{self.name(layers)}_{seed}", content | {"overall": overall})

    def study(self):
        return read(self.results, self.worth)


@pytest.fixture
def made(tmp_path):
    return Made(tmp_path)


def found_in(study):
    return {(one.outcome, one.predictor.name, one.scope): one for one in estimates(study)}


def test_the_slope_is_found_again(made):
    found = found_in(made.study())
    own = found["tau", "entropy", ONE_SIZE].found
    assert own.groups == 28
    assert own.slope.value == pytest.approx(SLOPE, abs=0.05)
    assert own.slope.interval[0] < SLOPE < own.slope.interval[1] < 0
    assert found["tau_hat", "entropy", ONE_SIZE].found.slope.value == pytest.approx(SLOPE)
    assert found["tau", "entropy_frobenius", ONE_SIZE].found.slope.sign == 1  # 1 − entropy
    assert found["tau", "short", ONE_SIZE].found.slope.sign == 1
    assert found["tau", "entropy", ALL_SIZES].found.slope.sign == 1  # larger sets have more of both
    assert found["tau", "entropy", RANDOM].found.groups == 14
    assert found["tau", "entropy", "m = 3"].found.groups == 10


def test_a_predictor_that_says_nothing_of_some_sets(made):
    found = found_in(made.study())
    assert found["tau", "cka", ONE_SIZE].found.groups == 19  # one layer resembles nothing
    assert ("tau", "cka", "m = 1") not in found
    assert not any(name == "ridge" for _, name, _ in found)  # the same for all


def test_words_say_what_numbers_say(made):
    found = found_in(made.study())
    one = found["tau", "entropy", ONE_SIZE]
    slope = one.found.slope
    said = sentence(one)
    assert said.startswith(f"Among sets of one size, 0.1 nat of raw entropy is worth −{abs(slope.value) / 10:.3f} τ (−")
    assert f"to {signed(slope.interval[1] / 10)}): below 0; ρ −" in said
    assert said.endswith("28 sets.")
    unsure = dataclasses.replace(slope, value=0.01, interval=[-0.2, 0.3])
    said = sentence(dataclasses.replace(one, found=dataclasses.replace(one.found, slope=unsure)))
    assert "is worth +0.001 τ (−0.020 to +0.030): the sign is open" in said
    assert [signed(value) for value in (-0.0001, 0.0, 0.0126)] == ["0.000", "0.000", "+0.013"]


def test_noise_between_seeds(made):
    study = made.study()
    assert (study.first, study.seeds, len(study.repeated)) == (0, [0, 1], 7)
    noise = study.noise("tau")
    assert noise.deviation == pytest.approx(NOISE, rel=0.7)
    assert noise.shift[1] == pytest.approx(0.05, abs=0.02)
    assert study.noise("tau_hat").deviation == pytest.approx(0, abs=1e-9)


def test_the_seed_that_all_have_had_is_the_first(made):
    made.results = [made.drafter(layers, 4) for layers in SETS] + [made.drafter(layers, 1) for layers in SETS[:3]]
    assert made.study().first == 4


def test_one_drafter_of_a_third_seed_takes_nothing_away(made):
    made.results.append(made.drafter(SETS[1], 7))
    study = made.study()
    assert (study.seeds, len(study.repeated)) == ([0, 1], 7)
    assert study.noise("tau") is not None


def test_what_is_written(made, tmp_path):
    said, folder = [], tmp_path / "out"
    folder.mkdir()
    study = made.study()
    write_study(study, made.results, SimpleNamespace(folder=folder, say=said.append))
    names = {"worth.md", "worth.csv", "worth_sets.csv", "worth_questions.csv"}
    names |= {f"worth{kind}.{end}" for kind in ("", "_tau_hat") for end in ("png", "svg")}
    assert {path.name for path in folder.iterdir()} == names
    rows, sums, figures = (
        list(csv.DictReader((folder / f"{name}.csv").read_text().splitlines()))
        for name in ("worth_sets", "worth_questions", "worth")
    )
    assert len(rows) == 28 + 7
    assert len(sums) == 35 * 39
    for row in rows[:5]:  # τ from the sums that are kept
        own = [one for one in sums if (one["layers"], one["seed"]) == (row["layers"], row["seed"])]
        tau = sum(float(one["accepted"]) for one in own) / sum(float(one["rounds"]) for one in own)
        assert float(row["tau"]) == pytest.approx(tau, abs=1e-3)
    (row,) = [one for one in figures if (one["outcome"], one["predictor"], one["sets"]) == ("tau", "entropy", ONE_SIZE)]
    assert float(row["slope"]) == pytest.approx(SLOPE / 10, abs=0.005)
    assert float(row["slope_low"]) < float(row["slope"]) < float(row["slope_high"]) < 0
    text = (folder / "worth.md").read_text()
    assert "28 sets (9 of m = 1, 9 of m = 2, 10 of m = 3), each a drafter of 350 training steps; 7 of them with" in text
    assert all(line in text for line in said if line.startswith("Among"))
    drawn = (folder / "worth.svg").read_text()
    assert all(
        label in drawn
        for label in ("raw entropy (nats)", "mean CKA between layers", "m = 3", "the same sets again: ±0.0")
    )


def test_differences_over_seeds_are_in_a_report(made):
    results = made.results
    (table,) = [one for one in certainty(results, [one.label for one in results]) if "seeds" in one.title]
    assert len(table.rows) == 21  # every pair of seven sets
    for one, other, seeds, questions, tau, each, *_ in table.rows:
        assert (seeds, questions) == ("0, 1", 39)
        assert float(tau) == pytest.approx(np.mean([float(part) for part in each.split(", ")]), abs=1e-3)
        own = {result.label: result.content["overall"]["tau"] for result in results[28:]}
        assert float(each.split(", ")[1]) == pytest.approx(own[one] - own[other], abs=2e-3)


def test_no_table_without_seeds(made):
    results = made.results[:28]
    assert not [one for one in certainty(results, [one.label for one in results]) if "seeds" in one.title]


# ---------------------------------------------------------------- refusals


def refused(made):
    with pytest.raises(UserError) as caught:
        made.study()
    return caught.value.key, caught.value.remedy


def test_a_drafter_of_another_target(made):
    made.results[3] = made.drafter(SETS[3], 0, fingerprint="other")
    assert refused(made)[0] == "report"


def test_a_short_training_of_another_target(made):
    made.card(made.root / "short" / "drafters" / made.name(SETS[0]), SETS[0], 2, 1.3, fingerprint="other")
    assert refused(made)[0] == "worth.short"


def test_other_questions(made):
    made.results[3] = made.drafter(SETS[3], 0, questions="others")
    assert "other questions" in refused(made)[1]


def test_a_drafter_that_was_never_validated(made):
    made.results[3] = made.drafter(SETS[3], 0, validated=False)
    assert "never validated" in refused(made)[1]


def test_a_drafter_twice(made):
    made.results.append(made.drafter(SETS[3], 0))
    assert "twice" in refused(made)[1]


def test_other_ways_of_decoding(made):
    made.results[3].content["settings"]["decoding"] = {"name": "eagle3", "levels": 9}
    assert "decoded with other settings" in refused(made)[1]


def test_a_short_training_with_the_drafters_own_seed(made):
    made.card(made.root / "short" / "drafters" / made.name(SETS[0]), SETS[0], 1, 1.3)
    assert "their luck" in refused(made)[1]


def test_no_drafter_of_the_selection_at_all(made):
    made.results = []
    assert refused(made)[0] == "worth.groups"


def test_too_few_sets(made):
    made.results = made.results[:7]
    assert refused(made) == ("worth.groups", "at least 8 sets of the selection must have been trained and evaluated")


def test_a_selection_without_predictors(made):
    path = made.root / "select" / "selection.json"
    content = json.loads(path.read_text())
    del content["beam"][0]["predictors"]
    path.write_text(json.dumps(content))
    assert "selector=spread" in refused(made)[1]
