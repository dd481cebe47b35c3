"""What benchmarks/peers/vllm_cpu.py makes of vLLM's counters and texts, its gates, and a whole run beside a vLLM whose
words are written down."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specwave.artifacts import UserError
from specwave.benchmark.measures import acceptance
from specwave.data.conversations import prompt_ids
from specwave.decoding import generate
from specwave.eagle import load_drafter
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.export import TargetFacts, write_drafter
from specwave.eagle.start import initialise
from specwave.eagle.vocab import build_vocab_map
from specwave.target import load_target

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
NAMES = ("run", "served", "table", "venvs", "vllm_cpu", "wire", "peer_vllm")


@pytest.fixture(scope="module")
def peers():
    """The scripts as their own folder sees them."""
    sys.path.insert(0, str(PEERS))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    sys.path.remove(str(PEERS))
    for name in NAMES:
        del sys.modules[name]


@pytest.fixture
def served(peers):
    return peers.served


# ---------------------------------------------------------------- figures

#                       accepted drafts of each round, of 3 drafted; the answers hold one token more: the first
ROUNDS = ([2, 0, 1], [3, 3])


def counters(rounds, drafts=3):
    """What vLLM's counters grow by."""
    return [len(rounds), drafts * len(rounds), sum(rounds), *(sum(n > p for n in rounds) for p in range(drafts))]


def part(served, rounds=ROUNDS, layers=(3, 16), cut=0, first=9):
    """As the script makes one of vLLM's counters; `cut` tokens of each answer are beyond the limit."""
    made, before = served.Part(layers=list(layers)), [5, 15, 7, 4, 2, 1]  # an engine that has worked before
    for accepted in rounds:
        after = [old + new for old, new in zip(before, counters(accepted), strict=True)]
        each, by_position = served.of_counters(before, after)
        made.answers.append([first] * (1 + sum(accepted) + len(accepted) - cut))
        made.rounds.append(each)
        made.accepted.append(by_position)
        before = after
    return made


def own(served, rounds=ROUNDS, first=9):
    """As the script makes one of our accept lengths."""
    made = served.Part()
    for accepted in rounds:
        each, by_position = served.of_lengths([number + 1 for number in accepted], 3)
        made.answers.append([first] * (1 + sum(accepted) + len(accepted)))
        made.rounds.append(each)
        made.accepted.append(by_position)
    return made


def test_counters_and_accept_lengths_tell_the_same(served):
    theirs, ours = part(served), own(served)
    assert theirs.rounds == ours.rounds == [3, 2]
    assert theirs.accepted == ours.accepted == [[2, 1, 0], [2, 2, 2]]
    assert theirs.length == ours.length == theirs.counted == 1 + 9 / 5
    assert theirs.positions == [4 / 5, 3 / 5, 2 / 5]


def test_the_last_draft_beyond_the_limit_counts_for_vllm_alone(served):
    """Each answer ends 2 tokens before its last round does."""
    theirs = part(served, cut=2)
    assert theirs.counted == 1 + 9 / 5
    assert theirs.length == (9 + 5 - 2 * 2) / 5


def test_acceptance_by_position_is_that_of_results_json(served):
    lengths = [3, 1, 2, 4, 1, 2]
    rounds, accepted = served.of_lengths(lengths, 3)
    row = {"choices": [{"accept_lengths": lengths}], "specwave": {"draft_levels": [3] * len(lengths)}}
    found = acceptance([row])
    assert [count / rounds for count in accepted] == found["vllm"]
    assert (rounds, accepted) == (6, [4, 2, 1])


def test_counters_that_contradict_each_other_are_no_figures(served):
    with pytest.raises(ValueError, match="contradict"):
        served.of_counters([0] * 6, [2, 6, 3, 1, 1, 0])


def test_parts_outlive_a_file(served):
    made = part(served)
    again = served.Part.unpacked(json.loads(json.dumps(made.packed())))
    assert again == made
    assert served.Part.unpacked(served.Part(answers=[[]]).packed()).answers == [[]]


@pytest.mark.parametrize(
    ("log", "layers"),
    [
        ("INFO Using auxiliary layers from speculative config: (3, 16, 28)\n", [3, 16, 28]),
        ("auxiliary layers from speculative config: (16,)\n", [16]),
        (
            "auxiliary layers from speculative config: (1, 2)\nx\nauxiliary layers from speculative config: (3, 4)",
            [3, 4],
        ),
        ("loaded without a word", None),
    ],
)
def test_layers_are_read_from_the_log(served, log, layers):
    assert served.named_layers(log) == layers


# ---------------------------------------------------------------- gates


def divergence(pair="vllm", question=81, near_tie=False):
    return {
        "pair": pair,
        "question": question,
        "position": 4,
        "reference": 7,
        "candidate": None if pair == "ours" else 8,
        "top2_gap": 0.25,
        "gap": None if pair == "ours" else 0.5,
        "noise": 1e-6,
        "near_tie": near_tie,
    }


def test_what_agrees_passes(served):
    found = served.verdict(part(served), own(served), [3, 16], [divergence(near_tie=True)], 0.05)
    assert found["failures"] == []
    assert found["deviation"] == 0
    assert found["as_many_rounds"] == [2, 2]
    assert found["mean_acceptance_length"] == {"vllm": 2.8, "vllm_counted": 2.8, "specwave": 2.8}


@pytest.mark.parametrize(("tolerance", "failures"), [(0.28, 0), (0.27, 1)])
def test_lengths_further_apart_than_allowed_fail(served, tolerance, failures):
    """2.8 against 2.2 is 27.3 % more."""
    found = served.verdict(part(served), own(served, ([1, 0, 1], [2, 2])), [3, 16], [], tolerance)
    assert len(found["failures"]) == failures
    assert all("2.800 in vLLM, 2.200 here: +27.3%, 27% is allowed" in line for line in found["failures"])
    assert served.verdict(own(served, ([1, 0, 1], [2, 2])), part(served), [3, 16], [], 0.2)["deviation"] < -0.2


def test_other_layers_fail(served):
    """vllm#50170: an engine that takes its default says nothing and accepts little."""
    for read in ([3, 15], None):
        theirs = part(served)
        theirs.layers = read
        (failure,) = served.verdict(theirs, own(served), [3, 16], [], 0.05)["failures"]
        assert failure == f"vLLM reads layers {read}, config.json names [3, 16]"


def test_a_divergence_without_a_near_tie_fails(served):
    apart = [divergence(), divergence(question=90), divergence("engines"), divergence("ours", near_tie=True)]
    found = served.verdict(part(served), own(served), [3, 16], apart, 0.05)
    assert found["failures"] == [
        "vLLM with drafts and vLLM, plain differ, and not by a near-tie: questions 81, 90",
        "vLLM with drafts and specwave, plain differ, and not by a near-tie: questions 81",
    ]
    assert served.same_text(found | {"questions": 2}, "vllm") == "0/2"
    assert served.same_text(found | {"questions": 2}, "engines") == "1/2"


def test_a_drafter_that_is_not_served_or_never_drafts_fails(served):
    assert served.verdict(None, None, [3], [], 0.05, "KeyError: fc")["failures"] == ["not served: KeyError: fc"]
    idle = part(served, rounds=([], []))
    assert "nothing was drafted" in served.verdict(idle, idle, [3, 16], [], 0.05)["failures"][0]


def test_rounds_are_compared_where_texts_are_equal(served):
    ours = own(served, ([2, 0, 1], [3, 2, 0]))  # the second answer as long, in one round more
    assert served.as_many_rounds(part(served), ours) == (1, 2)
    ours.answers[1] = [1, 2, 3]
    assert served.as_many_rounds(part(served), ours) == (1, 1)


def test_the_table_has_a_row_for_each(served):
    verdicts = {
        "L2-15": served.verdict(part(served, cut=1), own(served), [3, 16], [], 0.2),
        "L15": served.verdict(None, None, [16], [], 0.05, "a | b"),
    }
    header, rule, first, second = served.markdown(verdicts).splitlines()
    assert header.count("|") == rule.count("|") == first.count("|") == second.count("|")
    assert first == (
        "| L2-15 | 2/2 | 2/2 | 2.400 | 2.800 | -14.3% | 2.800 | 0/0 | 0.800 0.600 0.400 | 0.800 0.600 0.400 | passed |"
    )
    assert second.startswith("| L15 | – |")
    assert second.endswith("| not served: a / b |")


def test_divergences_are_listed_with_place_and_gap(served):
    assert served.listed("L2", divergence()) == (
        "DIVERGENCE: L2, question 81, token 4: vLLM with drafts has 8, vLLM, plain 7; gap 5.00e-01, top two 2.50e-01, "
        "noise 1.00e-06"
    )
    assert served.listed("L2", divergence("ours", near_tie=True)).startswith("near-tie: L2, question 81, token 4: spec")


# ---------------------------------------------------------------- vLLM's side


def test_the_worker_reads_vllm_s_counters(peers):
    names = {"num_drafts": 5, "num_draft_tokens": 15, "num_accepted_tokens": 4}
    metrics = [SimpleNamespace(name=f"vllm:spec_decode_{name}", value=value) for name, value in names.items()]
    metrics.append(SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[3, 1, 0]))
    metrics.append(SimpleNamespace(name="vllm:prompt_tokens", value=77))
    engine = SimpleNamespace(get_metrics=lambda: metrics[::-1])
    assert peers.peer_vllm.counters(engine) == [5, 15, 4, 3, 1, 0]


# ---------------------------------------------------------------- a whole run

WORKER = """
import json, sys
sys.path.insert(0, {peers!r})
from wire import serve

script = json.load(open({script!r}))
reading = [0] * 5

def load(settings):
    if script.get("broken") == settings["method"]:
        raise RuntimeError("no such layer")
    if settings["counted"]:
        print("auxiliary layers from speculative config: " + script["layers"])

    def decode(method, drafts, ids, new_tokens):
        if method == "counters":
            return reading
        told = script[method][json.dumps(ids)]
        reading[:] = [old + new for old, new in zip(reading, told.get("counters", [0] * 5))]
        return told["tokens"]

    return decode

serve(load)
"""
LIMIT, DRAFTS = 12, 2


@pytest.fixture(scope="module")
def setting(peers, family_folders, tmp_path_factory):
    """Two questions, a drafter, and a script of what a vLLM that works would say of them."""
    folder = tmp_path_factory.mktemp("served")
    target = load_target(family_folders["llama"], "float32")
    counts = torch.arange(target.vocab_size)
    d2t, t2d = build_vocab_map(counts, 400)
    torch.manual_seed(0)
    drafter = Eagle3Drafter(DrafterConfig.of_target(target.arch, [2, 7], 400), d2t, t2d)
    initialise(drafter, target, "target", seed=0)
    facts = TargetFacts(target.name, target.fingerprint, target.num_layers)
    write_drafter(folder / "L2-7", drafter, facts, dtype=torch.float32)
    asked = ["tell me", "and then?"]
    rows = [{"question_id": 81 + place, "category": "qa", "turns": [text]} for place, text in enumerate(asked)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = {"layers": "(3, 8)", "plain": {}, "eagle3": {}}
    proposer = load_drafter(folder / "L2-7", target, levels=DRAFTS)
    for text in asked:
        ids = prompt_ids(target, [{"role": "user", "content": text}])
        plain = generate(target, None, ids, max_new_tokens=LIMIT).tokens
        assert len(plain) == LIMIT, "the answers must not end early, or the script below is of another length"
        made = generate(target, proposer, [*ids, plain[0]], max_new_tokens=LIMIT - 1)
        rounds = [length - 1 for length in made.accept_lengths]
        script["plain"][json.dumps(ids)] = {"tokens": plain}
        told = {"tokens": [plain[0], *made.tokens], "counters": counters(rounds, DRAFTS)}
        script["eagle3"][json.dumps(ids)] = told
    return folder, family_folders["llama"], script


def run(peers, monkeypatch, setting, tmp_path, script, *more):
    """The script's exit code, beside a vLLM that says what `script` says."""
    folder, model, _ = setting
    (tmp_path / "script.json").write_text(json.dumps(script))
    worker = WORKER.format(peers=str(PEERS), script=str(tmp_path / "script.json"))
    (tmp_path / "peer_vllm.py").write_text(worker)
    monkeypatch.setattr(peers.vllm_cpu, "HERE", tmp_path)
    monkeypatch.setattr(peers.vllm_cpu, "interpreter", lambda peer, venvs: Path(sys.executable))
    given = ["--model", str(model), "--benchmark", str(folder / "questions.jsonl"), "--questions", "2"]
    given += ["--new-tokens", str(LIMIT), "--drafts", str(DRAFTS), "--threads", "1"]
    given += ["--venvs", str(tmp_path), "--out", str(tmp_path / "found.json"), *more]
    monkeypatch.setattr(sys, "argv", ["vllm_cpu.py", str(folder / "L2-7"), *given])
    return peers.vllm_cpu.main()


def test_a_run_passes_and_goes_on_from_what_is_kept(peers, monkeypatch, setting, tmp_path, capsys):
    assert run(peers, monkeypatch, setting, tmp_path, setting[2]) == 0
    printed = capsys.readouterr().out
    assert "| L2-7 | 2/2 | 2/2 |" in printed
    assert "no text differs" in printed
    found = json.loads((tmp_path / "found.json").read_text())
    verdict = found["verdicts"]["L2-7"]
    assert verdict["as_many_rounds"] == [2, 2]
    assert verdict["deviation"] == 0
    assert verdict["mean_acceptance_length"]["vllm"] == 2 * (LIMIT - 1) / verdict["rounds"]["vllm"]
    assert (tmp_path / "found.md").read_text().strip() in printed
    # Now vLLM cannot even start: all it did is kept.
    assert run(peers, monkeypatch, setting, tmp_path, {"broken": "plain"}) == 0
    assert json.loads((tmp_path / "found.json").read_text())["parts"] == found["parts"]
    with pytest.raises(UserError, match=r"--out=.*another run"):
        run(peers, monkeypatch, setting, tmp_path, setting[2], "--drafts", "1")


def test_another_text_and_other_layers_fail(peers, monkeypatch, setting, tmp_path, capsys):
    script = json.loads(json.dumps(setting[2])) | {"layers": "(2, 8)"}
    told = next(iter(script["eagle3"].values()))
    told["tokens"][5] ^= 1
    assert run(peers, monkeypatch, setting, tmp_path, script) == 1
    printed = capsys.readouterr().out
    assert "DIVERGENCE: L2-7, question 81, token 5: vLLM with drafts has" in printed
    assert "vLLM reads layers [2, 8], config.json names [3, 8]" in printed
    assert "| L2-7 | 1/2 | 1/2 |" in printed


def test_a_drafter_that_does_not_load_is_tried_again(peers, monkeypatch, setting, tmp_path, capsys):
    assert run(peers, monkeypatch, setting, tmp_path, setting[2] | {"broken": "eagle3"}) == 1
    assert "not served: RuntimeError: no such layer" in capsys.readouterr().out
    assert run(peers, monkeypatch, setting, tmp_path, setting[2]) == 0


def test_without_a_vllm_nothing_is_compared(peers, monkeypatch, setting, tmp_path, capsys):
    assert run(peers, monkeypatch, setting, tmp_path, {"broken": "plain"}) == 1
    assert "vLLM does not run here: RuntimeError: no such layer" in capsys.readouterr().err


def test_drafters_of_one_name_are_refused(peers, monkeypatch, setting, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        run(peers, monkeypatch, setting, tmp_path, setting[2], str(tmp_path / "L2-7"))
    assert ended.value.code == 2
    assert "two drafters are called L2-7" in capsys.readouterr().err


def test_untrained_drafters_of_every_layout(peers, families, tmp_path):
    """One layer (padded), two, three, and EAGLE-3.1's switches: each is written so that it can be read."""
    target = families["llama"]
    made = peers.vllm_cpu.untrained(target, tmp_path)
    assert [folder.name for folder in made] == [
        "untrained-L4",
        "untrained-L4-5",
        "untrained-L2-4-5",
        "untrained-L2-4-5+fc_norm+norm_output",
    ]
    assert [len(load_drafter(folder, target).layers) for folder in made] == [1, 2, 3, 3]
