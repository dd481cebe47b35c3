"""Sources of conversations: golden files, the streaming reader against json.loads, shares against their definition."""

import collections
import json
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specwave.artifacts import UserError
from specwave.data import sources
from specwave.data.conversations import Conversation, builtin_calibration_prompts
from specwave.data.sources import (
    builtin_conversations,
    check_weights,
    file_conversations,
    hub_conversations,
    mix,
    spread,
)

KEY = "calibration.path"


def asked(text, name="", category=""):
    return Conversation((("user", text),), name, category)


def rows_of(*texts):
    return [{"id": f"row-{text}", "prompt": text} for text in texts]


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_builtin():
    found = builtin_conversations()
    assert len(found) == 65
    assert [(each.id, each.category, each.messages[0][1]) for each in found] == builtin_calibration_prompts()
    assert all([role for role, _ in each.messages] == ["user"] for each in found)


# ---------------------------------------------------------------- files


MIXED = [
    {"id": "s", "source": "web", "conversations": [{"from": "human", "value": "é"}, {"from": "gpt", "value": "b"}]},
    {"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]},
    {"id": "", "prompt": "e"},
    {"question_id": 81, "category": "writing", "source": "mt", "turns": ["f", "g"]},
    {"id": None, "prompt": "h", "category": ""},
]
READ = [
    Conversation((("user", "é"), ("assistant", "b")), "s", "web"),
    Conversation((("user", "c"), ("assistant", "d")), "some-{}", ""),
    asked("e", "some-{}"),
    asked("f", "81", "writing"),
    asked("h", "some-{}"),
]


def with_numbers(numbers):
    return [
        Conversation(each.messages, each.id.format(n), each.category) for each, n in zip(READ, numbers, strict=True)
    ]


def test_lines_of_mixed_formats(write):
    content = lines(MIXED[0]) + "\n  \n" + lines(*MIXED[1:])
    assert file_conversations(write("some.jsonl", content), KEY) == with_numbers([1, 4, 5, 6, 7])  # the line's number


@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_reads_as_its_rows(write, indent):
    path = write("some.json", "\n " + json.dumps(MIXED, indent=indent, ensure_ascii=False) + "\n")
    assert file_conversations(path, KEY) == with_numbers([1, 2, 3, 4, 5])  # its place in the list


def test_what_a_file_is_its_content_says(write):
    """Hub repositories call files of JSON lines .json as often as not."""
    assert file_conversations(write("some.json", lines(*MIXED)), KEY) == with_numbers([1, 2, 3, 4, 5])
    assert file_conversations(write("some.jsonl", json.dumps(MIXED)), KEY) == with_numbers([1, 2, 3, 4, 5])


@pytest.mark.parametrize("content", [lines(*MIXED), json.dumps(MIXED)])
def test_a_byte_order_mark_is_no_content(write, content):
    assert file_conversations(write("some.json", b"\xef\xbb\xbf" + content.encode()), KEY)[0] == READ[0]


def test_repeated_ids_are_told_apart(write):
    rows = [{"id": name, "prompt": "a"} for name in ("x", "x", "x#2", 7, "7", "x")]
    found = [each.id for each in file_conversations(write("a.jsonl", lines(*rows)), KEY)]
    assert found == ["x", "x#2", "x#2#2", "7", "7#2", "x#3"]


def test_conversations_without_a_user_are_counted(write):
    path = write("a.jsonl", lines({"messages": []}, {"prompt": "a"}, {"prompt": " "}))
    with pytest.warns(UserWarning, match="2 of 3 conversations without a user"):
        assert file_conversations(path, KEY) == [asked("a", "a-2")]


BAD_ROLE = {"conversations": [{"from": "tool", "value": "a"}]}
DAMAGED = [
    ("a.jsonl", lines(*rows_of("a")) + '{"prompt": \n', "a.jsonl:2: this is not JSON"),
    ("a.jsonl", lines(*rows_of("a", "b"), BAD_ROLE), "a.jsonl:3: the role 'tool' is unknown"),
    ("a.jsonl", lines(*rows_of("a")) + "3\n", "a.jsonl:2: each conversation must be a JSON object"),
    ("a.jsonl", '{"prompt": ' + "9" * 5000 + "}", "a.jsonl:1: this is not JSON"),
    ("a.jsonl", "[" * 100_000, "a.jsonl:1: this is not JSON"),
    ("a.json", '[\n{"prompt": "a"},\n{"prompt": "b",\n"id" 3}\n]', "a.json:4: this is not JSON"),
    ("a.json", '[\n{"prompt": "a"},\n\n{"prompt": "b"},\n', "a.json:5: the list is not closed"),
    ("a.json", '[\n{"prompt": "a"},\n{"prom', "a.json:3: this is not JSON"),
    ("a.json", json.dumps([*rows_of("a"), BAD_ROLE], indent=1), "a.json:6 .conversation 2.: the role 'tool'"),
    ("a.json", '[{"prompt": "a"}, "b"]', "a.json:1 .conversation 2.: each conversation must be a JSON object"),
    ("a.jsonl", "", "a.jsonl: it is empty"),
    ("a.json", "[ ]", "a.json: it is empty"),
    ("a.jsonl", lines({"prompt": ""}), "a.jsonl: in none of its 1 conversations does a user say anything"),
    ("a.jsonl", b'{"prompt": "\xff"}', "a.jsonl: the file cannot be read"),
]


@pytest.mark.parametrize(("name", "content", "rule"), DAMAGED)
def test_damage_is_named_by_file_and_line(write, name, content, rule):
    with pytest.raises(UserError, match=rf"^calibration\.path=.*{rule}"):
        file_conversations(write(name, content), KEY)


def test_no_such_file(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        file_conversations(tmp_path / "a.jsonl", KEY)
    with pytest.raises(UserError, match="cannot be read"):
        file_conversations(tmp_path, KEY)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.dictionaries(st.text(max_size=3), st.text(max_size=9) | st.lists(st.integers(), max_size=3), max_size=3)
    ),
    indent=st.sampled_from([None, 0, 3]),
    chunk=st.integers(1, 40),
)
def test_a_list_is_read_in_chunks_as_json_loads_reads_it(tmp_path_factory, rows, indent, chunk):
    path = tmp_path_factory.getbasetemp() / "chunks.json"
    content = "\n" + json.dumps(rows, indent=indent, ensure_ascii=True)
    path.write_text(content)
    before, sources._CHUNK = sources._CHUNK, chunk
    try:
        found = list(sources._file_rows(path, KEY))
    finally:
        sources._CHUNK = before
    assert [row for _, _, row in found] == rows
    assert [number for number, _, _ in found] == list(range(1, len(rows) + 1))
    at = content.index("[") + 1  # the line of an entry is that of its bracket, wherever chunks end
    for (_, where, _), row in zip(found, rows, strict=True):
        written = json.dumps(row, indent=indent).replace("\n", "\n" + " " * (indent or 0))
        at = content.index(written, at)
        assert where.startswith(f"{path}:{1 + content.count(chr(10), 0, at)} ")
        at += len(written)


def test_shared_prompts(shared_data):
    path = shared_data / "prompts.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = file_conversations(path, KEY)
    assert [(each.id, each.category) for each in found] == [(row["id"], row["source"]) for row in rows]
    assert [dict(each.messages)["user"] for each in found] == [row["conversations"][0]["value"] for row in rows]


# ---------------------------------------------------------------- hub


@pytest.mark.parametrize(
    "source",
    ["HuggingFaceH4/ultrachat_200k", "anon8231489123/ShareGPT_Vicuna_unfiltered/ShareGPT_V3.json", "/no/such.json"],
)
def test_without_network_one_line_says_what_to_do(monkeypatch, source):
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        hub_conversations(source, "train_sft", "calibration.source")
    message = str(caught.value)
    assert message.startswith(f"calibration.source={source}: neither a file here nor a data set that can be fetched (")
    assert message.endswith(
        "download it elsewhere and give the local file: calibration.source=<path>, or use calibration=builtin"
    )
    assert "\n" not in message


@pytest.fixture
def tables(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return datasets


MESSAGES = [
    [{"content": "a", "role": "user"}, {"content": "b", "role": "assistant"}],
    [{"content": "c", "role": "user"}, {"content": "d", "role": "assistant"}, {"content": "e", "role": "user"}],
]
CHATS = [
    Conversation((("user", "a"), ("assistant", "b")), "{}-1", ""),
    Conversation((("user", "c"), ("assistant", "d"), ("user", "e")), "{}-2", ""),
]


def named(stem):
    return [Conversation(each.messages, each.id.format(stem), each.category) for each in CHATS]


def test_a_local_file_is_read_as_such(write, tables):
    path = write("a.jsonl", lines(*rows_of("x")))
    assert hub_conversations(str(path), "train", KEY) == [asked("x", "row-x")]
    table = tables.Dataset.from_dict({"prompt": ["a", "c"], "messages": MESSAGES})
    table.to_parquet(path.parent / "chats.parquet")
    assert hub_conversations(str(path.parent / "chats.parquet"), "train", KEY) == named("chats")
    path = write("b.parquet", b"no table")
    with pytest.raises(UserError, match=r"b\.parquet: not a parquet file .*fetch it again"):
        hub_conversations(str(path), "train", KEY)


def test_a_folder_of_files(write, tables):
    folder = write("set/data/train-1.jsonl", lines(*rows_of("a"))).parents[1]
    write("set/data/train-2.json", json.dumps(rows_of("b")))
    write("set/data/test.jsonl", lines(*rows_of("c")))
    write("set/.cache/train-3.jsonl", lines(*rows_of("d")))
    write("set/dataset_infos.json", "{}")
    with pytest.warns(UserWarning, match=r"2 files are read, train-1\.jsonl first"):
        assert hub_conversations(str(folder), "train", KEY) == [asked("a", "row-a"), asked("b", "row-b")]
    with pytest.warns(UserWarning, match="3 files are read"):
        assert len(hub_conversations(str(folder), "other", KEY)) == 3
    (folder / "data" / "sub").mkdir()
    with pytest.raises(UserError, match=r"holds no \.jsonl"):
        hub_conversations(str(folder / "data" / "sub"), "train", KEY)


def test_a_folder_of_tables(tmp_path, tables):
    """UltraChat's repository, downloaded: shards of a split, other splits beside them, a card."""
    folder = tmp_path / "ultrachat_200k"
    for name, rows in (("train_gen", MESSAGES[:1]), ("train_sft", MESSAGES), ("test_sft", MESSAGES[:1])):
        (folder / "data").mkdir(parents=True, exist_ok=True)
        tables.Dataset.from_dict({"messages": rows}).to_parquet(folder / "data" / f"{name}-00000-of-00001.parquet")
    (folder / "dataset_infos.json").write_text("{}")
    assert hub_conversations(str(folder), "train_sft", KEY) == named("train_sft-00000-of-00001")


def test_a_folder_that_datasets_saved(tmp_path, tables):
    table = tables.Dataset.from_dict({"messages": MESSAGES})
    tables.DatasetDict({"train_sft": table, "test": table.select([0])}).save_to_disk(tmp_path / "dict")
    assert hub_conversations(str(tmp_path / "dict"), "train_sft", KEY) == named("dict")
    with pytest.raises(UserError, match="no split 'train' in it, there are train_sft, test"):
        hub_conversations(str(tmp_path / "dict"), "train", KEY)
    table.save_to_disk(tmp_path / "one")
    assert hub_conversations(str(tmp_path / "one"), "train", KEY) == named("one")


# ---------------------------------------------------------------- choosing


def test_spread():
    assert spread("abcdef", None) == list("abcdef")
    assert spread("abcdef", 9) == list("abcdef")
    assert spread("abcdef", 3) == ["a", "c", "e"]
    assert spread("abcde", 3) == ["a", "b", "d"]  # ⌊5 i / 3⌋ = 0, 1, 3
    assert spread("abc", 0) == []


WEIGHTS = [
    ([0.5, 0.4], 2, r"\[0.5, 0.4\]: the weights must add up to 1, their sum is 0.9"),
    ([0.5, 0.50001], 2, "their sum is 1.00001"),
    ([1.0], 2, "1 weights for 2 sources"),
    ([1.5, -0.5], 2, "numbers ≥ 0, got -0.5"),
    ([float("nan"), 1], 2, "got nan"),
    ([float("inf"), 1], 2, "got inf"),
    ([True, 0], 2, "got True"),
    (["1", 0], 2, "got '1'"),
]


@pytest.mark.parametrize(("weights", "count", "rule"), WEIGHTS)
def test_wrong_weights(weights, count, rule):
    with pytest.raises(UserError, match=rf"^calibration\.weights=.*{rule}"):
        check_weights(weights, count, "calibration.weights")


def test_right_weights():
    for weights in ([1], [0.5, 0.5], [0.1] * 10, [1 / 3] * 3, [0, 1], [0.3333333, 0.6666667]):
        check_weights(weights, len(weights), "calibration.weights")


def test_mix_by_hand():
    """3.5, 2.1 and 1.4 of 7: one rest, to the largest remainder; ids of two sources collide."""
    parts = [[asked(f"{letter}{n}", f"id-{n}", letter) for n in range(8)] for letter in "xyz"]
    found = mix(parts, [0.5, 0.3, 0.2], 7, ["x", "y", "z"])
    assert [each.messages[0][1] for each in found] == ["x0", "x2", "x4", "x6", "y0", "y4", "z0"]
    assert [each.id for each in found] == ["id-0", "id-2", "id-4", "id-6", "id-0#2", "id-4#2", "id-0#3"]
    assert [each.category for each in found] == list("xxxxyyz")


def test_mix_of_equal_remainders_serves_the_earlier():
    parts = [[asked(f"{letter}{n}") for n in range(9)] for letter in "xyz"]
    found = collections.Counter(each.messages[0][1][0] for each in mix(parts, [1 / 3] * 3, 8, "xyz"))
    assert found == {"x": 3, "y": 3, "z": 2}


def test_mix_names_the_part_that_is_too_small():
    parts = [[asked("a", "a")] * 3, [asked("b", "b")] * 20]
    with pytest.raises(UserError, match=r"^calibration\.x=3 conversations: too few, its weight 0\.5 asks for 5 of 10"):
        mix(parts, [0.5, 0.5], 10, ["calibration.x", "calibration.y"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any), st.integers(1, 80))
def test_mix_keeps_count_and_shares(heaps, count):
    weights = [heap / sum(heaps) for heap in heaps]
    parts = [[asked(f"{part} {n}", f"{n}") for n in range(count)] for part in range(len(heaps))]
    found = mix(parts, weights, count, [str(part) for part in range(len(heaps))])
    assert len(found) == count
    assert len({each.id for each in found}) == len({each.messages for each in found}) == count
    got = collections.Counter(int(each.messages[0][1].split()[0]) for each in found)
    for part, weight in enumerate(weights):
        assert abs(got[part] - weight * count) < 1 + 1e-9
        assert weight or not got[part]


@pytest.fixture(autouse=True)
def _no_silent_warning():
    """What is passed over must be expected by the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield
