"""Mutated question files, configs, answers and results: one line that says what is wrong, or the right content.

Every mutation is seeded by its number. What is read without complaint is compared with what a plain JSON reader finds:
nothing is passed over, guessed or cut.
"""

import copy
import json
import math
import random

import pytest
from omegaconf import OmegaConf

from specwave.app import config as configs
from specwave.artifacts import UserError
from specwave.benchmark import Benchmark, paper, writers
from specwave.benchmark.interop import load_all
from specwave.benchmark.questions import BUILTIN, choose, fingerprint
from specwave.benchmark.report import divergence_table, headline, page_tables, plots, settings, subject, unique_labels
from specwave.benchmark.results import Baseline, build_results, load_run
from specwave.benchmark.rows import failed

ODD = [
    *(None, True, False, 0, -1, 1.5, 1e999, math.nan, 10**400, "", " ", "x", "\u2028", [], {}, [[]], [None], {"a": 1}),
    *("1", ["x"], [1], [True], 2**63, 1e-320, "qa"),
]
LINES = [json.loads(line) for line in BUILTIN.read_text(encoding="utf-8").splitlines()[:14]]


def one_line(error):
    text = " ".join(str(error).split())
    assert error.key
    assert error.remedy
    assert "Traceback" not in text


def mutate_value(draw, value):
    """`value` with one thing in it, at any depth, replaced, dropped, renamed, doubled or added."""
    value = copy.deepcopy(value)
    holder, place = {"": value}, ""
    while isinstance(holder[place], dict | list) and holder[place] and draw.random() < 0.8:
        holder = holder[place]
        place = draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))
    kind = draw.randrange(5)
    if kind == 0 and place != "":
        del holder[place]
    elif kind == 1 and isinstance(holder, dict) and place != "":
        holder[f"{place}_"] = holder.pop(place)
    elif kind == 2 and isinstance(holder, list):
        holder.insert(place, copy.deepcopy(holder[place]))
    elif kind == 3 and isinstance(holder[place], str):
        holder[place] = holder[place][: draw.randrange(len(holder[place]) + 1)]
    else:
        holder[place] = draw.choice(ODD)
    return holder[""] if "" in holder and place == "" else value


def mutate_text(draw, content):
    """Bytes flipped, cut out, doubled or cut off; lines swapped or doubled."""
    content = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        if not content:
            break
        place, size = draw.randrange(len(content)), draw.randint(1, 40)
        kind = draw.randrange(6)
        if kind == 0:
            content[place] = draw.randrange(256)
        elif kind == 1:
            del content[place : place + size]
        elif kind == 2:
            content[place:place] = content[place : place + size]
        elif kind == 3:
            del content[max(1, place) :]
        else:
            lines = bytes(content).split(b"\n")
            one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
            lines[one] = lines[other] if kind == 4 else lines[one] + lines[other]
            content = bytearray(b"\n".join(lines))
    return bytes(content)


def mutated(draw, rows):
    """The bytes of a JSONL file with something wrong, or at least something else, in it."""
    rows = list(rows)
    if draw.random() < 0.7:
        for _ in range(draw.randint(1, 2)):
            place = draw.randrange(len(rows))
            rows[place] = mutate_value(draw, rows[place])
        if draw.random() < 0.2:
            rows.append(copy.deepcopy(draw.choice(rows)))
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    return mutate_text(draw, "".join(json.dumps(row) + "\n" for row in rows).encode())


# ---------------------------------------------------------------- questions


def test_300_mutated_question_files(tmp_path):
    read = refused = 0
    for seed in range(300):
        draw = random.Random(f"questions {seed}")
        path = tmp_path / "question.jsonl"
        path.write_bytes(mutated(draw, LINES))
        limit = draw.choice([None, None, 1, 5, 100])
        try:
            found = Benchmark(str(path)).questions()
            some = Benchmark(str(path)).questions(limit)
        except UserError as error:
            one_line(error)
            refused += 1
            continue
        read += 1
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        assert [(q.id, q.category, list(q.turns)) for q in found] == [
            (row["question_id"], row["category"], row["turns"]) for row in rows
        ]
        assert len({str(question.id) for question in found}) == len(found)
        assert all(isinstance(turn, str) and turn.strip() for question in found for turn in question.turns)
        assert some == choose(found, limit)
        assert len(some) == min(len(found), limit or len(found))
        assert len(fingerprint(found)) == 16
    assert refused > 100
    assert read > 30


# ---------------------------------------------------------------- configs

KEYS = (
    *("limit", "categories", "max_new_tokens", "repeat", "devices", "baseline", "report", "checkpoint"),
    *("allow_other_target", "seed", "sampling.temperature", "sampling.top_k", "sampling.top_p", "sampling.min_p"),
    *("sampling.repetition_penalty", "sampling.seed", "model.dtype", "model.device", "model.name", "benchmark.sha256"),
)
MORE = {  # keys of each benchmark beside those
    "builtin": ["benchmark.path"],
    "spec_bench": ["benchmark.path", "benchmark.url"],
    "long_context": ["benchmark.path", "benchmark.lengths", "benchmark.tasks", "benchmark.each", "benchmark.seed"],
}
VALUES = (
    *(
        "null",
        "true",
        "0",
        "1",
        "-1",
        "3",
        "1.5",
        "1e9",
        "1e400",
        "nan",
        "inf",
        "''",
        "x",
        "[]",
        "[1]",
        "[qa]",
        "{a: 1}",
    ),
    *(
        "[qa,rag]",
        "[cooking]",
        "[null]",
        "[[1]]",
        "0x10",
        "1_000",
        "99999999999999999999",
        "'1'",
        "[1024]",
        "[reasoning]",
    ),
    *("???", "${seed}", "${nowhere}", "float32", "cpu", "[a b]", "nowhere", "yes", "0.9", "-0.5"),
)


def same(held, given):
    """Whether a value is the one that was given, as a text, a number or a word for yes and no."""
    if held == given or str(held) == str(given):
        return True
    if isinstance(held, list) and isinstance(given, list):
        return len(held) == len(given) and all(map(same, held, given))
    if isinstance(held, bool) and isinstance(given, int | float):  # OmegaConf's way with numbers
        return held == bool(given)
    if isinstance(held, bool):
        return str(given).lower() in (("yes", "true", "on", "1") if held else ("no", "false", "off", "0"))
    try:
        return float(held) == float(given)
    except (TypeError, ValueError):
        return False


def test_200_mutated_configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    composer = configs.Composer("evaluate")
    built = refused = 0
    for seed in range(200):
        draw = random.Random(f"config {seed}")
        option = draw.choice(list(MORE))
        chosen = draw.sample([*KEYS, *MORE[option]], draw.choice([1, 1, 1, 2]))
        overrides = [f"{key}={draw.choice(VALUES)}" for key in chosen]
        if draw.random() < 0.1:
            place = draw.randrange(len(overrides))
            overrides[place] = mutate_text(draw, overrides[place].encode()).decode("utf-8", "replace")
            chosen = []
        try:
            composed = composer(["model=tiny", f"benchmark={option}", *overrides])
            content = configs.check("evaluate", composed)
            config = configs.build("evaluate", content)
            if (
                config.report is None  # which reads no benchmark
                and not config.benchmark.needs_target
                and getattr(config.benchmark, "path", None) is None
                and option == "builtin"
            ):
                questions = config.benchmark.questions(config.limit, config.categories)
                assert len(questions) <= (config.limit or 52)
                assert not config.categories or {q.category for q in questions} <= set(config.categories)
        except UserError as error:
            one_line(error)
            refused += 1
            continue
        built += 1
        for key in chosen:  # what was accepted is what was given
            given, held = OmegaConf.select(composed, key), config
            for part in key.split("."):
                if isinstance(held, dict):  # a group that a report does not read, and leaves as it is
                    held = held[part]
                else:
                    held = getattr(held, part) if hasattr(held, part) else content[part]
            given = OmegaConf.to_container(given) if OmegaConf.is_config(given) else given
            assert same(held, given), (overrides, held, given)
            assert key == "checkpoint" or not isinstance(held, float) or math.isfinite(held), overrides
    assert refused > 80
    assert built > 30


# ---------------------------------------------------------------- answers and results


def answers():
    rows = []
    for number, line in enumerate(LINES):
        count = len(line["turns"])
        choice = {
            "index": 0,
            "turns": ["…"] * count,
            "decoding_steps": [2] * count,
            "new_tokens": [3 + number % 2] * count,
            "wall_time": [0.5 + number] * count,
            "accept_lengths": [2, 1 + number % 2] * count,
        }
        own = {"tokens": [[1] * (3 + number % 2)] * count, "draft_levels": [2, 2] * count, "peak_memory_bytes": 1}
        own |= {f"{name}_seconds": [0.1] * count for name in ("prefill", "draft", "verify", "accept", "warmup")}
        head = {name: line[name] for name in ("question_id", "category")}
        rows.append(head | {"model_id": "m", "choices": [choice], "tstamp": 1.0, "specwave": own})
    return rows


def looked_at(results):
    """Everything of a report."""
    labels = unique_labels(results)
    certain = paper.certainty(results, labels)
    found, page = paper.tables(results, certain), page_tables(results, certain)
    texts = [writers.markdown(found), writers.latex(found), writers.as_csv(results), writers.markdown(page)]
    texts += [subject(results), headline(results, labels), str(settings(results))]
    texts += [writers.markdown([divergence_table(results, labels)])]
    texts += [plot.svg + plot.alt for plot in plots(results, labels)]
    return "\n".join(texts)


def test_200_mutated_answer_files(tmp_path):
    read = refused = 0
    path = tmp_path / "answers.jsonl"
    for seed in range(200):
        draw = random.Random(f"answers {seed}")
        path.write_bytes(mutated(draw, answers()))
        try:
            (found,) = load_all([str(path)])
            text = looked_at([found])
        except UserError as error:
            one_line(error)
            refused += 1
            continue
        read += 1
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        kept = [row for row in rows if not failed(row)]
        lengths = [n for row in kept for choice in row["choices"] for n in choice["accept_lengths"]]
        overall = found.content["overall"]
        assert (overall["questions"], overall["failed"]) == (len(kept), len(rows) - len(kept))
        assert overall["rounds"] == len(lengths)
        assert overall["tau"] == (sum(lengths) / len(lengths) if lengths else None)
        seconds = sum(sum(choice["wall_time"]) for row in kept for choice in row["choices"])
        if overall["tokens_per_second"] is not None:
            assert overall["tokens_per_second"] == pytest.approx(overall["tokens"] / seconds)
        assert json.dumps(found.content, allow_nan=False)
        assert "nan" not in text.replace("dominant", "")
    assert refused > 60
    assert read > 30


@pytest.fixture(scope="module")
def whole():
    rows = answers()
    plain = [row | {"choices": [row["choices"][0] | {"accept_lengths": [1] * 4}]} for row in rows]
    settings = {
        "target": "t",
        "fingerprint": "f",
        "dtype": "float32",
        "sampling": {"temperature": 0.0},
        "decoding": {"name": "eagle3", "levels": 2, "top_k": 1, "total_token": None, "tree": None},
        "benchmark": {"name": "b", "questions": 14, "fingerprint": "g"},
        "checkpoint": None,
    }
    left = [{"question_id": 3, "turn": 0, "position": 1, "reference": 1, "candidate": 2, "top2_gap": 0.1, "gap": 0.1,
             "noise": None, "near_tie": False}]  # fmt: skip
    return build_results(
        label="L2", method="eagle3", rows=rows, baseline=Baseline(plain), verdicts=None, divergences=left,
        settings=settings, layers=[2, 4], rules=["eagle3"],
    )  # fmt: skip


def test_200_mutated_results(tmp_path, whole):
    read = refused = 0
    for seed in range(200):
        draw = random.Random(f"results {seed}")
        content = mutate_value(draw, whole)
        text = json.dumps(content)
        if draw.random() < 0.2:
            text = mutate_text(draw, text.encode()).decode("utf-8", "replace")
        (tmp_path / "results.json").write_text(text, encoding="utf-8")
        try:
            (found,) = load_run(tmp_path)
            said = looked_at([found])
        except UserError as error:
            one_line(error)
            refused += 1
            continue
        read += 1
        assert "Infinity" not in said
        assert " nan" not in said
        tau = found.content["overall"]["tau"]
        assert f"{tau:.2f}" in said or tau is None
    assert refused > 40
    assert read > 30
