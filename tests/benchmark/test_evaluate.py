"""The evaluate door's main, without a command line: files, contracts, resume after a kill, baselines, reports."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from specwave.app.evaluate import EvaluateConfig, main
from specwave.app.run import Run
from specwave.artifacts import UserError, write_tensors
from specwave.benchmark import Benchmark
from specwave.benchmark.questions import CATEGORIES, SUBTASKS
from specwave.decoding import Autoregressive, BaseProposer, Sampling, Tree
from specwave.target import ModelConfig

BLOCK = {"tau", "tokens", "rounds", "tokens_per_second", "seconds_per_token", "speedup", "peak_memory_bytes"}
BLOCK |= {"exact_match_rate", "near_ties"}
PIXEL = (
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c626001000000ffff0300000600"
    "0557bfabd40000000049454e44ae426082"
)


@dataclass(frozen=True)
class Guessing:
    """A decoding method with a drafter that drafts one constant token."""

    levels: int = 2
    needs_checkpoint = True
    label = "eagle3"

    def build(self, target, checkpoint, allow_other_target=False):
        proposer = BaseProposer()
        proposer.propose_row = lambda context: Tree.chain([7] * self.levels)
        return proposer


@pytest.fixture(scope="module")
def model(family_folders):
    return ModelConfig("small", str(family_folders["llama"]), dtype="float32")


def evaluate(folder, model, **keys):
    folder.mkdir(parents=True, exist_ok=True)
    keys = {"decoding": Autoregressive(), "benchmark": Benchmark(), "limit": 13, "max_new_tokens": 6} | keys
    run = Run(folder)
    main(EvaluateConfig(model=model, **keys), run)
    return run


def drafter(folder, layers, num_layers=8, pictures=()):
    folder.mkdir(parents=True)
    for name in pictures:
        (folder / name).write_bytes(bytes.fromhex(PIXEL) + name.encode())
    card = {"method": "eagle3", "layers": layers, "target": {"num_layers": num_layers}, "pictures": list(pictures)}
    (folder / "card.json").write_text(json.dumps(card))
    write_tensors(folder / "model.safetensors", {"fc.weight": torch.zeros(8, 8 * len(layers))})
    return folder


def read(folder):
    return json.loads((folder / "results.json").read_text(), parse_constant=lambda name: pytest.fail(name))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A training run's folder: two drafters, their pictures, metrics.csv."""
    run = tmp_path_factory.mktemp("train")
    drafter(run / "drafters" / "L2-4-5", [2, 4, 5], pictures=["entropy.png", "cka.png"])
    drafter(run / "drafters" / "L7", [7], pictures=["entropy.png"])
    rows = ["L2-4-5/loss,L2-4-5/val_tau_hat,L7/loss,L7/val_tau_hat,step,tokens"]
    rows += [
        f"{3 - step / 50},{1.2 + step / 99 if step % 10 == 9 else ''},{3 - step / 60},,{step},9" for step in range(50)
    ]
    (run / "metrics.csv").write_text("\n".join(rows))
    return run


@pytest.fixture(scope="module")
def several(tmp_path_factory, model, trained):
    folder = tmp_path_factory.mktemp("runs") / "several"
    evaluate(folder, model, decoding=Guessing(), checkpoint=str(trained))
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("runs") / "bare"
    evaluate(folder, model)
    return folder


# ---------------------------------------------------------------- files and contracts


def test_bare_is_plain_decoding_and_its_own_baseline(bare):
    assert {path.name for path in bare.iterdir()} >= {"answers.jsonl", "results.json", "report.html", "table.md"}
    assert (bare / "baseline" / "results.json").read_text() == (bare / "results.json").read_text()
    content = read(bare)
    assert content["method"] == "autoregressive"
    assert content["overall"]["speedup"] == content["overall"]["tau"] == content["overall"]["exact_match_rate"] == 1.0
    assert len((bare / "answers.jsonl").read_text().splitlines()) == 13


def test_results_keep_the_contract(several):
    for place in (several / "baseline", several / "L2-4-5", several / "L7"):
        content = read(place)
        assert content["schema"] == 1
        assert list(content["subtasks"]) == list(SUBTASKS)
        assert list(content["categories"]) == list(CATEGORIES)
        blocks = [
            content["overall"],
            content["baseline"],
            *content["subtasks"].values(),
            *content["categories"].values(),
        ]
        assert all(set(block) >= BLOCK for block in blocks)
        assert set(content["definitions"]) >= BLOCK | {"wall_time"}
        assert content["settings"]["fingerprint"]
        assert content["settings"]["dtype"] == "float32"
        assert content["settings"]["benchmark"]["questions"] == 13
    assert read(several / "L2-4-5")["rule"] == "eagle3"
    assert read(several / "L7")["rule"] == "eagle2"
    assert read(several / "L2-4-5")["drafter"] == {"parameters": 192, "bytes": 768}
    assert read(several / "baseline")["drafter"] is None
    assert read(several / "L7")["overall"]["exact_match_rate"] == 1.0
    assert read(several / "L7")["settings"]["decoding"] == {"name": "eagle3", "levels": 2}


def test_figures_equal_those_recomputed_from_the_answers_files(several):
    """Nothing of specwave's in here: sums over lines of the two files."""

    def lines(place):
        return [json.loads(line) for line in (several / place / "answers.jsonl").read_text().splitlines()]

    for label in ("L2-4-5", "L7"):
        content = read(several / label)
        for category, block in [("", content["overall"]), *content["categories"].items()]:
            own = [line["choices"][0] for line in lines(label) if line["category"] == category or not category]
            plain = [line["choices"][0] for line in lines("baseline") if line["category"] == category or not category]
            lengths = [length for choice in own for length in choice["accept_lengths"]]
            tokens, seconds = (sum(sum(choice[name]) for choice in own) for name in ("new_tokens", "wall_time"))
            assert block["tau"] == sum(lengths) / len(lengths)
            assert (block["tokens"], block["rounds"]) == (tokens, len(lengths))
            assert block["tokens_per_second"] == pytest.approx(tokens / seconds, rel=1e-12)
            assert block["seconds_per_token"] == pytest.approx(seconds / tokens, rel=1e-12)
            rate = sum(sum(choice["new_tokens"]) for choice in plain) / sum(
                sum(choice["wall_time"]) for choice in plain
            )
            assert block["speedup"] == pytest.approx(tokens / seconds / rate, rel=1e-12)


def test_a_single_drafter_lies_in_the_run_folder_itself(tmp_path, model, trained):
    evaluate(tmp_path, model, decoding=Guessing(), checkpoint=str(trained / "drafters" / "L7"), limit=2)
    assert read(tmp_path)["method"] == "eagle3"
    assert read(tmp_path / "baseline")["method"] == "autoregressive"
    assert not (tmp_path / "L7").exists()


def test_the_drafter_that_comes_along_is_taken_for_its_target(tmp_path, model, monkeypatch):
    made = drafter(tmp_path / "assets" / "small", [2, 4, 5])
    card = json.loads((made / "card.json").read_text())
    card["target"]["fingerprint"] = model.identify().fingerprint
    (made / "card.json").write_text(json.dumps(card))
    monkeypatch.setattr("specwave.benchmark.drafters.assets_dir", lambda: tmp_path / "assets")
    evaluate(tmp_path / "needed", model, decoding=Guessing(), limit=1)
    evaluate(tmp_path / "asked", model, decoding=Guessing(), checkpoint="builtin", limit=1)
    evaluate(tmp_path / "plain", model, limit=1)
    for name, folder in (("needed", str(made)), ("asked", str(made)), ("plain", None)):
        assert read(tmp_path / name)["settings"]["checkpoint"] == folder
    card["target"]["fingerprint"] = "another"
    (made / "card.json").write_text(json.dumps(card))
    with pytest.raises(UserError, match=r"checkpoint=builtin: give a folder; specwave brings none for model=small"):
        evaluate(tmp_path / "other", model, decoding=Guessing(), checkpoint="builtin", limit=1)


def test_sampling_has_no_exactness(tmp_path, model):
    evaluate(tmp_path, model, limit=2, sampling=Sampling(1.0))
    overall = read(tmp_path)["overall"]
    assert (overall["exact_match_rate"], overall["near_ties"]) == (None, None)


def test_failed_answers_end_the_run_with_their_number(tmp_path, model):
    long = {"question_id": 2, "category": "qa", "turns": ["word " * 5000]}
    lines = [{"question_id": 1, "category": "qa", "turns": ["Why?"]}, long]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SystemExit, match="1 of 2 answers failed"):
        evaluate(tmp_path / "run", model, benchmark=Benchmark(str(tmp_path / "q.jsonl")))
    content = read(tmp_path / "run")
    assert (content["overall"]["questions"], content["overall"]["failed"]) == (1, 1)
    assert [failure["question_id"] for failure in content["failures"]] == [2]
    assert "question 2" in (tmp_path / "run" / "report.html").read_text()


def test_equal_layers_of_two_training_runs_get_labels_of_their_own(tmp_path, model, trained):
    other = drafter(tmp_path / "again" / "drafters" / "L7", [7]).parents[1]
    evaluate(tmp_path / "run", model, decoding=Guessing(), checkpoint=[str(trained), str(other)], limit=1)
    assert {path.parent.name for path in (tmp_path / "run").glob("*/results.json")} == {
        "baseline",
        "L2-4-5",
        "L7",
        "L7_2",
    }


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"checkpoint": "nowhere"}, r"checkpoint=nowhere: there is no such folder"),
        ({"checkpoint": []}, "checkpoint"),
        (
            {"decoding": Guessing()},
            "checkpoint=null: decoding=eagle3 needs a drafter: give its folder; specwave brings",
        ),
        ({"categories": ["cooking"]}, "categories=cooking"),
        ({"limit": 0}, "limit=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 2048}, "below the 2048 positions"),
        ({"report": []}, "report"),
        ({"report": ["nowhere"]}, "report=nowhere"),
        ({"baseline": "nowhere"}, "baseline=nowhere"),
    ],
)
def test_mistakes_name_key_value_and_remedy(tmp_path, model, keys, words):
    with pytest.raises(UserError, match=words):
        evaluate(tmp_path, model, **keys)
    assert not (tmp_path / "answers.jsonl").exists()


def test_a_folder_without_drafters_or_results_is_refused(tmp_path, model):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="neither a drafter folder"):
        evaluate(tmp_path / "run", model, checkpoint=str(tmp_path / "empty"))
    with pytest.raises(UserError, match=r"no results\.json"):
        evaluate(tmp_path / "run", model, report=[str(tmp_path / "empty")])


def test_a_drafter_named_twice_is_refused(tmp_path, model, trained):
    with pytest.raises(UserError, match="twice"):
        evaluate(tmp_path, model, decoding=Guessing(), checkpoint=[str(trained), str(trained / "drafters" / "L7")])


def test_going_on_with_another_drafter_in_the_same_folder_is_refused(tmp_path, model):
    """A folder that was trained anew is another drafter, whatever its name."""
    made = drafter(tmp_path / "d", [7])
    evaluate(tmp_path / "run", model, decoding=Guessing(), checkpoint=str(made), limit=2)
    write_tensors(made / "model.safetensors", {"fc.weight": torch.ones(8, 8)})
    with pytest.raises(UserError, match="checkpoint_sha256"):
        evaluate(tmp_path / "run", model, decoding=Guessing(), checkpoint=str(made), limit=2)


@pytest.mark.parametrize("changes", [{"overall": "x"}, {"overall": {}}, {"settings": [1]}, {"categories": 3}])
def test_a_damaged_results_file_is_named(tmp_path, model, bare, changes):
    content = read(bare)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "results.json").write_text(json.dumps(content | changes))
    with pytest.raises(UserError, match=r"results\.json: the file is damaged"):
        evaluate(tmp_path / "new", model, report=[str(tmp_path / "old")])


# ---------------------------------------------------------------- baselines of earlier runs


def test_a_run_notes_its_figures_for_the_table_of_a_sweep(tmp_path, model, trained, several):
    def overall(place):
        return {name: read(place)["overall"][name] for name in ("tau", "tokens_per_second", "speedup")}

    one = evaluate(tmp_path / "one", model, decoding=Guessing(), checkpoint=str(trained / "drafters" / "L7"), limit=2)
    assert one.facts == overall(tmp_path / "one")
    over = evaluate(tmp_path / "plain", model, baseline=str(tmp_path / "one"), limit=2)  # an earlier run's beside it
    assert over.facts == overall(tmp_path / "plain")
    both = evaluate(several, model, decoding=Guessing(), checkpoint=str(trained))
    labels = ("L2-4-5", "L7")
    assert both.facts == {f"{at} {name}": value for at in labels for name, value in overall(several / at).items()}


def test_an_earlier_baseline_is_taken_over(tmp_path, model, several, trained):
    checkpoint = str(trained / "drafters" / "L7")
    evaluate(tmp_path, model, decoding=Guessing(), checkpoint=checkpoint, baseline=str(several))
    content = read(tmp_path)
    assert content["baseline"]["source"] == str(several)
    assert content["baseline"]["tokens_per_second"] == read(several / "baseline")["overall"]["tokens_per_second"]
    assert (tmp_path / "baseline" / "answers.jsonl").read_text() == (several / "baseline" / "answers.jsonl").read_text()


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"max_new_tokens": 7}, r"max_new_tokens \(6, now 7\)"),
        ({"limit": 3}, r"benchmark\.questions \(13, now 3\)"),
        ({"sampling": Sampling(0.5)}, r"sampling\.temperature \(0.0, now 0.5\)"),
    ],
)
def test_a_baseline_under_other_settings_is_refused(tmp_path, model, several, keys, named):
    with pytest.raises(UserError, match=named):
        evaluate(tmp_path, model, baseline=str(several), **keys)


def test_a_baseline_of_another_target_is_refused(tmp_path, family_folders, several):
    other = ModelConfig("small", str(family_folders["qwen3"]), dtype="float32")
    with pytest.raises(UserError, match="fingerprint"):
        evaluate(tmp_path, other, baseline=str(several))


# ---------------------------------------------------------------- killed and resumed

CHILD = """
import sys, time
from pathlib import Path
from specwave.app.evaluate import EvaluateConfig, main
from specwave.app.run import Run
from specwave.benchmark import Benchmark
from specwave.decoding import Autoregressive
from specwave.target import ModelConfig
model = ModelConfig("small", sys.argv[1], dtype="float32")
config = EvaluateConfig(model=model, benchmark=Benchmark(), decoding=Autoregressive(), limit=26, max_new_tokens=48)
main(config, Run(Path(sys.argv[2]), resume=True))
"""


def test_a_killed_run_loses_no_finished_question_and_repeats_none(tmp_path, family_folders, model):
    command = [sys.executable, "-c", CHILD, str(family_folders["llama"]), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "TQDM_DISABLE": "1"}
    path = tmp_path / "answers.jsonl"
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    started = time.monotonic()
    while not path.exists() or path.read_bytes().count(b"\n") < 5:
        assert child.poll() is None, "the child ended before it could be killed"
        assert time.monotonic() - started < 300
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (tmp_path / "results.json").exists()
    kept = path.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert 5 <= kept.count(b"\n") < 26
    with open(path, "ab") as stream:  # a kill may fall inside a write, too
        stream.write(b'{"question_id": 4, "cat')
    evaluate(tmp_path, model, limit=26, max_new_tokens=48)
    assert path.read_bytes().startswith(kept)
    names = [json.loads(line)["question_id"] for line in path.read_text().splitlines()]
    assert len(names) == len(set(names)) == 26
    assert read(tmp_path)["overall"]["questions"] == 26


# ---------------------------------------------------------------- report


class Page(HTMLParser):
    """What a browser would fetch, and what a screen reader would miss."""

    def __init__(self, text):
        super().__init__()
        self.addresses, self.ids, self.images, self.headings, self.unnamed = [], [], [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data")]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag == "img":
            self.images.append(attributes.get("alt"))
        swatch = attributes.get("aria-hidden") == "true"  # of a legend, beside its label
        if tag == "svg" and not swatch and not (attributes.get("role") == "img" and attributes.get("aria-label")):
            self.unnamed += 1
        if tag in ("h1", "h2"):
            self.headings.append(tag)


def test_the_report_asks_the_network_for_nothing_and_names_its_pictures(several):
    text = (several / "report.html").read_text()
    page = Page(text)
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    local = [address[1:] for address in page.addresses if address.startswith("#")]
    assert set(local) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert page.headings[0] == "h1"
    assert page.headings.count("h1") == 1
    assert page.unnamed == 0
    assert text.count('role="img"') == 7  # τ, speedup, one against the other, position, layers, time, training
    assert len(page.images) == 2  # the same picture in two drafters' folders is shown once
    assert all(page.images)


def test_tables_agree_with_the_results(several):
    with open(several / "table.csv", newline="") as stream:
        rows = {row["label"]: row for row in csv.DictReader(stream)}
    assert list(rows) == ["plain", "L2-4-5", "L7"]
    for label in ("L2-4-5", "L7"):
        content = read(several / label)
        assert float(rows[label]["tau"]) == content["overall"]["tau"]
        assert float(rows[label]["speedup.qa"]) == content["categories"]["qa"]["speedup"]
    markdown = (several / "table.md").read_text()
    assert f"{read(several / 'L7')['overall']['tau']:.2f}" in markdown
    assert (several / "table.tex").read_text().count(r"\begin{tabular}") == 7


def test_a_report_over_several_runs_tells_them_apart(tmp_path, model, several, bare, trained):
    other = tmp_path / "other"
    evaluate(other, model, decoding=Guessing(1), checkpoint=str(trained / "drafters" / "L7"))
    out = tmp_path / "report"
    evaluate(out, model, report=[str(several), str(bare), str(other)])
    assert {path.name for path in out.iterdir()} == {"table.md", "table.tex", "table.csv", "report.html"}
    with open(out / "table.csv", newline="") as stream:
        labels = [row["label"] for row in csv.DictReader(stream)]
    assert labels == ["plain", "L2-4-5", "L7", "plain", "plain", "L7"]
    assert "levels 1" in (out / "report.html").read_text()
    assert Path(out / "table.md").read_text().splitlines()[2].startswith("| method | layers | rule | levels |")
