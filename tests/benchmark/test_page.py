"""report.html as a browser and a screen reader meet it, its plots, and the numbers of a report that must not move."""

import csv
import io
import itertools
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_up import METHODS, questions, run_folder

from specwave.benchmark import svg, writers
from specwave.benchmark.diagrams import Point, positions, scatter, stacks
from specwave.benchmark.figures import MANY, curves, dots, thinned
from specwave.benchmark.report import headline, render, subject, unique_labels
from specwave.benchmark.results import load_results, load_run
from specwave.benchmark.tables import summary

STYLE = Path(writers.__file__).parent / "report.css"
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """The elements in order, each with its attributes, its text and those it lies in."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "at": dict(attrs), "text": "", "in": [other["tag"] for other in self.open]}
        assert len(element["at"]) == len(attrs), "an attribute twice"
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.elements.append({"tag": tag, "at": dict(attrs), "text": "", "in": [other["tag"] for other in self.open]})

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, *tags):
        return [element for element in self.elements if element["tag"] in tags]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return load_run(run_folder(tmp_path_factory.mktemp("made") / "run"))


@pytest.fixture(scope="module")
def text(run):
    return render(run)


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


# ---------------------------------------------------------------- structure


def test_the_document_says_its_language_and_fits_small_screens(page):
    (html,) = page.all("html")
    assert html["at"]["lang"] == "en"
    assert page.all("title")[0]["text"].strip()
    viewport = [meta["at"]["content"] for meta in page.all("meta") if meta["at"].get("name") == "viewport"]
    assert viewport == ["width=device-width, initial-scale=1"]  # no maximum-scale: the reader may zoom
    assert [len(page.all(tag)) for tag in ("main", "header", "footer", "nav")] == [1, 1, 1, 1]


def test_headings_form_an_outline(page):
    levels = [int(heading["tag"][1]) for heading in page.all("h1", "h2", "h3", "h4", "h5", "h6")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    texts = [heading["text"] for heading in page.all("h2")]
    assert all(map(str.strip, texts))
    assert len(set(texts)) == len(texts)
    assert len(page.all("section")) == len(texts)


def test_the_contents_lead_to_every_section_and_nowhere_else(page):
    links = [link["at"]["href"] for link in page.all("a")]
    assert links == [f"#{section['at']['id']}" for section in page.all("section")]
    assert [link["text"] for link in page.all("a")] == [heading["text"] for heading in page.all("h2")]
    ids = [element["at"]["id"] for element in page.elements if "id" in element["at"]]
    assert len(set(ids)) == len(ids)


def test_every_figure_is_said_in_words(page):
    shown = [picture for picture in page.all("svg") if picture["at"].get("aria-hidden") != "true"]
    assert len(shown) == len(page.all("figure")) == 6
    for picture in shown:
        assert picture["at"]["role"] == "img"
        assert len(picture["at"]["aria-label"]) > 60
        for label in METHODS:
            assert label in picture["at"]["aria-label"]
    for hidden in (picture for picture in page.all("svg") if picture not in shown):
        assert "li" in hidden["in"]  # a swatch beside its label
    assert all(entry["text"].strip() for entry in page.all("li"))


def test_tables_have_captions_and_their_headers_a_scope(page):
    tables = page.all("table")
    assert len([caption for caption in page.all("caption") if caption["text"].strip()]) == len(tables)
    assert all(header["at"]["scope"] == ("col" if "thead" in header["in"] else "row") for header in page.all("th"))
    rows = page.all("tr")
    assert len([header for header in page.all("th") if header["at"]["scope"] == "row"]) == len(rows) - len(tables)


def test_what_scrolls_can_be_reached_by_keyboard_and_has_a_name(page):
    boxes = [box for box in page.all("div") if box["at"].get("class") in ("scroll", "plot")]
    assert len(boxes) == len(page.all("table")) + len(page.all("figure"))
    assert all(box["at"]["tabindex"] == "0" and box["at"]["aria-label"] and box["at"]["role"] for box in boxes)
    assert not [element for element in page.elements if int(element["at"].get("tabindex", 0)) > 0]


def test_a_page_asks_the_network_for_nothing_and_runs_nothing(text, page):
    assert not re.search(r"https?:|@import|url\((?!#)|javascript:", text)
    assert not page.all("script", "iframe", "object", "embed")
    assert not [name for element in page.elements for name in element["at"] if name.startswith("on")]


def test_texts_of_files_stay_texts(tmp_path):
    nasty = '<b>"L7"</b> & <script>alert(1)</script>'
    asked = [question.__class__(1, "</td><i>odd|one", ("?",)) for question in questions(1)[:1]]
    results = load_run(run_folder(tmp_path / "run", asked, {"a": ([7], nasty, 0.5, 0), "b": ([7], None, 0.5, 1)}))
    page = Page(render(results))
    assert not page.all("b", "i", "script", "memory")
    assert any(nasty in cell["text"] for cell in page.all("th", "td"))
    assert "RuntimeError: out of <memory>" in page.all("dd")[0]["text"]


# ---------------------------------------------------------------- colours


def colours():
    """{light, dark} → the variables of `:root` there."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE.read_text(encoding="utf-8"), re.DOTALL)
    found = {name: dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for name, part in (("light", light), ("dark", dark))}
    assert found["light"].keys() == found["dark"].keys()
    return found


def luminance(colour):
    """WCAG 2's relative luminance."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_as_wcag_has_it():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_marks_stand_out(scheme):
    found = colours()[scheme]
    for ground in ("paper", "card"):
        for name in ("ink", "soft", "accent"):  # text: 4.5
            assert contrast(found[name], found[ground]) >= 4.5, (name, ground)
    for place in range(svg.SERIES):  # graphics: 3; they lie on cards
        assert contrast(found[f"series-{place}"], found["card"]) >= 3, place
    assert len({found[f"series-{place}"] for place in range(svg.SERIES)}) == svg.SERIES


def test_where_the_keyboard_is_can_be_seen():
    style = STYLE.read_text(encoding="utf-8")
    assert re.search(r"^:focus-visible \{ outline: 2px solid var\(--accent\);", style, re.MULTILINE)
    assert not re.search(r"outline: *(none|0)", style)


def test_on_narrow_screens_the_column_that_stays_in_place_leaves_room_for_the_others():
    """400 pixels wide, a long label once covered the whole table."""
    style = STYLE.read_text(encoding="utf-8")
    assert "position: sticky" in re.search(r"\ntbody th \{(.*?)\}", style)[1]
    narrow = re.search(r"@media \(max-width: 40rem\) \{(.*?)\n\}", style, re.DOTALL)[1]
    own = re.search(r"tbody th \{(.*?)\}", narrow)[1]
    assert "white-space: normal" in own
    assert int(re.search(r"max-width: (\d+)vw", own)[1]) <= 50


def test_every_colour_used_is_one_of_the_page_s(text):
    used = set(re.findall(r"var\(--([\w-]+)\)", text))
    assert used <= set(colours()["light"])
    body = text.split("</style>")[1]
    assert not re.search(r'(fill|stroke|color)="(?!var|none)', body)


# ---------------------------------------------------------------- plots


def places(plot):
    """(x, y, title) of the marks."""
    found = re.findall(r'translate\(([-\d.]+) ([-\d.]+)\)" fill="[^"]+"><title>([^<]*)', plot.svg)
    return [(float(x), float(y), said) for x, y, said in found]


def test_dots_stand_where_their_values_are():
    plot = dots("T", "τ", ["qa", "overall"], {"a": [1.0, 2.0], "b": [3.0, None]}, "nothing")
    marks = places(plot)
    assert [said for _, _, said in marks] == ["a, qa: 1.00", "a, overall: 2.00", "b, qa: 3.00"]
    (one, first, _), (two, second, _), (three, third, _) = marks
    assert two - one == pytest.approx(three - two, abs=0.02)  # in the middle between 1 and 3
    assert first < third < second  # b a little below a in the first row; the second row below both
    assert [key.label for key in plot.legend] == ["a", "b"]


def test_equal_and_missing_values_still_make_an_axis():
    for values in ({"a": [None]}, {"a": [2.0]}, {"a": [1e-320]}, {"a": [1.0, 1.0 + 2e-16]}, {"a": [1e200, -1e200]}):
        rows = [str(place) for place in range(len(values["a"]))]
        for one in ("", "one"):
            picture = dots("T", "u", rows, values, one).svg
            assert "nan" not in picture
            assert "inf" not in picture


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.02, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0.94, 4.06, ["1", "2", "3", "4"]),
        (-0.3, 0.3, ["-0.3", "-0.2", "-0.1", "0.0", "0.1", "0.2", "0.3"]),
        (0.0, 67.4, ["0", "20", "40", "60"]),
        (1e9, 3e9, ["1e+09", "1.5e+09", "2e+09", "2.5e+09", "3e+09"]),
    ],
)
def test_ticks_are_round(low, high, ticks):
    axis = svg.fixed_axis(low, high, 0.0, 100.0)
    assert [axis.label(tick) for tick in axis.ticks] == ticks
    assert [axis(low), axis(high)] == pytest.approx([0.0, 100.0])


def test_bars_are_as_long_as_their_parts():
    plot = stacks("T", "ms", {"plain": {"draft": 0.0, "verify": 40.0}, "a": {"draft": 10.0, "verify": 20.0}})
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', plot.svg)]
    assert len(widths) == 3  # nothing of no length
    assert widths[0] == pytest.approx(4 * widths[1], rel=1e-3)
    assert widths[0] == pytest.approx(2 * widths[2], rel=1e-3)
    assert all(key.square for key in plot.legend)


def test_whiskers_are_the_intervals():
    plot = scatter("T", {"a": Point(2.0, 1.5, [1.5, 3.0], None), "b": Point(2.0, 1.5)})
    (whisker,) = re.findall(r'd="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)" class="whisker"', plot.svg)
    left, y, right, other = map(float, whisker)
    assert y == other
    (x, at, _), _ = places(plot)
    assert at == y
    assert (x - left) / (right - left) == pytest.approx(1 / 3, abs=0.01)


def test_one_position_and_one_step_are_drawn():
    assert len(places(positions("T", {"a": [0.5]}))) == 1
    plot = curves("T", [("loss", {"a": ([10.0], [2.0])})])
    assert len(places(plot)) == 1
    assert "nan" not in plot.svg


def test_long_curves_are_thinned_from_their_end():
    assert thinned(list(range(MANY))) == list(range(MANY))
    short = thinned(list(range(1000)))
    assert short[-1] == 999
    assert len(short) <= MANY
    assert len({after - before for before, after in itertools.pairwise(short)}) == 1


def test_64_series_are_told_apart_by_colour_and_shape():
    assert len({(svg.colour(place), svg.shape(place)) for place in range(64)}) == 64


# ---------------------------------------------------------------- numbers and words


def test_the_numbers_of_a_report_are_those_of_before(tmp_path):
    """table.golden.csv was written from the same made-up answers before reports were made fast."""
    run_folder(tmp_path / "a")
    run_folder(tmp_path / "b", questions(1), levels=3, repeat=2)
    found = list(csv.reader(io.StringIO(writers.as_csv([*load_run(tmp_path / "a"), *load_run(tmp_path / "b")]))))
    golden = list(csv.reader((Path(__file__).parent / "table.golden.csv").open(encoding="utf-8", newline="")))
    assert len(found) == len(golden) == 9
    for line, expected in zip(found, golden, strict=True):
        for cell, wanted in zip(line, expected, strict=True):
            try:
                assert float(cell) == pytest.approx(float(wanted), rel=1e-12)  # sums in another order
            except ValueError:
                assert cell == wanted


def changed(result, **figures):
    content = {**result.content, "overall": {**result.content["overall"], **figures}}
    return result.__class__(result.folder, content)


def test_what_is_not_known_is_not_said_to_be_slow(run):
    """Without plain decoding nothing is said of beating it; without rounds nothing of τ."""
    unknown = [changed(result, speedup=None) for result in run[1:3]]
    labels = ["a", "b"]
    said = headline(unknown, labels)
    assert said.startswith("Most tokens per second, a: ")
    assert said.endswith("Plain decoding was not measured.")
    assert "None" not in headline([changed(result, tau=None) for result in run[1:3]], labels)
    one = [changed(run[1], speedup=None), changed(run[2], speedup=0.9, intervals=None)]
    assert headline(one, labels).startswith("Nothing here beats plain decoding; next to it comes b: ")
    assert headline([changed(run[1], tokens_per_second=None)], ["a"]) == "No question was answered."


def test_the_title_does_not_make_up_a_target(run):
    assert subject(run) == "smollm2_135m on 26 questions"
    foreign = [result.__class__(result.folder, {**result.content, "settings": {}}) for result in run]
    assert subject(foreign) == "Answers to 26 questions"
    assert subject([changed(run[0], questions=1)]) == "smollm2_135m on 1 question"


def test_a_method_has_one_label_on_the_whole_page(tmp_path):
    """Equal drafters of two runs: plots and tables number them alike, and nothing is said of settings they lack."""
    two = [*load_run(run_folder(tmp_path / "a", questions(1))), *load_run(run_folder(tmp_path / "b", questions(1)))]
    labels = unique_labels(two)
    assert len(set(labels)) == 8
    assert not any("None" in label for label in labels)
    page = Page(render(two))
    shown = {entry["text"] for entry in page.all("li") if "figure" in entry["in"]}
    assert shown - {"prefill", "draft", "verify", "accept", "other"} == set(labels[1:4] + labels[5:])
    rows = [header["text"] for header in page.all("th") if header["at"]["scope"] == "row"]
    assert set(labels) <= set(rows)
    assert "L2-15-27_2" in render([load_results(tmp_path / "a" / "L29", "report"), _named(two[1], "L2-15-27_2")])


def test_methods_with_one_drafter_are_told_apart_by_their_names(tmp_path):
    plain, *drafters = load_run(run_folder(tmp_path / "a", questions(1)))
    one = drafters[0]
    methods = [one.__class__(one.folder, {**one.content, "method": name}) for name in ("eagle3", "switchsd", "mine")]
    assert unique_labels([plain, *methods, drafters[1]]) == [
        "plain",
        "EAGLE-3 drafter L2-15-27 (eagle3)",
        "SwitchSD L2-15-27 (eagle3)",
        "mine L2-15-27 (eagle3)",
        "L29 (eagle2)",
    ]


def _named(result, label):
    return result.__class__(result.folder, {**result.content, "label": label})


def test_a_hundred_per_cent_is_said_of_all_only(run):
    from specwave.benchmark.tables import summary

    table = summary([changed(run[1], exact_match_rate=share) for share in (1.0, 0.9999, 0.5)])
    column = table.header.index("exact")
    assert [row[column] for row in table.rows] == ["100.0 %", "99.9 %", "50.0 %"]


@pytest.mark.parametrize("lose", [1, 2])
def test_a_single_question_and_none_make_a_page(tmp_path, lose):
    """One answered question has no interval; where all failed there are no figures, and no traceback."""
    asked = questions(1)[:1] if lose == 1 else questions(1)[8:10]
    methods = {"a": ([7], None, 0.5, lose), "b": ([3], None, 0.5, lose - 1)}
    results = load_run(run_folder(tmp_path / "run", asked, methods))
    said = render(results)
    assert "nan" not in Page(said).all("main")[0]["text"].lower()
    for result in results:
        count = result.content["overall"]["questions"]
        assert (result.content["overall"]["intervals"]["tau"] is None) == (count < 2)


def test_bars_and_new_lines_in_names_do_not_end_a_cell(run):
    from specwave.benchmark.paper import by_category

    named = run[1].__class__(run[1].folder, {**run[1].content, "categories": {"a|b\nc": run[1].content["overall"]}})
    lines = writers.markdown([by_category([named], "tau", "τ", 2)]).splitlines()
    assert r"a\|b c" in lines[2]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines[2:]}) == 1


# ---------------------------------------------------------------- without torch

DOOR = """
import sys
from specwave.app.door import run_door
code = run_door("evaluate", sys.argv[1:])
print(code, sorted({"torch", "transformers", "pytorch_lightning", "matplotlib", "wandb"} & set(sys.modules)))
"""


def test_a_report_imports_nothing_heavy(tmp_path):
    run = run_folder(tmp_path / "run", questions(1))
    command = [sys.executable, "-c", DOOR, f"report=[{run}]", f"hydra.run.dir={tmp_path / 'out'}", "sampling.top_p=0.5"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, cwd=tmp_path)
    assert said.stdout.splitlines()[-1] == "0 []", said.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "run.yaml", "table.md", "table.tex", "table.csv", "report.html",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "said"), [({}, True), ({"dtype": "float32"}, False), ({"batch_invariant": True}, False)]
)
def test_why_answers_below_float32_part_is_said(tmp_path, more, said):
    table = summary(load_run(run_folder(tmp_path / "run", more=more)))
    assert ("logits were at most 0.12 below the largest: rounding below float32" in table.note) == said
