"""The answerer: stub proposers give the τ they must, failures are rows, the order rotates, near-ties are
followed, repetitions are choices."""

import json

import pytest
import torch

from specwave.artifacts import UserError
from specwave.benchmark.answering import Answerer, Method, rotated, sequence_id
from specwave.benchmark.answers import AnswerFile, read_answers
from specwave.benchmark.evaluator import Evaluator, predict
from specwave.benchmark.metrics import blocks
from specwave.benchmark.questions import Question
from specwave.decoding import BaseProposer, Sampling, Tree, generate
from specwave.skipping import ClaspDecoding

QUESTIONS = [
    Question(1, "writing", ("Tell me a tale.", "And another one.")),
    Question(2, "qa", ("Why is rain wet?",)),
    Question("c", "rag", ("What does the text say about rivers?",)),
]
LEVELS, LIMIT = 3, 12  # the limit is a multiple of LEVELS + 1, so an oracle's last round is whole


class Oracle(BaseProposer):
    """Drafts the target's own continuation (`shift` 0), or always something else."""

    def __init__(self, target, shift):
        self.target, self.shift = target, shift

    def propose_row(self, context):
        made = generate(self.target, None, context.tokens, max_new_tokens=LEVELS, eos_ids=())
        return Tree.chain([(token + self.shift) % self.target.vocab_size for token in made.tokens])


class Failing(BaseProposer):
    """Fails on prompts of which `when` is true."""

    def __init__(self, when):
        self.when = when

    def begin(self, contexts):
        if self.when(contexts[0].tokens):
            raise RuntimeError("out of luck")


@pytest.fixture(scope="module")
def target(tiny):
    """Without an end token, so that every answer has LIMIT tokens."""
    before, tiny.eos_ids = tiny.eos_ids, ()
    yield tiny
    tiny.eos_ids = before


@pytest.fixture
def answerer(target):
    return Answerer(target, LIMIT, Sampling())


def run(answerer, methods, questions):
    predict(Evaluator(answerer, methods, questions))


def method(folder, label, proposer):
    return Method(label, label, proposer, AnswerFile(folder / label, {"name": label}))


def test_always_and_never_accepted_give_the_right_tau(answerer, target, tmp_path):
    methods = [
        method(tmp_path, "plain", None),
        method(tmp_path, "right", Oracle(target, 0)),
        method(tmp_path, "wrong", Oracle(target, 1)),
    ]
    run(answerer, methods, QUESTIONS)
    plain = methods[0].answers.rows
    for each, tau in zip(methods, (1.0, LEVELS + 1.0, 1.0), strict=True):
        verdicts, divergences = answerer.verdicts(each, plain, QUESTIONS)
        found = blocks(each.answers.rows, plain, verdicts)
        assert found["overall"]["tau"] == tau
        assert found["overall"]["tokens"] == 4 * LIMIT  # 4 turns
        assert found["categories"]["writing"]["tokens"] == 2 * LIMIT
        assert found["overall"]["exact_match_rate"] == 1.0
        assert all(entry["near_tie"] for entry in divergences)


def test_rows_have_spec_bench_s_form(answerer, target, tmp_path):
    one = method(tmp_path, "plain", None)
    run(answerer, [one], QUESTIONS)
    rows = read_answers(tmp_path / "plain" / "answers.jsonl", "x")
    assert rows == one.answers.rows
    assert [row["question_id"] for row in rows] == [1, 2, "c"]
    first = rows[0]
    assert set(first) - {"specwave"} == {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"}
    (choice,) = first["choices"]
    assert set(choice) == {"index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"}
    assert choice["index"] == 0
    for name in ("turns", "decoding_steps", "new_tokens", "wall_time"):
        assert len(choice[name]) == 2
    assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) == sum(map(len, first["specwave"]["tokens"]))
    assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])


def test_the_second_turn_sees_the_method_s_own_first_answer(answerer, target, tmp_path):
    one = method(tmp_path, "plain", None)
    run(answerer, [one], QUESTIONS[:1])
    row = one.answers.rows[0]
    text = target.tokenizer.decode(answerer.prompt(QUESTIONS[0], row["choices"][0]["turns"][:1]))
    answer = row["choices"][0]["turns"][0].strip()
    assert text.index("Tell me a tale.") < text.index(answer) < text.index("And another one.")


def test_a_failing_question_is_a_row_and_the_rest_goes_on(answerer, target, tmp_path):
    poor = Failing(lambda tokens: "rain" in target.tokenizer.decode(tokens))
    methods = [method(tmp_path, "plain", None), method(tmp_path, "poor", poor)]
    run(answerer, methods, QUESTIONS)
    rows = {row["question_id"]: row for row in methods[1].answers.rows}
    assert rows[2]["choices"] == []
    assert rows[2]["specwave"]["error"] == "RuntimeError: out of luck"
    verdicts, _ = answerer.verdicts(methods[1], methods[0].answers.rows, QUESTIONS)
    found = blocks(methods[1].answers.rows, methods[0].answers.rows, verdicts)
    assert (found["overall"]["questions"], found["overall"]["failed"]) == (2, 1)
    assert found["categories"]["qa"]["tokens"] == 0
    assert set(verdicts) == {1, "c"}

    again = AnswerFile(tmp_path / "poor", {"name": "poor"})  # a resumed run tries the failed one again
    assert again.done == {1, "c"}
    run(answerer, [Method("poor", "poor", None, again)], QUESTIONS)
    assert sorted(map(str, (row["question_id"] for row in read_answers(tmp_path / "poor" / "answers.jsonl", "x")))) == [
        "1",
        "2",
        "c",
    ]


def test_a_method_that_always_fails_does_not_stop_the_run(answerer, tmp_path):
    methods = [method(tmp_path, "plain", None), method(tmp_path, "broken", Failing(lambda _: True))]
    run(answerer, methods, QUESTIONS)
    assert all("error" in row["specwave"] for row in methods[1].answers.rows)
    assert not any("error" in row["specwave"] for row in methods[0].answers.rows)


def test_a_prompt_beyond_the_context_fails_alone(answerer, target, tmp_path):
    long = Question(9, "qa", ("word " * target.max_length,))
    one = method(tmp_path, "plain", None)
    run(answerer, [one], [long, QUESTIONS[1]])
    assert "max_new_tokens" in one.answers.rows[0]["specwave"]["error"]
    assert one.answers.rows[1]["choices"]


def test_order_rotates_over_questions():
    assert [rotated("abc", number) for number in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


class Noting(BaseProposer):
    """Says in a list whenever it begins."""

    def __init__(self, label, said):
        self.label, self.said = label, said

    def begin(self, contexts):
        self.said.append(self.label)


def test_repetitions_are_choices_and_methods_take_turns_within_them(answerer, tmp_path):
    answerer.repeat, said = 3, []
    methods = [method(tmp_path, label, Noting(label, said)) for label in "ab"]
    run(answerer, methods, QUESTIONS[1:])
    assert "".join(said) == "ab" + "abbaab" + "baabba"  # the warm-up; three turns at a question; the next one
    for each in methods:
        rows = read_answers(each.answers.folder / "answers.jsonl", "x")
        assert [[choice["index"] for choice in row["choices"]] for row in rows] == [[0, 1, 2]] * 2
        assert [len(row["specwave"]["repetitions"]) for row in rows] == [2, 2]
        for row in rows:
            assert {json.dumps(choice["turns"]) for choice in row["choices"]} == {
                json.dumps(row["choices"][0]["turns"])
            }
    found = blocks(methods[0].answers.rows, methods[1].answers.rows, None)["overall"]
    assert (found["questions"], found["tokens"]) == (2, 6 * LIMIT)
    assert found["repetitions"]["count"] == 3
    low, high = found["repetitions"]["tokens_per_second_interval"]
    assert low < sum(found["repetitions"]["tokens_per_second"]) / 3 < high


def test_sampled_repetitions_meet_noise_of_their_own(target, tmp_path):
    answerer = Answerer(target, LIMIT, Sampling(1.0, 5), repeat=2)
    methods = [method(tmp_path, "plain", None), method(tmp_path, "wrong", Oracle(target, 1))]
    run(answerer, methods, QUESTIONS[1:2])
    (plain,), (wrong,) = (each.answers.rows for each in methods)
    first, second = plain["specwave"]["tokens"], plain["specwave"]["repetitions"][0]["tokens"]
    assert first != second
    assert [first, second] == [wrong["specwave"]["tokens"], wrong["specwave"]["repetitions"][0]["tokens"]]


def test_a_method_that_fails_the_second_time_is_one_failed_row(answerer, target, tmp_path):
    calls = []
    poor = Failing(lambda tokens: calls.append(1) or len(calls) == 3)  # the warm-up, the first answer, the second
    answerer.repeat, methods = 2, [method(tmp_path, "plain", None), method(tmp_path, "poor", poor)]
    run(answerer, methods, QUESTIONS[1:2])
    assert [len(each.answers.rows) for each in methods] == [1, 1]
    assert methods[1].answers.rows[0]["choices"] == []
    assert len(methods[0].answers.rows[0]["choices"]) == 2


def test_what_rounds_drafted_and_where_time_went_is_noted(answerer, target, tmp_path):
    one = method(tmp_path, "right", Oracle(target, 0))
    run(answerer, [one], QUESTIONS)
    for row in one.answers.rows:
        (choice,), noted = row["choices"], row["specwave"]
        turns = len(choice["turns"])
        assert noted["draft_levels"] == [LEVELS] * (LIMIT // (LEVELS + 1)) * turns
        for wall, *spent in zip(
            choice["wall_time"], noted["prefill_seconds"], noted["draft_seconds"], noted["verify_seconds"], strict=True
        ):
            assert 0.5 * wall < sum(spent) <= wall * 1.001
        assert all(
            0 < part < whole for part, whole in zip(noted["accept_seconds"], noted["verify_seconds"], strict=True)
        )
    found = blocks(one.answers.rows, [], None)["overall"]
    assert found["acceptance"]["conditional"] == [1.0] * LEVELS
    assert found["acceptance"]["vllm"] == [1.0] * LEVELS
    assert sum(found["time"].values()) == pytest.approx(
        sum(sum(r["choices"][0]["wall_time"]) for r in one.answers.rows)
    )


def test_every_method_meets_the_same_noise(target, tmp_path):
    answerer = Answerer(target, LIMIT, Sampling(1.0, 5))
    methods = [method(tmp_path, "plain", None), method(tmp_path, "wrong", Oracle(target, 1))]
    run(answerer, methods, QUESTIONS)
    plain, wrong = ([row["specwave"]["tokens"] for row in each.answers.rows] for each in methods)
    assert plain == wrong  # keyed noise: sampled output is the same token for token
    turns = [sequence_id(question, turn) for question in QUESTIONS for turn in range(2)]
    assert len(set(turns)) == len(turns)


def test_a_changed_token_is_found_with_its_gap(answerer, target, tmp_path):
    one = method(tmp_path, "plain", None)
    run(answerer, [one], QUESTIONS[1:2])
    plain = json.loads(json.dumps(one.answers.rows))
    tokens = one.answers.rows[0]["specwave"]["tokens"][0]
    tokens[4] = (tokens[4] + 1) % target.vocab_size
    verdicts, divergences = answerer.verdicts(one, plain, QUESTIONS)
    assert not verdicts[2].exact
    (found,) = divergences
    assert (found["question_id"], found["turn"], found["position"]) == (2, 0, 4)
    assert found["gap"] >= found["top2_gap"] > 10 * found["noise"]


def test_a_near_tie_in_the_first_turn_moves_the_reference_of_the_second(answerer, target, tmp_path, monkeypatch):
    """The second turn is judged against the target's own answer to the method's conversation."""
    one = method(tmp_path, "plain", None)
    run(answerer, [one], QUESTIONS[:1])
    plain = json.loads(json.dumps(one.answers.rows))
    row = one.answers.rows[0]
    row["specwave"]["tokens"][0][-1] = (row["specwave"]["tokens"][0][-1] + 1) % target.vocab_size
    row["choices"][0]["turns"][0] = "quite another answer"
    second = answerer.prompt(QUESTIONS[0], ["quite another answer"])
    row["specwave"]["tokens"][1] = list(answerer.decode(None, second, LIMIT).tokens)
    assert row["specwave"]["tokens"][1] != plain[0]["specwave"]["tokens"][1]
    monkeypatch.setattr("specwave.benchmark.exact.TOLERANCE", 1e9)  # whatever differs is a near-tie
    verdicts, divergences = answerer.verdicts(one, plain, QUESTIONS)
    assert verdicts[1].exact
    assert verdicts[1].near_ties == 1
    assert [(entry["turn"], entry["position"]) for entry in divergences] == [(0, LIMIT - 1)]


def test_below_float32_near_ties_are_not_counted(answerer, target, tmp_path, monkeypatch):
    one = method(tmp_path, "plain", None)
    run(answerer, [one], QUESTIONS[1:2])
    plain = json.loads(json.dumps(one.answers.rows))
    one.answers.rows[0]["specwave"]["tokens"][0][3] += 1
    monkeypatch.setattr(target, "dtype", torch.bfloat16)  # only what the contract reads; weights stay
    verdicts, divergences = answerer.verdicts(one, plain, QUESTIONS)
    assert (verdicts[2].exact, verdicts[2].near_ties) == (False, None)
    assert divergences[0]["noise"] is None


# ---------------------------------------------------------------- the answers file

CHOICE = {"index": 0, "turns": ["a"], "new_tokens": [1], "wall_time": [0.1], "accept_lengths": [1]}
GOOD = {"question_id": 1, "category": "qa", "choices": [CHOICE], "specwave": {"tokens": [[1]]}}


class Learning(BaseProposer):
    """Learns along the stream: which prompts it has met."""

    scope = "stream"

    def __init__(self):
        self.met = []

    def begin(self, contexts):
        self.met.append(list(contexts[0].tokens))


def test_what_learns_along_the_stream_learns_from_the_questions_alone(answerer, tmp_path):
    learning = Learning()
    run(answerer, [method(tmp_path, "learning", learning)], QUESTIONS[1:])
    assert learning.met == [answerer.prompt(question, []) for question in QUESTIONS[1:]]


def test_plans_are_those_of_the_questions_and_outlive_a_kill(answerer, target, tmp_path):
    """Nobody has asked for a report when the first process dies; its warm-up is in no row."""
    settings = ClaspDecoding(gamma=2)
    run(answerer, [method(tmp_path, "clasp", settings.build(target))], QUESTIONS[1:2])
    again = method(tmp_path, "clasp", settings.build(target))
    run(answerer, [again], QUESTIONS[1:])
    again.proposer.report(again.answers.folder)
    rows = [json.loads(line) for line in (tmp_path / "clasp" / "plans.jsonl").read_text().splitlines()]
    met = list(dict.fromkeys(sequence for row in rows for sequence in row["sequences"]))
    assert met == [sequence_id(question, 0) for question in QUESTIONS[1:]]


def test_going_on_drops_a_torn_line_and_keeps_the_rest(answerer, tmp_path):
    one = method(tmp_path, "plain", None)
    run(answerer, [one], QUESTIONS[:2])
    path = tmp_path / "plain" / "answers.jsonl"
    before = path.read_text()
    path.write_text(before + '{"question_id": "c", "cat')
    again = method(tmp_path, "plain", None)
    run(answerer, [again], QUESTIONS)
    assert path.read_text().startswith(before)
    assert [row["question_id"] for row in read_answers(path, "x")] == [1, 2, "c"]


def test_going_on_under_other_settings_is_refused_by_name(tmp_path, answerer):
    one = Method("plain", "plain", None, AnswerFile(tmp_path, {"max_new_tokens": 8, "sampling": {"seed": 0}}))
    run(answerer, [one], QUESTIONS[1:2])
    with pytest.raises(UserError, match=r"sampling\.seed \(0, now 1\)") as caught:
        AnswerFile(tmp_path, {"max_new_tokens": 8, "sampling": {"seed": 1}})
    assert "max_new_tokens" not in caught.value.remedy


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{}", "lacks question_id"),
        ('{"question_id": 1, "category": "qa", "choices": 3}', "choices"),
        ('{"question_id": 1, "category": "qa", "choices": []}', "no choice and no error"),
        ('{"question_id": 1, "category": "qa", "choices": [{"new_tokens": [1], "wall_time": [-1]}]}', "wall_time"),
        ('{"question_id": 1, "category": "qa", "choices": [{"new_tokens": [NaN]}]}', "new_tokens"),
        (json.dumps(GOOD | {"specwave": {}}), "specwave.tokens"),
        (json.dumps(GOOD | {"specwave": {"tokens": "x"}}), "specwave.tokens"),
        (json.dumps(GOOD | {"specwave": {"tokens": [[1]], "peak_memory_bytes": "x"}}), "peak_memory"),
        (json.dumps(GOOD | {"category": ["x"]}), "category"),
    ],
)
def test_bad_answer_lines_are_named(tmp_path, line, words):
    path = tmp_path / "answers.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=words) as caught:
        read_answers(path, "report")
    assert str(caught.value.value) == f"{path}:1"


def test_a_question_answered_twice_is_refused(tmp_path):
    line = '{"question_id": 1, "category": "qa", "choices": [], "specwave": {"error": "x"}}\n'
    (tmp_path / "answers.jsonl").write_text(line * 2)
    with pytest.raises(UserError, match="line 1 already"):
        read_answers(tmp_path / "answers.jsonl", "report")
