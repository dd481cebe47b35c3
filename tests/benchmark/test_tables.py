"""The papers' layout, intervals, paired differences and Spec-Bench's files, on results made by hand."""

import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

from specwave.artifacts import UserError
from specwave.benchmark import paper, writers
from specwave.benchmark.bootstrap import draws
from specwave.benchmark.comparisons import Sums, compare, contrasts
from specwave.benchmark.interop import load_all
from specwave.benchmark.paper import blocks, by_category, nodes
from specwave.benchmark.questions import CATEGORIES
from specwave.benchmark.report import render, unique_labels
from specwave.benchmark.results import Baseline, Result, build_results, load_results, save_results
from specwave.benchmark.tables import MIXED, Table, ranged, summary, varying


def row(number, lengths, seconds, category=None):
    """One answered question, as Spec-Bench writes it."""
    choice = {
        "index": 0,
        "turns": ["…"],
        "decoding_steps": [len(lengths)],
        "new_tokens": [sum(lengths)],
        "wall_time": [seconds],
        "accept_lengths": lengths,
    }
    return {
        "question_id": number,
        "category": category or CATEGORIES[number % 13],
        "answer_id": "x",
        "model_id": "vicuna-pld",
        "choices": [choice],
        "tstamp": 1.0,
    }


PLAIN = [row(n, [1] * 8, 4.0 + n) for n in range(26)]


def result(
    folder, label, lengths, total_token=30, temperature=0.0, method="eagle3", rows=None, rules=("eagle3",), **settings
):
    """A result whose questions all have the accept lengths of `lengths`, cycled."""
    rows = rows or [row(n, lengths[n % len(lengths)], 2.0 + n / 2) for n in range(26)]
    content = build_results(
        label=label,
        method=method,
        rows=rows,
        baseline=Baseline(PLAIN),
        verdicts=None,
        divergences=[],
        settings={
            "target": "t",
            "sampling": {"temperature": temperature, "seed": 0},
            "decoding": {"name": method, "total_token": total_token, "levels": 6, "top_k": 10},
            "benchmark": {"fingerprint": "f"},
        }
        | settings,
        layers=[2, 15, 27] if method == "eagle3" else None,
        rules=rules if method == "eagle3" else [],
    )
    return Result(folder, content)


@pytest.fixture
def four(tmp_path):
    return [
        result(tmp_path, "plain", [[1] * 8], None, method="autoregressive", rows=PLAIN),
        result(tmp_path, "b", [[2, 3], [1, 2]], 60, 1.0),
        result(tmp_path, "a", [[2, 3], [3, 3]], 30, 0.0),
        result(tmp_path, "c", [[4], [2, 2]], 60, 0.0),
    ]


# ---------------------------------------------------------------- blocks of nodes × temperature


def test_blocks_go_by_temperature_then_nodes(four):
    found = blocks(four)
    assert [heading for heading, _ in found] == ["30 nodes, T = 0", "60 nodes, T = 0", "60 nodes, T = 1"]
    assert [[one.label for one in group] for _, group in found] == [["plain", "a"], ["c"], ["b"]]


def test_cells_are_the_figures_and_the_average_counts_categories_alike(four):
    table = by_category(four[1:], "tau", "τ", 2)
    assert table.header == ["method", "layers", "rule", *CATEGORIES, "average", "overall"]
    assert table.blocks == {0: "30 nodes, T = 0", 1: "60 nodes, T = 0", 2: "60 nodes, T = 1"}
    first = table.rows[0]
    assert first[:3] == ["EAGLE-3 drafter", "2, 15, 27", "eagle3"]
    taus = [four[2].content["categories"][category]["tau"] for category in CATEGORIES]
    assert first[3:16] == taus
    assert first[16] == pytest.approx(sum(taus) / 13)
    assert first[17] == four[2].content["overall"]["tau"] == (5 * 13 + 6 * 13) / (4 * 13)


def test_an_average_over_some_of_the_categories_is_none(tmp_path):
    part = result(tmp_path, "part", [[2]], rows=[row(0, [2], 1.0), row(1, [2], 1.0)])
    whole = result(tmp_path, "whole", [[2]], total_token=60)
    table = by_category([part, whole], "tau", "τ", 2)
    assert table.rows[0][-2] is None
    assert table.rows[1][-2] == 2.0


@pytest.mark.parametrize(
    ("decoding", "count"),
    [
        ({"total_token": 30, "levels": 6, "top_k": 10}, 30),
        ({"total_token": None, "levels": 2, "top_k": 1}, 3),
        ({"total_token": None, "tree": [[0], [1], [0, 0]], "levels": 2, "top_k": 1}, 4),
        ({"total_token": None, "levels": 3, "top_k": 10}, None),
        ({"name": "pld", "length": 10}, None),
        (None, None),
    ],
)
def test_nodes(tmp_path, decoding, count):
    assert nodes(result(tmp_path, "x", [[1]], decoding=decoding)) == count


def test_every_writer_has_the_blocks(four):
    found = paper.tables(four, paper.certainty(four, unique_labels(four)))
    markdown, latex = writers.markdown(found), writers.latex(found)
    part = markdown.split("## τ (tokens")[1].split("##")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        "**30 nodes, T = 0**", "EAGLE-3 drafter", "**60 nodes, T = 0**", "EAGLE-3 drafter", "**60 nodes, T = 1**",
        "EAGLE-3 drafter",
    ]  # fmt: skip
    assert {line.count("|") for line in lines} == {20}
    assert latex.count(r"\multicolumn{19}{l}{60 nodes, T = 0} \\") == 3
    for body in re.findall(r"\\begin{tabular}{(\w+)}\\toprule\n(.*?)\\bottomrule", latex, re.DOTALL):
        for line in body[1].splitlines():
            if "&" in line:
                assert line.replace(r"\&", "").count("&") == len(body[0]) - 1
    rows = list(csv.DictReader(io.StringIO(writers.as_csv(four))))
    assert [row["tokens_a_round"] for row in rows] == ["", "60", "30", "60"]
    assert float(rows[1]["tau.low"]) < float(rows[1]["tau"]) < float(rows[1]["tau.high"])
    for one, line in zip(four, rows, strict=True):
        assert float(line["tau.qa"]) == one.content["categories"]["qa"]["tau"]
    assert "60 nodes, T = 1" in writers.console(found[1])


def test_a_drafter_that_several_rules_choose_has_a_row_for_each_in_print(tmp_path, four):
    both = result(tmp_path, "L29", [[2, 3], [1, 2]], rules=["eagle2", "elsi"])
    table = by_category([both, four[2]], "tau", "τ", 2, printed=True)
    assert [row[2] for row in table.rows] == ["eagle2", "elsi", "eagle3"]
    assert table.rows[0][3:] == table.rows[1][3:]
    low, high = both.content["overall"]["intervals"]["tau"]
    assert (table.header[-1], table.rows[0][-1]) == ("95 %", f"[{low:.2f}, {high:.2f}]")
    assert low < both.content["overall"]["tau"] < high
    found = paper.tables([both, four[2]], [])
    assert writers.markdown(found).count(paper.ONE_DRAFTER) == 3
    assert writers.latex(found).count(paper.ONE_DRAFTER) == 3
    (once,) = [row for row in found[0].rows if "29" not in str(row[0]) and row[2] == "eagle2, elsi"]  # measured once
    assert once[0] == "EAGLE-3 drafter"
    assert "L29 (eagle2, elsi)" in unique_labels([both, four[2]])
    page = render([both, four[2]])
    assert page.count('<th scope="col" class="number">L29 (eagle2, elsi)</th>') == 3
    assert paper.ONE_DRAFTER not in page


def test_results_of_an_earlier_version_have_one_rule(four):
    content = {name: value for name, value in four[2].content.items() if name != "rules"}
    assert Result(four[2].folder, content).rules == ["eagle3"]
    assert Result(four[2].folder, {**content, "rule": None}).rules == []


def test_sets_of_questions_are_told_apart_by_their_size_where_that_will_do(tmp_path):
    def asked(size, mark):
        return result(tmp_path, "x", [[2]], benchmark={"questions": size, "fingerprint": mark})

    assert varying([asked(480, "f"), asked(130, "g")]) == {"benchmark.questions": "asked"}
    assert varying([asked(130, "f"), asked(130, "g")]) == {"benchmark.fingerprint": "question set"}
    names = {"benchmark.questions": "asked", "benchmark.fingerprint": "question set"}
    assert varying([asked(480, "f"), asked(130, "g"), asked(130, "h")]) == names


# ---------------------------------------------------------------- whose clock


def on(results, *machines):
    """The same results, timed on these machines."""
    return [
        Result(one.folder, {**one.content, "machines": marks}) for one, marks in zip(results, machines, strict=True)
    ]


def test_times_of_several_machines_are_not_mixed_without_a_word(four):
    mixed = on(four, ["m1", "m2"], ["m1"], ["m1", "m2"], [])
    table = summary(mixed)
    assert table.header[-1] == "machines"
    assert [row[-1] for row in table.rows] == ["m1, m2", "m1", "m1, m2", None]
    for text in (writers.markdown([table]), writers.console(table), render(mixed)):
        assert MIXED in text
    assert MIXED in writers.latex([table])
    rows = list(csv.DictReader(io.StringIO(writers.as_csv(mixed))))
    assert [row["machines"] for row in rows] == ["m1 m2", "m1", "m1 m2", ""]


def test_runs_of_two_machines_say_which_is_whose(four):
    table = summary(on(four[2:], ["m1"], ["m2"]))
    assert [row[-1] for row in table.rows] == ["m1", "m2"]
    assert table.note == ""  # nothing is mixed in one number


def test_one_machine_needs_no_column(four):
    table = summary(on(four, *[["m1"]] * 4))
    assert "machines" not in table.header
    assert table.note == ""


def test_one_block_needs_no_heading(four):
    assert by_category(four[2:3], "tau", "τ", 2).blocks == {}


def test_pages_have_a_table_for_every_block(four):
    page = render(four)
    assert page.count("τ (tokens per verification) by category: 60 nodes, T = 1</h2>") == 1
    assert page.count('role="img"') == 3  # these rows tell neither positions nor where time went


def test_ranged():
    assert ranged(1.346, [1.3149, 1.4], 2) == "1.35 [1.31, 1.40]"
    assert ranged(1.346, None, 1) == "1.3"
    assert ranged(None, None, 1) is None


# ---------------------------------------------------------------- differences


def test_a_paired_difference_by_hand(four):
    (one,) = contrasts([four[2], four[3]], ["a", "c"])
    assert (one.first, one.second, one.questions) == ("a", "c", 26)
    tau_a, tau_c = (13 * 5 + 13 * 6) / (13 * 2 + 13 * 2), (13 * 4 + 13 * 4) / (13 * 1 + 13 * 2)
    assert one.tau == pytest.approx(tau_a - tau_c)
    assert one.tau_interval[0] < one.tau < one.tau_interval[1]
    assert one.speed == pytest.approx((13 * 5 + 13 * 6) / (13 * 4 + 13 * 4))  # they took the same time


def test_equal_methods_differ_by_nothing(four):
    sums = Sums.of(four[2].content["per_question"])
    one = compare("a", sums, "b", sums)
    assert (one.tau, one.tau_interval, one.speed, one.speed_interval) == (0.0, [0.0, 0.0], 1.0, [1.0, 1.0])
    assert paper.sure(one) == "neither"


def test_pairing_sees_what_questions_hide():
    """τ differs by 0.1 at every question, and from question to question by far more."""
    ours = [{"question_id": n, "rounds": 10, "accepted": 10 + 3 * n + 1} | dict.fromkeys(("tokens", "seconds"), 0) | {
        "plain_tokens": None, "plain_seconds": None} for n in range(30)]  # fmt: skip
    theirs = [record | {"accepted": record["accepted"] - 1} for record in ours]
    one = compare("a", Sums.of(ours), "b", Sums.of(theirs))
    assert one.tau_interval == pytest.approx([0.1, 0.1])
    assert paper.sure(one) == "τ"
    assert one.speed is None


def test_only_like_is_compared(four, tmp_path):
    assert len(contrasts(four, list("pbac"))) == 1  # plain decoding apart, and b was sampled
    assert contrasts([four[2], result(tmp_path, "x", [[2]], benchmark={"fingerprint": "g"})], ["a", "x"]) == []
    many = [result(tmp_path, f"m{n}", [[1 + n % 4, 2]]) for n in range(10)]
    found = contrasts(many, [one.label for one in many])
    assert len(found) == 9
    assert {one.second for one in found} == {"m3"}
    assert compare("a", Sums.of(many[0].content["per_question"]), "b", Sums.of([])) is None


def test_columns_compare_as_records_do(four):
    """The reference, question by question and draw by draw, of what `compare` does on columns: some questions are the
    one's alone, in another order, without a round, or without plain decoding."""
    ours, theirs = ([dict(record) for record in one.content["per_question"]] for one in four[2:4])
    theirs = theirs[::-1][3:]
    ours[5]["rounds"] = ours[5]["accepted"] = 0
    ours[8]["plain_tokens"] = ours[8]["plain_seconds"] = None
    theirs[9]["seconds"] = 0.0
    one = compare("a", Sums.of(ours), "b", Sums.of(theirs))
    by_id = {record["question_id"]: record for record in theirs}
    pairs = [(a, by_id[a["question_id"]]) for a in ours if a["question_id"] in by_id and a["rounds"]]

    def tau(pairs, side):
        return sum(pair[side]["accepted"] for pair in pairs) / sum(pair[side]["rounds"] for pair in pairs)

    def speedup(pairs, side):
        ours, base = (
            sum(pair[side][f"{kind}tokens"] for pair in pairs) / sum(pair[side][f"{kind}seconds"] for pair in pairs)
            for kind in ("", "plain_")
        )
        return ours / base

    def spread(pairs, figure):
        drawn = [[pair for pair, times in zip(pairs, row, strict=True) for _ in range(int(times))]
                 for row in draws(len(pairs))]  # fmt: skip
        return list(np.quantile([figure(some) for some in drawn], [0.025, 0.975]))

    keys = ("tokens", "seconds", "plain_tokens", "plain_seconds")
    timed = [pair for pair in pairs if all(record[key] for record in pair for key in keys)]
    assert (len(pairs), len(timed)) == (22, 20) == (one.questions, 20)
    assert one.tau == pytest.approx(tau(pairs, 0) - tau(pairs, 1))
    assert one.speed == pytest.approx(speedup(timed, 0) / speedup(timed, 1))
    assert one.tau_interval == pytest.approx(spread(pairs, lambda some: tau(some, 0) - tau(some, 1)))
    assert one.speed_interval == pytest.approx(spread(timed, lambda some: speedup(some, 0) / speedup(some, 1)))


def test_speeds_of_other_machines_are_not_compared(four, tmp_path):
    fast = [result(tmp_path, label, [[2, 3]], device_name=name) for label, name in (("a", "A100"), ("b", "H100"))]
    (one,) = contrasts(fast, ["a", "b"])
    assert (one.tau, one.speed, one.speed_interval) == (0.0, None, None)
    (one,) = contrasts([fast[0], result(tmp_path, "c", [[2, 3]])], ["a", "c"])  # one does not say
    assert one.speed == 1.0


def test_one_device_is_what_settings_do_not_say(tmp_path):
    one, eight = result(tmp_path, "a", [[2, 3]]), result(tmp_path, "b", [[2, 3]], devices=8)
    assert varying([one, eight]) == {"devices": "devices"}
    (found,) = contrasts([one, eight], ["a", "b"])
    assert (found.tau, found.speed) == (0.0, None)
    assert contrasts([one, result(tmp_path, "c", [[2, 3]], batch_invariant=True)], ["a", "c"])[0].speed == 1.0
    both = [result(tmp_path, name, [[2, 3]], batch_invariant=name == "a") for name in "ab"]
    assert contrasts(both, ["a", "b"])[0].speed is None


def test_a_seed_that_nothing_is_drawn_with_parts_nobody(tmp_path):
    greedy = [result(tmp_path, name, [[2]], sampling={"temperature": 0.0, "seed": n}) for n, name in enumerate("ab")]
    assert len(contrasts(greedy, ["a", "b"])) == 1
    hot = [result(tmp_path, name, [[2]], sampling={"temperature": 1.0, "seed": n}) for n, name in enumerate("ab")]
    assert contrasts(hot, ["a", "b"]) == []


def test_questions_of_one_number_and_other_categories_are_no_pair(tmp_path):
    rows = [row(n, [2], 1.0, "chat") for n in range(26)]
    other = result(tmp_path, "b", [], rows=rows)
    assert contrasts([result(tmp_path, "a", [[2]]), other], ["a", "b"]) == []


def test_how_far_answers_part_is_said_by_the_lower_token(tmp_path):
    parted = {"question_id": 1, "top2_gap": 0.02, "gap": 0.3}
    one = result(tmp_path, "a", [[2, 3]], dtype="bfloat16")
    one.content["divergences"] = [parted]
    assert "at most 0.3 below the largest: rounding" in summary([one]).note
    one.content["divergences"] = [parted, parted | {"gap": 9.0}]
    assert "at most 9 below the largest: more than rounding explains" in summary([one]).note


def test_a_bracket_opens_no_row_of_latex(tmp_path):
    made = writers.latex([summary([result(tmp_path, "a", [[2]])])])
    assert "{[}" in writers.latex([Table("γ ≥ 1…", ["a"], [["[[2]]\nx"]], [0])])
    assert all(ord(letter) < 128 for letter in writers.latex([Table("γ ≥ 1…", ["−"], [["ρ·α"]], [0])]))
    assert "midrule" in made


# ---------------------------------------------------------------- Spec-Bench's own files


def written(path, rows):
    path.write_text("".join(json.dumps(line) + "\n" for line in rows))
    return str(path)


def test_spec_bench_s_files_become_results(tmp_path, four):
    fast = [row(n, [2, 3], 2.0) for n in range(26)]
    pld = written(tmp_path / "pld.jsonl", fast)
    plain = written(tmp_path / "vanilla.jsonl", [line | {"model_id": "vicuna"} for line in PLAIN])
    ours = tmp_path / "ours"
    save_results(ours, four[2].content)
    found = load_all([pld, str(ours), plain])
    assert [one.label for one in found] == ["vicuna-pld", "a", "vicuna"]
    assert [one.content["method"] for one in found] == ["vicuna-pld", "eagle3", "autoregressive"]
    overall = found[0].content["overall"]
    assert (overall["tau"], overall["tokens"], overall["exact_match_rate"]) == (2.5, 26 * 5, None)
    rate = 26 * 5 / (26 * 2.0)
    assert overall["speedup"] == pytest.approx(rate / (26 * 8 / sum(4.0 + n for n in range(26))))
    assert found[0].content["baseline"]["source"].endswith("vanilla.jsonl")
    assert "vicuna-pld" in render(found)
    alone = load_all([pld])[0].content
    assert (alone["overall"]["speedup"], alone["baseline"]["tokens"]) == (None, 0)
    render(load_all([pld]))


def test_spec_bench_s_numbers_by_hand(tmp_path):
    """What its speed.py computes from choices[0], written out here, are figures of ours from the same files."""
    fast = [row(n, [2, 3] + [1] * (n % 5), 1.0 + n % 3) for n in range(40)]
    files = [
        written(tmp_path / "fast.jsonl", fast),
        written(tmp_path / "plain.jsonl", PLAIN + [row(n, [1] * 8, 3.0) for n in range(26, 40)]),
    ]
    found = load_all(files)[0].content
    data, base = ([json.loads(line) for line in Path(path).read_text().splitlines()] for path in files)
    tasks = {"overall": None, "mt_bench": CATEGORIES[:8]} | {name: (name,) for name in CATEGORIES[8:]}
    for task, categories in tasks.items():
        own, plain = (
            [line["choices"][0] for line in lines if categories is None or line["category"] in categories]
            for lines in (data, base)
        )
        lengths = [length for choice in own for length in choice["accept_lengths"]]
        speeds = [sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in own]
        slow = [sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in plain]
        block = found["overall"] if task == "overall" else found["subtasks"][task]
        assert block["tau"] == pytest.approx(sum(lengths) / len(lengths), rel=1e-12)  # #Mean accepted tokens
        mean = sum(speeds) / len(speeds)
        assert block["tokens_per_second_per_question"] == pytest.approx(mean, rel=1e-12)  # Tokens per second
        assert block["speedup_per_question"] == pytest.approx(
            mean / (sum(slow) / len(slow)), rel=1e-12
        )  # Speedup ratio


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"choices": []}, "no choice"),
        ({"choices": [{}]}, "new_tokens"),
        ({"choices": [{"new_tokens": [1], "wall_time": [1.0, 2.0], "accept_lengths": [1]}]}, "every turn"),
        ({"choices": [{"new_tokens": [1.5], "wall_time": [1.0], "accept_lengths": [1]}]}, "whole numbers"),
        ({"choices": [{"new_tokens": [1], "wall_time": [1e400], "accept_lengths": [1]}]}, "wall_time"),
        ({"choices": [{"new_tokens": [1], "wall_time": [1], "accept_lengths": [1], "decoding_steps": "x"}]}, "steps"),
        ({"category": 7}, "category"),
        ({"category": "\ud800"}, "category holds half of a surrogate pair"),
        ({"model_id": "x\ud800"}, "model_id holds half of a surrogate pair"),
        ({"specwave": {"tokens": [[1, 2]]}}, "new_tokens must be"),
    ],
)
def test_bad_lines_of_answer_files_are_named(tmp_path, change, words):
    path = written(tmp_path / "a.jsonl", [PLAIN[0], PLAIN[1] | change])
    with pytest.raises(UserError, match=words) as caught:
        load_all([path])
    assert str(caught.value.value) == f"{path}:2"


def test_entries_of_a_report(tmp_path, four):
    save_results(tmp_path / "run", four[2].content)
    with pytest.raises(UserError, match="named twice"):
        load_all([str(tmp_path / "run"), str(tmp_path / "x" / ".." / "run")])
    with pytest.raises(UserError, match="no such folder"):
        load_all([str(tmp_path / "nowhere")])


# ---------------------------------------------------------------- damaged results


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: c["overall"].update(tau="1.5"),
        lambda c: c["overall"].update(tau=float("nan")),
        lambda c: c["overall"].update(speedup=float("inf")),
        lambda c: c["overall"].update(tokens=True),
        lambda c: c["overall"]["intervals"].update(tau=[1.0]),
        lambda c: c["overall"]["intervals"].update(tau="x"),
        lambda c: c["overall"].update(time={"draft": None}),
        lambda c: c["overall"].update(acceptance={"drafts": 1}),
        lambda c: c["overall"].update(acceptance={"conditional": ["x"]}),
        lambda c: c["per_question"][0].pop("rounds"),
        lambda c: c["per_question"][0].update(accepted=None),
        lambda c: c["settings"].update(sampling={"temperature": "hot"}),
        lambda c: c["settings"].update(sampling=3),
        lambda c: c.update(failures=[1]),
        lambda c: c.update(divergences=[{}]),
        lambda c: c.update(divergences=[{"turn": 0, "position": 0, "top2_gap": 0, "gap": 0, "noise": 0}]),
        lambda c: c.update(layers=3),
        lambda c: c.update(rules="eagle3"),
        lambda c: c.update(machines=[1]),
        lambda c: c["settings"].update(checkpoint=["x"]),
        lambda c: c.update(label=7),
        lambda c: c.update(method=None),
        lambda c: c.update(definitions=[]),
    ],
)
def test_a_damaged_result_is_refused_by_name(tmp_path, four, damage):
    content = json.loads(json.dumps(four[2].content))
    damage(content)
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"results\.json: the file is damaged"):
        load_results(tmp_path, "report")


def test_results_of_an_earlier_version_still_make_a_report(tmp_path, four):
    content = json.loads(json.dumps(four[2].content))
    new = ("intervals", "acceptance", "time", "latency", "repetitions", "tau_per_question", "speedup_per_question",
           "tokens_per_second_per_question")  # fmt: skip
    for part in (
        content["overall"],
        content["baseline"],
        *content["subtasks"].values(),
        *content["categories"].values(),
    ):
        for name in new:
            part.pop(name)
    content.pop("per_question")
    save_results(tmp_path / "old", content)
    assert "τ" in render(load_all([str(tmp_path / "old")]))
