"""Where questions come from: Spec-Bench by file or address with its sha256, long prompts of given lengths."""

import hashlib
import http.server
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field

import pytest

from specwave.app import config as configs
from specwave.artifacts import UserError, cache_dir
from specwave.benchmark import LongContext, SpecBench
from specwave.benchmark.documents import FILLER, ask, document, logbook
from specwave.benchmark.long_context import category, counter, logbook_prompt, longest, report_prompt
from specwave.benchmark.questions import OFFICIAL_SHA256

LINES = [{"question_id": n, "category": "qa" if n % 2 else "rag", "turns": [f"What is {n}?"]} for n in range(6)]


def sha(content):
    return hashlib.sha256(content).hexdigest()


# ---------------------------------------------------------------- Spec-Bench


@dataclass
class Server:
    """Serves `content` and counts the requests."""

    content: bytes
    asked: list[str] = field(default_factory=list)
    cut: bool = False  # announces more than it sends


@pytest.fixture
def served(monkeypatch):
    """(a Server, its address)."""
    state = Server("".join(json.dumps(line) + "\n" for line in LINES).encode())

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            state.asked.append(self.path)
            if self.path != "/question.jsonl":
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(state.content) + 100 * state.cut))
            self.end_headers()
            self.wfile.write(state.content)

        def log_message(self, *_):
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield state, f"http://127.0.0.1:{server.server_address[1]}/question.jsonl"
        server.shutdown()


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path / "cache"))


def test_an_address_is_fetched_once_and_kept_whole(served, empty_cache):
    state, url = served
    bench = SpecBench(url=url, sha256=sha(state.content).upper())
    assert [question.id for question in bench.questions()] == [0, 1, 2, 3, 4, 5]
    assert [question.id for question in bench.questions(2, ["qa"])] == [1, 3]
    assert state.asked == ["/question.jsonl"]
    files = [path for path in cache_dir().rglob("*") if path.is_file() and path.name != ".lock"]
    assert [path.read_bytes() for path in files] == [state.content]


def test_a_damaged_copy_is_fetched_again(served, empty_cache):
    state, url = served
    bench = SpecBench(url=url, sha256=sha(state.content))
    bench.questions()
    (copy,) = cache_dir().rglob("question.jsonl")
    copy.write_bytes(state.content[:50])
    assert len(bench.questions()) == 6
    assert len(state.asked) == 2
    assert copy.read_bytes() == state.content


def test_another_file_than_named_is_refused_and_not_kept(served, empty_cache):
    state, url = served
    with pytest.raises(UserError, match=sha(state.content)) as caught:
        SpecBench(url=url, sha256="0" * 64).questions()
    assert caught.value.key == "benchmark.sha256"
    assert not list(cache_dir().rglob("*.jsonl*"))
    assert not list(cache_dir().rglob("*.part"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda url: url.replace("question", "nothing"), "404|Not Found"),
        (lambda url: "http://127.0.0.1:9/question.jsonl", "cannot be fetched"),
        (lambda url: "http://", "cannot be fetched"),
        (lambda url: "http://127.0.0.1:nought/question.jsonl", "cannot be fetched"),
        (lambda url: "file:///etc/passwd", "http:// or https://"),
        (lambda url: "question.jsonl", "http:// or https://"),
    ],
)
def test_addresses_that_give_nothing_are_named(served, empty_cache, change, words):
    url = change(served[1])
    with pytest.raises(UserError, match=words) as caught:
        SpecBench(url=url, sha256="0" * 64).questions()
    assert (caught.value.key, caught.value.value) == ("benchmark.url", url)


def test_an_answer_that_breaks_off_is_no_file(served, empty_cache):
    state, url = served
    state.cut = True
    with pytest.raises(UserError, match="cannot be fetched"):
        SpecBench(url=url, sha256=sha(state.content)).questions()


def test_what_is_fetched_must_be_text(served, empty_cache):
    state, url = served
    state.content = b"\xff\xfe\x00"
    with pytest.raises(UserError, match="UTF-8"):
        SpecBench(url=url, sha256=sha(state.content)).questions()


def test_a_file_of_ones_own_is_checked_too(tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    with pytest.raises(UserError, match=rf"sha256={OFFICIAL_SHA256}.*{sha(path.read_bytes())}"):
        SpecBench(path=str(path)).questions()
    assert len(SpecBench(path=str(path), sha256=sha(path.read_bytes())).questions()) == 6
    assert len(SpecBench(path=str(path), sha256=None).questions(3)) == 3


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"url": None}, "benchmark.path"),
        ({"sha256": None}, "benchmark.sha256"),
        ({"sha256": "4b6d"}, "benchmark.sha256"),
        ({"sha256": "g" * 64}, "benchmark.sha256"),
    ],
)
def test_keys_that_do_not_go_together(keys, key):
    with pytest.raises(UserError) as caught:
        SpecBench(**keys)
    assert caught.value.key == key


def test_the_official_file(shared_data):
    questions = SpecBench(path=str(shared_data / "spec_bench" / "question.jsonl")).questions(130)
    assert set(Counter(question.category for question in questions).values()) == {10}


# ---------------------------------------------------------------- logbooks


def test_a_longer_logbook_begins_with_a_shorter_one():
    assert logbook(3, 40)[:15] == logbook(3, 15)
    assert logbook(3, 15) != logbook(4, 15)
    assert document(logbook(3, 2)).count("\n\n") == 2  # the title, and a paragraph a day


FACTS = re.compile(
    r"(?P<day>\d+ \w+ \d{4})\. The (?P<boat>[\w ]+), under Captain (?P<captain>[\w ]+), sailed from (?P<start>[\w ]+) "
    r"to (?P<end>[\w ]+) with (?P<passengers>\d+) passengers and (?P<crates>\d+) crates of (?P<cargo>[\w ]+)\."
)


@pytest.mark.parametrize("seed", range(12))
def test_answers_can_be_counted_from_the_text_alone(seed):
    entries = logbook(seed, 30 + seed)
    found = [match.groupdict() for match in FACTS.finditer(document(entries, 3))]
    assert len(found) == len(entries)
    asked = ask(entries, seed)
    numbers = [int(number) for number in re.findall(r"\d+", asked.answer.split(" on ")[0])]
    if "ended at" in asked.question:
        own = [row for row in found if row["end"] in asked.question]
        assert numbers == [len(own), sum(int(row["crates"]) for row in own)]
    elif "more crates" in asked.question:
        sums = {
            boat: sum(int(row["crates"]) for row in found if row["boat"] == boat)
            for boat in {row["boat"] for row in found}
            if f"the {boat}" in asked.question
        }
        assert len(sums) == 2
        most, least = max(sums.values()), min(sums.values())
        assert set(numbers) == ({most - least, most, least} if most != least else {most})
        assert most == least or f"The {max(sums, key=sums.get)}," in asked.answer
    else:
        own = [row for row in found if f"the {row['boat']} carry" in asked.question]
        counts = [int(row["passengers"]) for row in own]
        assert numbers == [sum(counts), max(counts)]
        assert own[counts.index(max(counts))]["day"] in asked.answer


def test_the_clerk_s_sentences_state_no_facts():
    assert not FACTS.findall(" ".join(FILLER))


# ---------------------------------------------------------------- lengths


def test_short_prompts_hold_terse_entries():
    """The same facts without what counts for nothing: at 128 words some entries fit, and the prompt is filled up."""
    terse, whole = logbook(3, 6, terse=True), logbook(3, 6)
    for short, entry in zip(terse, whole, strict=True):
        assert entry.text.startswith(f"{short.text} ")
        assert (short.boat, short.passengers, short.day) == (entry.boat, entry.passengers, entry.day)

    def words(text):
        return len(text.split())

    for length, is_terse in ((128, True), (255, True), (256, False)):
        text, _ = logbook_prompt("summarization", length, 3, words)
        assert length - 12 <= words(text) <= length  # a sentence of the clerk's would be too long
        assert logbook(3, 1, is_terse)[0].text in text.split("\n\n")
    with pytest.raises(UserError, match=r"benchmark\.lengths=127: must be whole numbers of 128"):
        LongContext(lengths=[127])


def test_longest_finds_the_place_wherever_it_begins():
    for limit in range(0, 60, 7):
        for start in (1, 5, 50):
            assert longest(lambda n: 7 + 5 * n, limit, 5, start) == max(0, (limit - 7) // 5)


@pytest.mark.parametrize("task", ["summarization", "reasoning"])
@pytest.mark.parametrize("length", [768, 1024, 2048])
def test_prompts_have_their_length_in_the_target_s_tokens(tiny, task, length):
    count = counter(tiny)
    text, answer = logbook_prompt(task, length, 5, count)
    assert length - max(count(sentence) for sentence in FILLER) < count(text) <= length
    assert (answer is None) == (task == "summarization")
    kept = logbook(5, len(FACTS.findall(text)))
    assert answer in (None, ask(kept, 5).answer)
    assert all(entry.text in text for entry in kept)


def test_questions_by_task_length_and_number(tiny):
    bench = LongContext(lengths=[1024, 768], each=2)
    questions = bench.questions(target=tiny, room=64)
    assert [question.id for question in questions] == [
        f"{task}-{length}-{number}"
        for task in ("summarization", "reasoning")
        for length in (1024, 768)
        for number in (0, 1)
    ]
    assert {question.category for question in questions} == {
        "summarization_1k",
        "summarization_768",
        "reasoning_1k",
        "reasoning_768",
    }
    assert len({question.turns for question in questions}) == 8
    assert bench.questions(target=tiny, room=64) == questions
    assert LongContext(lengths=[768], each=2, seed=1).questions(target=tiny)[0].turns != questions[2].turns
    only = bench.questions(3, ["reasoning_768", "summarization_1k"], tiny, 64)
    assert [question.id for question in only] == ["summarization-1024-0", "summarization-1024-1", "reasoning-768-0"]
    with pytest.raises(UserError, match=r"categories=qa.*summarization_1k"):
        bench.questions(None, ["qa"], tiny, 64)


def test_a_length_beyond_the_target_is_refused(tiny):
    with pytest.raises(UserError, match=r"benchmark.lengths=2048.*2048 positions"):
        LongContext(lengths=[2048]).questions(target=tiny, room=1)
    assert len(LongContext(lengths=[2048], each=1).questions(target=tiny)) == 2


def test_category_names():
    assert [category("reasoning", length) for length in (512, 1024, 32768)] == [
        "reasoning_512",
        "reasoning_1k",
        "reasoning_32k",
    ]


# ---------------------------------------------------------------- reports of a file


def report(sentences, word="growth"):
    return " ".join(f"Sentence {number} is about {word}." for number in range(sentences))


def written(path, *reports):
    path.write_text("".join(json.dumps({"report": text, "summary": "…"}) + "\n" for text in reports))
    return str(path)


def test_reports_are_cut_at_a_sentence(tiny, tmp_path):
    count = counter(tiny)
    path = written(tmp_path / "gov.jsonl", report(3), report(200, "rain"), report(200, "debt"), report(200, "wool"))
    questions = LongContext(lengths=[600], tasks=["summarization"], each=2, path=path).questions(target=tiny)
    assert ["rain" in questions[0].turns[0], "debt" in questions[1].turns[0]] == [True, True]
    for question in questions:
        assert 540 <= count(question.turns[0]) <= 600
        body = question.turns[0].split("\n\n")[1]
        assert body.endswith(".")
        assert report(200, "rain" if "rain" in body else "debt").startswith(body)
    whole = report(9)
    assert whole in report_prompt(whole, count(report_prompt(whole, 10**6, count)), count)


def test_reasoning_goes_on_beside_a_file(tiny, tmp_path):
    path = written(tmp_path / "gov.jsonl", report(200))
    found = LongContext(lengths=[768], each=1, path=path).questions(target=tiny)
    assert ["Sentence 0" in found[0].turns[0], "Logbook" in found[1].turns[0]] == [True, True]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"summary": "x"}', "report is a text"),
        ('{"report": 7}', "report is a text"),
        ('{"report": " "}', "report is a text"),
        ('{"report": "\\ud800"}', "surrogate"),
        ("[]", "object"),
        ("{", "not JSON"),
    ],
)
def test_bad_reports_are_named_by_line(tiny, tmp_path, line, words):
    path = tmp_path / "gov.jsonl"
    path.write_text(json.dumps({"report": report(9)}) + "\n" + line + "\n")
    with pytest.raises(UserError, match=words) as caught:
        LongContext(lengths=[512], path=str(path)).questions(target=tiny)
    assert str(caught.value.value) == f"{path}:2"


def test_too_few_long_reports_are_counted(tiny, tmp_path):
    path = written(tmp_path / "gov.jsonl", report(200), report(3))
    with pytest.raises(UserError, match=r"1 of its 2 reports fill a prompt of 600"):
        LongContext(lengths=[600], each=2, path=path).questions(target=tiny)
    with pytest.raises(UserError, match="sha256"):
        LongContext(lengths=[600], each=1, path=path, sha256="0" * 64).questions(target=tiny)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("benchmark.lengths=[]", "benchmark.lengths"),
        ("benchmark.lengths=[512,512]", "benchmark.lengths"),
        ("benchmark.lengths=[12]", "benchmark.lengths"),
        ("benchmark.tasks=[cooking]", "benchmark.tasks"),
        ("benchmark.tasks=[]", "benchmark.tasks"),
        ("benchmark.each=0", "benchmark.each"),
        ("benchmark.seed=-1", "benchmark.seed"),
        ("benchmark.sha256=abc", "benchmark.sha256"),
    ],
)
def test_keys_of_long_context(override, key):
    composed = configs.compose("evaluate", ["benchmark=long_context", override])
    with pytest.raises(UserError) as caught:
        configs.build("evaluate", configs.check("evaluate", composed))
    assert caught.value.key == key
