"""The table of a sweep, worked by hand: which columns there are, what stands in them, and how it is written."""

import csv
import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

from specwave.app.collate import csv_text, facts_of, markdown, rows, standing, swept_of, write
from specwave.app.run import OWN_KEYS, Record
from specwave.app.sweep_figures import first_number, sweep_figure

GIB = 2**30


def job(folder, overrides, status="finished", **more):
    """A run.yaml as Record writes it, the facts among `more`."""
    ended = {"exit_code": 0, "wall_seconds": 1.25, "peak_memory_bytes": GIB}
    record = {"app": "toy", "status": status, "overrides": overrides, "seed": 0, "git": None, "versions": {}}
    record |= {} if status == "running" else ended
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(record | more | {"config": {"m": 1}}, sort_keys=False))


@pytest.fixture
def sweep(tmp_path):
    """Four jobs of two swept keys: two finished, one failed, one killed while it ran."""
    job(tmp_path / "10", ["a.m=2", "seed=0", "+a.n=x,y"], layers=[0, 5], entropy=0.1 + 0.2, rows=57, kept={"a": 1})
    job(tmp_path / "2", ["a.m=1", "seed=0", "+a.n=x,y"], layers=[3], entropy=1 / 3, rows=57, wall_seconds=61.0)
    job(tmp_path / "9", ["a.m=1", "seed=0"], "failed", exit_code=2, error="a.m=1: too | small")
    job(tmp_path / "11", ["a.m=2", "seed=0"], "running")
    return tmp_path


def test_a_row_for_each_job_in_the_order_of_their_numbers(sweep):
    assert rows(sweep) == [
        {
            "job": "2", "a.m": "1", "+a.n": "x,y", "status": "finished", "layers": [3], "entropy": 1 / 3, "rows": 57,
            "wall_seconds": 61.0, "peak_memory_bytes": GIB, "error": None,
        },
        {
            "job": "9", "a.m": "1", "+a.n": None, "status": "failed", "layers": None, "entropy": None, "rows": None,
            "wall_seconds": 1.25, "peak_memory_bytes": GIB, "error": "a.m=1: too | small",
        },
        {
            "job": "10", "a.m": "2", "+a.n": "x,y", "status": "finished", "layers": [0, 5], "entropy": 0.1 + 0.2,
            "rows": 57, "wall_seconds": 1.25, "peak_memory_bytes": GIB, "error": None,
        },
        {
            "job": "11", "a.m": "2", "+a.n": None, "status": "running", "layers": None, "entropy": None, "rows": None,
            "wall_seconds": None, "peak_memory_bytes": None, "error": None,
        },
    ]  # fmt: skip


def test_columns_have_one_order_in_all_rows(sweep):
    table = rows(sweep)
    assert len({tuple(row) for row in table}) == 1
    assert swept_of(table) == ["a.m", "+a.n"]
    assert facts_of(table) == ["layers", "entropy", "rows"]
    assert standing(table) == "4 jobs, 1 failed, 1 running"


def test_csv_is_exact(sweep):
    text = csv_text(rows(sweep))
    assert text.splitlines()[0] == "job,a.m,+a.n,status,layers,entropy,rows,wall_seconds,peak_memory_bytes,error"
    read = list(csv.DictReader(io.StringIO(text)))
    assert [float(row["entropy"]) for row in read if row["entropy"]] == [1 / 3, 0.1 + 0.2]
    assert read[0] | {"entropy": ""} == {
        "job": "2", "a.m": "1", "+a.n": "x,y", "status": "finished", "layers": "[3]", "entropy": "", "rows": "57",
        "wall_seconds": "61.0", "peak_memory_bytes": str(GIB), "error": "",
    }  # fmt: skip


def test_markdown_is_rounded_and_says_once_what_is_the_same_everywhere(sweep):
    assert markdown(rows(sweep)).splitlines() == [
        "| job | a.m | +a.n | status   | layers | entropy | wall (s) | peak_memory (GiB) | error               |",
        "| --- | --- | ---- | -------- | ------ | ------: | -------: | ----------------: | ------------------- |",
        "| 2   | 1   | x,y  | finished | 3      |  0.3333 |    61.00 |              1.00 |                     |",
        "| 9   | 1   |      | failed   |        |         |     1.25 |              1.00 | a.m=1: too \\| small |",
        "| 10  | 2   | x,y  | finished | 0,5    |  0.3000 |     1.25 |              1.00 |                     |",
        "| 11  | 2   |      | running  |        |         |          |                   |                     |",
        "",
        "In every job: rows 57.",
    ]


def test_a_long_table_is_cut_and_says_so(sweep):
    lines = markdown(rows(sweep), limit=3).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:5]] == ["2", "9", "10"]
    assert lines[5:7] == ["", "… and 1 more row"]
    assert "more row" not in markdown(rows(sweep), limit=4)


@pytest.mark.parametrize(
    ("value", "column"),
    [
        (3, True), (0.5, True), ("text", True), (True, True), ([1, 2], True), (["a"], True), ([], True),
        (list(range(16)), True), (list(range(17)), False), ({"a": 1}, False), ([[1]], False), (None, False),
    ],
)  # fmt: skip
def test_facts_that_fit_into_a_column(tmp_path, value, column):
    job(tmp_path / "0", ["m=1"], fact=value)
    job(tmp_path / "1", ["m=2"])
    assert facts_of(rows(tmp_path)) == (["fact"] if column else [])


def test_what_lies_inside_a_job_or_is_the_folder_itself_is_no_job(tmp_path):
    job(tmp_path / "0", ["m=1"])
    job(tmp_path / "0/parts/0", ["m=7"])
    job(tmp_path / "deep/b", ["m=3"])
    job(tmp_path / "deep/a", ["m=2"])
    (tmp_path / "run.yaml").write_text((tmp_path / "0/run.yaml").read_text())
    assert [(row["job"], row["m"]) for row in rows(tmp_path)] == [("0", "1"), ("deep/a", "2"), ("deep/b", "3")]


@pytest.mark.parametrize("content", ["{", "[1]", "", "status: finished"])
def test_a_damaged_record_is_a_row(tmp_path, content):
    job(tmp_path / "0", ["m=1"])
    job(tmp_path / "1", ["m=1"])
    (tmp_path / "1/run.yaml").write_text(content)
    first, second = rows(tmp_path)
    assert (second["status"], second["error"]) == ("unreadable", "run.yaml is damaged")
    assert swept_of([first, second]) == []  # what cannot be read tells nothing about what was swept
    assert (first["status"], second["wall_seconds"]) == ("finished", None)


def test_a_fact_and_a_swept_key_of_one_name_both_stay(tmp_path):
    job(tmp_path / "0", ["limit=5"], limit=4)
    job(tmp_path / "1", ["limit=9"], limit=8)
    assert [(row["limit"], row["noted limit"]) for row in rows(tmp_path)] == [("5", 4), ("9", 8)]


def test_a_record_without_facts_has_only_keys_of_its_own(tmp_path):
    record = Record(tmp_path, "toy", [], [], {"seed": 1})
    record.go_on({"attempts": 1})
    record.close("failed", {}, "an error", 1)
    assert set(yaml.safe_load((tmp_path / "run.yaml").read_text())) <= OWN_KEYS


def test_no_jobs_no_rows(tmp_path):
    assert rows(tmp_path) == []


def test_the_files_of_a_sweep(sweep):
    table = rows(sweep)
    written = write(sweep, "toy", table)
    assert [path.name for path in written] == ["sweep.csv", "sweep.md", "sweep.png", "sweep.svg"]
    assert (sweep / "sweep.csv").read_text() == csv_text(table)
    text = (sweep / "sweep.md").read_text()
    assert text.startswith("# toy: 4 jobs, 1 failed, 1 running\n")
    assert markdown(table) in text
    assert "(sweep.png)" in text
    assert rows(sweep) == table  # the table's own files are no jobs


# ---------------------------------------------------------------- the picture


def texts(path):
    """The texts of an SVG, in the order they were drawn."""
    return [(node.text or "").strip() for node in ElementTree.parse(path).iter() if node.tag.endswith("text")]


def test_the_picture_names_values_and_what_went_wrong(sweep, tmp_path):
    table = [row | {"num_layers": 8} for row in rows(sweep)]
    _, svg = sweep_figure(Path(tmp_path / "picture"), table, "a title")
    found = texts(svg)
    assert {"a title", "failed", "running", "layer (output of the block)", "entropy (nats)"} <= set(found)
    assert [text.split() for text in found if "\u00a0" in text] == [
        ["m", "n"], ["1", "x,y"], ["1", "–"], ["2", "x,y"], ["2", "–"],
    ]  # fmt: skip


def test_without_layers_the_first_number_is_drawn(tmp_path):
    job(tmp_path / "0", ["m=1"], name="x", good=True, tokens=7)
    job(tmp_path / "1", ["m=2"], "failed")
    assert first_number(rows(tmp_path)) == "tokens"
    found = texts(sweep_figure(tmp_path / "picture", rows(tmp_path), "t")[1])
    assert "tokens" in found
    assert "failed" in found
    for path in tmp_path.glob("*/run.yaml"):
        path.write_text(path.read_text().replace("finished", "failed").replace("tokens: 7\n", ""))
    assert first_number(rows(tmp_path)) == "wall_seconds"
    assert texts(sweep_figure(tmp_path / "picture", rows(tmp_path), "t")[1]).count("failed") == 2


def test_the_same_table_gives_the_same_picture(sweep, tmp_path):
    table = rows(sweep)
    first = [path.read_bytes() for path in sweep_figure(tmp_path / "one", table, "t")]
    assert [path.read_bytes() for path in sweep_figure(tmp_path / "two", table, "t")] == first
