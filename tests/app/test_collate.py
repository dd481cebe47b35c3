"""The table of a sweep, worked by hand: which columns there are, what stands in them, and how it is written."""

import csv
import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

from specwave.app.collate import csv_text, facts_of, first_number, markdown, rows, short, standing, swept_of, write
from specwave.app.run import OWN_KEYS, Record
from specwave.app.sweep_figures import sweep_figure
from specwave.app.sweep_grid import as_grid, measures
from specwave.app.sweep_plots import keys_figure, outcome
from specwave.app.sweep_tables import over_seeds, seeds_csv, seeds_markdown, sweep_latex

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
    assert [path.name for path in written] == ["sweep.csv", "sweep.md", "sweep.tex", "sweep.png", "sweep.svg"]
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


# ---------------------------------------------------------------- seeds, LaTeX, pictures over keys


@pytest.fixture
def seeds(tmp_path):
    """Two settings of one key, three seeds of the first, two of the second, of which one failed."""
    for number, (m, seed, tau) in enumerate([(1, 0, 1.0), (1, 1, 2.0), (1, 2, 3.0), (2, 0, 5.0)]):
        job(tmp_path / str(number), [f"a.m={m}", f"seed={seed}"], rule="x_1", tau=tau, rows=57)
    job(tmp_path / "4", ["a.m=2", "seed=1"], "failed", error="no")
    return rows(tmp_path)


def test_means_over_seeds_by_hand(seeds):
    first, second = over_seeds(seeds)
    assert [first[key] for key in ("a.m", "seeds", "failed", "tau")] == ["1", 3, 0, 2.0]
    half = 4.303 / 3**0.5  # Student's t of two degrees of freedom at 95 %, a standard deviation of 1, three values
    assert first["tau low"] == pytest.approx(2 - half, abs=1e-3)
    assert first["tau high"] == pytest.approx(2 + half, abs=1e-3)
    assert [second[key] for key in ("a.m", "seeds", "failed", "tau", "tau low")] == ["2", 1, 1, 5.0, None]
    assert "rule" not in first
    text = seeds_markdown([first, second]).splitlines()
    assert text[0] == "| a.m | seeds | failed | tau |"  # rows are the same everywhere
    assert text[2:] == ["| 1 | 3 | 0 | 2 [-0.4841, 4.484] |", "| 2 | 1 | 1 | 5 |"]
    assert seeds_csv([first, second]).splitlines()[0].startswith("a.m,seeds,failed,tau,tau low,tau high,rows")


def test_without_seeds_there_are_no_means(sweep):
    assert over_seeds(rows(sweep)) == []


def test_a_setting_without_a_finished_job_has_no_mean(tmp_path):
    job(tmp_path / "0", ["m=1", "seed=0"], tau=1.0)
    job(tmp_path / "1", ["m=2", "seed=1"], "failed")
    assert [row["tau"] for row in over_seeds(rows(tmp_path))] == [1.0, None]


def test_the_files_of_a_sweep_over_seeds(seeds, tmp_path):
    written = [path.name for path in write(tmp_path, "toy", seeds)]
    assert written == ["sweep.csv", "sweep_seeds.csv", "sweep.md", "sweep.tex", "sweep.png", "sweep.svg",
                       "sweep_keys.png", "sweep_keys.svg"]  # fmt: skip
    text = (tmp_path / "sweep.md").read_text()
    assert seeds_markdown(over_seeds(seeds)) in text
    assert "(sweep_keys.png)" in text


def test_latex_escapes_and_scales(seeds):
    text = sweep_latex("toy: 5 jobs & more", seeds, over_seeds(seeds))
    assert "toy: 5 jobs \\& more" in text
    assert "x\\_1" in text
    assert "peak\\_memory (GiB)" in text
    assert " & 1.00 & " in text  # bytes became GiB
    assert text.count("\\begin{tabular}") == text.count("\\end{tabular}") == 2


def test_one_number_is_a_line(seeds, tmp_path):
    found = texts(keys_figure(tmp_path / "line", seeds, "a title")[1])
    assert {"a.m", "tau", "a title"} <= set(found)


def three_keys(folder, names=("a", "b", "c")):
    for number in range(4):
        overrides = [f"{name}={(number >> place) % 2}" for place, name in enumerate(names)]
        job(folder / str(number), overrides, tau=1 + number / 10, entropy=9.0)
    return rows(folder)


def test_three_keys_are_parallel_coordinates(tmp_path):
    table = three_keys(tmp_path / "x")
    assert len({len(row) for row in table}) == 1
    job(tmp_path / "x" / "4", ["a=0", "b=0", "c=1"], tau=1.7, entropy=9.0)
    job(tmp_path / "x" / "5", ["a=0", "b=0", "c=7"], "failed")
    table = rows(tmp_path / "x")
    found = texts(keys_figure(tmp_path / "lines", table, "a title")[1])
    assert {"a", "b", "c", "tau", "1", "1.7", "a title"} <= set(found)
    assert "7" not in found  # of a job without a result
    assert outcome([row for row in table if row["status"] == "finished"]) == "tau"


def test_two_keys_names_and_nothing_finished_have_no_such_picture(sweep, tmp_path):
    assert keys_figure(tmp_path / "p", rows(sweep), "t") == []
    for number, kind in enumerate(("x", "y")):
        job(tmp_path / "names" / str(number), [f"kind={kind}"], tau=1.0)
        job(tmp_path / "none" / str(number), [f"m={number}"], "failed")
    assert keys_figure(tmp_path / "p", rows(tmp_path / "names"), "t") == []
    assert keys_figure(tmp_path / "p", rows(tmp_path / "none"), "t") == []


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (None, "–"),
        ("0.7", "0.7"),
        ("{_target_:specwave.skipping.Adaptive}", "Adaptive"),
        ("{_target_: specwave.skipping.Midway, threshold: 0.5}", "Midway(threshold: 0.5)"),
        ("{least:3}", "{least:3}"),
        ("x" * 23, "x" * 21 + "…"),
    ],
)
def test_a_swept_value_in_a_label(value, label):
    assert short(value) == label


# ---------------------------------------------------------------- the grid


@pytest.fixture
def matrix(tmp_path):
    """Two plan sources × three stop rules: one failed in the middle of its questions, one is missing."""
    facts = {"tau": 1.5, "tokens_per_second": 30.0, "speedup": 0.9}
    job(tmp_path / "0", ["decoding=swift", "decoding.stop=0"], **facts)
    job(tmp_path / "1", ["decoding=swift", "decoding.stop=0.7"], "failed", error="no", **(facts | {"tau": 8.25}))
    job(tmp_path / "2", ["decoding=swift", "decoding.stop={_target_:a.b.Adaptive}"], **(facts | {"tau": 1.374}))
    job(tmp_path / "3", ["decoding=del", "decoding.stop=0"], **(facts | {"speedup": 1.125}))
    job(tmp_path / "4", ["decoding=del", "decoding.stop=0.7"], "running")
    return tmp_path


def test_two_swept_keys_are_a_grid(matrix):
    grid = as_grid(rows(matrix))
    assert grid.keys == ("decoding", "decoding.stop")
    assert grid.rows == ["swift", "del"]
    assert grid.columns == ["0", "0.7", "{_target_:a.b.Adaptive}"]
    assert {pair: row["job"] for pair, row in grid.cells.items()} == {
        ("swift", "0"): "0", ("swift", "0.7"): "1", ("swift", "{_target_:a.b.Adaptive}"): "2",
        ("del", "0"): "3", ("del", "0.7"): "4",
    }  # fmt: skip
    assert list(measures(rows(matrix))) == ["speedup", "tau", "tokens_per_second"]


def test_the_grid_writes_its_values_and_what_went_wrong_into_the_cells(matrix):
    table = rows(matrix)
    png, svg = sweep_figure(matrix / "picture", table, standing(table))
    found = texts(svg)
    assert png.read_bytes().startswith(b"\x89PNG")
    for text in ("swift", "del", "0", "0.7", "Adaptive", "decoding", "decoding.stop", "5 jobs, 1 failed, 1 running"):
        assert text in found
    for text in ("speedup over plain decoding", "τ (tokens per verification)", "tokens/s"):
        assert found.count(text) == 1
    assert (found.count("✕ failed"), found.count("✕ running"), found.count("–")) == (3, 3, 3)  # in every panel
    assert (found.count("1.12"), found.count("1.37"), found.count("30.0")) == (1, 1, 3)
    assert "8.25" not in found  # of a part of the questions


def test_an_evaluation_for_each_value_of_one_key_shows_its_measures(matrix):
    table = [row for row in rows(matrix) if row["decoding"] == "swift"]
    assert as_grid(table) is None
    found = texts(sweep_figure(matrix / "picture", table, "t")[1])
    assert {"speedup over plain decoding", "τ (tokens per verification)", "tokens/s", "failed"} <= set(found)


def test_other_tables_are_no_grid(matrix, tmp_path_factory):
    table = rows(matrix)
    assert as_grid([*table, table[0] | {"job": "5"}]) is None  # a pair twice: with another sweep's jobs, say
    assert as_grid([row for row in table if row["decoding"] == "del"]) is None  # a row only
    diagonal = tmp_path_factory.mktemp("diagonal")  # as a search draws its points
    for place in range(3):
        job(diagonal / str(place), [f"a={place}", f"b={place}"], value=place)
    assert as_grid(rows(diagonal)) is None
    wide = tmp_path_factory.mktemp("wide")
    for place in range(82):
        job(wide / str(place), [f"a={place // 41}", f"b={place % 41}"], value=place)
    assert as_grid(rows(wide)) is None
    assert "value" in texts(sweep_figure(wide / "picture", rows(wide), "t")[1])  # a row for each job


def test_a_grid_of_jobs_that_noted_nothing_shows_how_long_they_took(tmp_path):
    for place in range(4):
        job(tmp_path / str(place), [f"a={place // 2}", f"b={place % 2}"], "failed" if place == 3 else "finished")
    (tmp_path / "2/run.yaml").write_text("{")  # no place in the grid, but in the title
    table = rows(tmp_path)
    found = texts(sweep_figure(tmp_path / "picture", table, standing(table))[1])
    assert {"wall_seconds", "4 jobs, 1 unreadable, 1 failed"} <= set(found)
    assert (found.count("1.25"), found.count("✕ failed"), found.count("–")) == (2, 1, 1)
