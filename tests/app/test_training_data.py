"""Training data at the door: options as configs, `task=regenerate`, and what is said about the benchmark."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import yaml

from specwave.app import config as configs
from specwave.app.contamination import compare
from specwave.app.door import run_door
from specwave.app.regenerate import regenerate
from specwave.app.train import TrainConfig, main
from specwave.app.trainer import TrainerConfig
from specwave.artifacts import UserError
from specwave.benchmark.questions import BUILTIN, read_questions
from specwave.data import Sample, dialogues
from specwave.data.engines import Regenerate
from specwave.data.samples import BuiltinData, JsonlData, Prepared, ShareGptUltraChat
from specwave.data.sources import file_conversations
from specwave.eagle.options import Eagle3
from specwave.target import ModelConfig


def built(*overrides):
    return configs.build("train", configs.check("train", configs.compose("train", overrides)))


@pytest.fixture
def dump(tmp_path):
    """Five conversations, one of them with a built-in question of 13 words and more in it."""
    question = next(turn for one in read_questions(BUILTIN) for turn in one.turns if len(turn.split()) > 40)
    rows = [
        {
            "id": f"t{n}",
            "messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "an answer"}],
        }
        for n in range(4)
    ]
    rows.append({"id": "seen", "prompt": f"Once more: {question}", "answer": "no"})
    path = tmp_path / "dump.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_in(folder, resume=False):
    said, noted = [], {}
    folder.mkdir(exist_ok=True)
    own = {"say": said.append, "note": noted.update, "said": said, "noted": noted}
    return SimpleNamespace(folder=folder, resume=resume, main=True, **own)


def a_config(family_folders, **changes):
    settings = {
        "model": ModelConfig("tiny", str(family_folders["llama"]), dtype="float32", device="cpu"),
        "data": BuiltinData(limit=6, validation=1),
        "drafter": Eagle3(steps=2, draft_vocab_size=64),
        "trainer": TrainerConfig(max_steps=2),
        "logger": built("model=tiny").logger,
    }
    return TrainConfig(**{**settings, **changes})


# ---------------------------------------------------------------- configs


def test_defaults_are_the_same_in_yaml_and_dataclasses():
    own = built("data=jsonl", "data.path=x.jsonl")
    assert asdict(own.data) == asdict(JsonlData(path="x.jsonl"))
    assert asdict(built("data=sharegpt_ultrachat").data) == asdict(ShareGptUltraChat())
    assert asdict(built().data) == asdict(BuiltinData())
    assert (own.task, own.regenerate) == ("train", Regenerate())


def test_one_set_of_keys_says_how_the_target_answers():
    own = built("data=jsonl", "data.path=x", "regenerate.temperature=0.7", "seed=5", "data.answers=regenerate")
    assert own.data.regenerate == own.regenerate == Regenerate(temperature=0.7, seed=5)


def test_the_path_must_be_given():
    with pytest.raises(UserError, match=r"^data\.path=\?\?\?: has no value yet"):
        built("data=jsonl")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("task=regenrate", "task=regenrate: there is no such option; did you mean regenerate?"),
        ("regenerate.engine=vlm", "regenerate.engine=vlm: there is no such option; did you mean vllm?"),
        ("regenerate.batch_size=0", "regenerate.batch_size=0: must be ≥ 1"),
        ("data.packing=perhaps", "data.packing=perhaps: true or false is expected"),
        ("data.pakcing=true", "data.pakcing=true: there is no such key; did you mean data.packing?"),
    ],
)
def test_mistakes_are_one_line(capsys, tmp_path, monkeypatch, override, words):
    monkeypatch.chdir(tmp_path)
    assert run_door("train", [override]) == 2
    assert capsys.readouterr().err.startswith(f"error: {words}")
    assert list(tmp_path.iterdir()) == []


def test_vllm_that_is_missing_is_said_before_a_folder_is_made(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specwave.data.engines.importlib.util.find_spec", lambda name: None)
    assert run_door("train", ["task=regenerate", "regenerate.engine=vllm"]) == 2
    assert capsys.readouterr().err == (
        "error: regenerate.engine=vllm: vLLM is not installed: pip install 'specwave[vllm]', or use "
        "regenerate.engine=specwave\n"
    )
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- task=regenerate


@pytest.fixture(scope="module")
def answered(family_folders, tmp_path_factory):
    """A run over a file, by the door's main."""
    folder = tmp_path_factory.mktemp("answered")
    talks = [[("user", f"q{n}"), ("assistant", "given"), ("user", "more")][: 1 + 2 * (n % 2)] for n in range(5)]
    rows = [{"id": f"t{n}", "messages": [{"role": r, "content": c} for r, c in talk]} for n, talk in enumerate(talks)]
    (folder / "dump.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = a_config(
        family_folders,
        task="regenerate",
        data=JsonlData(path=str(folder / "dump.jsonl")),
        regenerate=Regenerate(max_new_tokens=6, batch_size=2),
    )
    run = run_in(folder / "run")
    main(config, run)
    return config, run


def test_answers_are_a_file_that_training_reads(answered, family_folders, tmp_path):
    _, run = answered
    path = run.folder / "answers.jsonl"
    assert {entry.name for entry in run.folder.iterdir()} == {"answers.jsonl", "regenerate.json"}
    found = {one.id: one for one in file_conversations(path, "data.path")}
    assert sorted(found) == [f"t{n}" for n in range(5)]
    assert [role for role, _ in found["t1"].messages] == ["user", "assistant"] * 2
    assert "given" not in path.read_text()
    assert (run.noted["conversations"], run.noted["answers"]) == (5, 7)
    assert run.said[0] == "tiny answers 7 turns of 5 conversations by specwave"
    assert run.said[-1] == f"train on it: python train.py data=jsonl data.path={path}"

    trained = run_in(tmp_path / "trained")
    data = JsonlData(path=str(path), validation=1, packing=True)
    main(a_config(family_folders, data=data), trained)
    (card,) = (json.loads(file.read_text()) for file in trained.folder.glob("drafters/*/card.json"))
    assert card["data"]["conversations"] == 5
    source = card["data"]["source"]
    assert (source["packing"], source["path"]) == (True, path.name)  # a card goes where this folder does not
    assert any("made by" in line or "re-used" in line for line in trained.said)


def test_going_on_needs_the_same_conversations(answered, tmp_path):
    config, run = answered
    before = (run.folder / "answers.jsonl").read_bytes()
    regenerate(config, run_in(run.folder, resume=True))
    assert (run.folder / "answers.jsonl").read_bytes() == before
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "t0", "prompt": "another"}\n')
    changed = TrainConfig(**{**vars(config), "data": JsonlData(path=str(other))})
    with pytest.raises(
        UserError, match=r"^resume=.*answers\.jsonl: the conversations, the model or the machine are not"
    ):
        regenerate(changed, run_in(run.folder, resume=True))


def test_answers_have_their_name_when_all_are_there(answered, tmp_path, monkeypatch):
    """What is killed before must not be trained on as if it were the data set."""
    config, run = answered
    calls = []

    def killed(*arguments):
        calls.append(append(*arguments))
        if len(calls) == 2:
            raise KeyboardInterrupt

    append = dialogues.append_lines
    monkeypatch.setattr(dialogues, "append_lines", killed)
    with pytest.raises(KeyboardInterrupt):
        regenerate(config, run_in(tmp_path))
    assert {entry.name for entry in tmp_path.iterdir()} == {"answers.part.jsonl", "regenerate.json"}
    monkeypatch.undo()
    regenerate(config, run_in(tmp_path, resume=True))
    assert {entry.name for entry in tmp_path.iterdir()} == {"answers.jsonl", "regenerate.json"}
    assert (tmp_path / "answers.jsonl").read_bytes() == (run.folder / "answers.jsonl").read_bytes()


def test_builtin_prompts_can_be_answered_too(family_folders, tmp_path):
    data, settings = BuiltinData(limit=6, validation=1, max_length=2048), Regenerate(max_new_tokens=6, batch_size=6)
    config = a_config(family_folders, task="regenerate", data=data, regenerate=settings)
    run = run_in(tmp_path)
    main(config, run)
    assert run.noted["conversations"] == 6


# ---------------------------------------------------------------- the benchmark in the training data


def test_a_question_in_the_training_data_is_noted_and_said(dump, family_folders, tmp_path):
    run = run_in(tmp_path / "run")
    more = tmp_path / "question.jsonl"
    more.write_text('{"question_id": "x", "category": "qa", "turns": ["nothing of it"]}\n')
    data = JsonlData(path=str(dump), validation=1, check_benchmark=str(more))
    main(a_config(family_folders, data=data), run)
    own = run.noted["contamination"]
    assert (own["builtin"]["questions"], own["builtin"]["questions_hit"]) == (52, 1)
    assert own["builtin"]["share"] == pytest.approx(1 / (52 - own["builtin"]["questions_too_short"]))
    (match,) = own["builtin"]["longest"]
    assert match["sample"] == "seen"
    assert match["words"] >= 13
    assert own[str(more)]["questions_hit"] == 0
    (card,) = (json.loads(file.read_text()) for file in (run.folder / "drafters").glob("*/card.json"))
    assert card["data"]["contamination"] == own
    assert yaml.safe_dump(own)  # plain data
    shared = "1 of 47 questions share 13 words in a row with the training data (5 more are shorter than that)"
    assert f"benchmark builtin: {shared}; the longest:" in run.said
    (line,) = (line for line in run.said if line.startswith("  question "))
    assert f"sample seen, {match['words']} words: {match['text'][:50]}" in line


def test_a_benchmark_that_cannot_be_read_is_named(tmp_path):
    data = Prepared([Sample([1], [True], "a")], [], 0, 0, benchmark=str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match=r"^data\.check_benchmark=.*none\.jsonl: there is no such file"):
        compare(data, lambda ids, **options: "")
    with pytest.raises(UserError, match=r"^data\.check_benchmark=.*none\.jsonl: there is no such file"):
        JsonlData(path="any.jsonl", check_benchmark=str(tmp_path / "none.jsonl"))
