"""Drafters by how many layers they read: what is counted of their files, the table and the plot."""

import re
from types import SimpleNamespace

import pytest
import torch
from made_up import answers, questions, run_folder, settings

from specwave.artifacts import UserError
from specwave.benchmark.bootstrap import ratio_interval
from specwave.benchmark.drafters import size_of
from specwave.benchmark.report import page_tables, plots, render, unique_labels
from specwave.benchmark.results import Baseline, Result, build_results, load_run
from specwave.benchmark.sizes import by_layers, plot, table
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.export import TargetFacts, write_drafter

ARCH = SimpleNamespace(
    hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, vocab_size=80, rms_eps=1e-6,
    max_length=128, rope={"rope_type": "default", "rope_theta": 10000.0},
)  # fmt: skip
PARAMETERS = {1: 1_000_000, 2: 1_331_776, 3: 1_663_552}


@pytest.mark.parametrize("layout", ["engines", "speculators"])
@pytest.mark.parametrize("fc_norm", [False, True])
@pytest.mark.parametrize("layers", [(6,), (2, 6), (1, 4, 6)])
def test_the_size_of_a_drafter_is_that_of_its_module(tmp_path, layers, fc_norm, layout):
    """The padding of one layer is in the file and not counted; nor is the target's embedding, which is in none."""
    config = DrafterConfig.of_target(ARCH, layers, 40, fc_norm=fc_norm)
    drafter = Eagle3Drafter(config, torch.zeros(40, dtype=torch.int64), torch.arange(80) < 40)
    write_drafter(tmp_path, drafter, TargetFacts("t", "f", 8, "hub/t"), layout=layout)
    found, counted = size_of(tmp_path), sum(weight.numel() for weight in drafter.parameters())
    assert found == {"parameters": counted, "bytes": 2 * counted + 40 * 8 + 80}  # bfloat16; d2t and t2d


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "card.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{broken")
    with pytest.raises(UserError, match=r"checkpoint=.*export the drafter again"):
        size_of(tmp_path)


def measured(folder, count, seed=0):
    rows = answers(folder, questions(), 3, 0.4 + 0.05 * count, seed).rows
    content = build_results(
        label=folder.name, method="eagle3", rows=rows, baseline=Baseline([]), verdicts=None, divergences=[],
        settings=settings(3), layers=list(range(count)),
        drafter={"parameters": PARAMETERS[count], "bytes": 2 * PARAMETERS[count]},
    )  # fmt: skip
    return Result(folder, content)


@pytest.fixture
def drafters(tmp_path):
    return [measured(tmp_path / name, count, count) for name, count in (("c", 3), ("a", 1), ("b", 2), ("also", 1))]


def test_the_table_goes_by_layers_and_holds_the_sums(drafters):
    (shown,) = table(drafters, unique_labels(drafters))
    assert [row[:4] for row in shown.rows] == [
        [1, "a", 1.0, 2.0],
        [1, "also", 1.0, 2.0],
        [2, "b", 1.331776, 2.663552],
        [3, "c", 1.663552, 3.327104],
    ]
    records = drafters[0].content["per_question"]
    seconds, rounds = [one["draft_seconds"] for one in records], [one["rounds"] for one in records]
    assert sum(seconds) == pytest.approx(drafters[0].content["overall"]["time"]["draft"])
    low, high = ratio_interval(seconds, rounds)
    assert shown.rows[3][4] == f"{1000 * sum(seconds) / sum(rounds):.2f} [{1000 * low:.2f}, {1000 * high:.2f}]"


def test_the_plot_has_a_panel_for_each_figure(drafters):
    (drawn,) = plot(drafters, unique_labels(drafters))
    marks = re.findall(r'translate\(([\d.]+) ([\d.]+)\)" fill="[^"]+"><title>([^<]*)', drawn.svg)
    assert len(marks) == 4 * 4
    assert marks[0][2] == "a: 2 MB"
    assert drawn.svg.count('class="whisker"') == 3 * 4  # megabytes are exact
    across = [float(x) for x, _, _ in marks[:4]]
    assert across == sorted(across)  # one layer twice, two, three
    assert across[3] - across[2] == pytest.approx(across[2] - (across[0] + across[1]) / 2, abs=0.05)
    assert "also, 1 layers" in drawn.alt


def test_nothing_is_shown_where_all_read_as_many(drafters):
    alike = [drafters[1], drafters[3]]
    assert by_layers(alike, ["a", "also"]) == []
    assert table(alike, ["a", "also"]) == []
    assert plot(alike, ["a", "also"]) == []


def test_results_of_before_leave_gaps(tmp_path):
    """Their files tell no size and no seconds of drafting by question."""
    results = load_run(run_folder(tmp_path))
    for result in results:
        result.content.pop("drafter")
        for record in result.content["per_question"]:
            record.pop("draft_seconds")
    labels = unique_labels(results)
    (shown,) = table(results, labels)
    assert [row[2:6] for row in shown.rows] == [[None] * 4] * 3
    titles = [drawn.title for drawn in plots(results, labels)]
    assert "Cost and gain by number of layers" in titles
    assert shown.title in [one.title for one in page_tables(results)]
    assert "Drafters by how many layers they read" in render(results)
