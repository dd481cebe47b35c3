"""The pictures: both forms, whole, the same for the same numbers, other for others."""

from specwave.skipping.figures import latency_figure, skipped_figure


def draw(folder, costs, slope=1e-6, context=400):
    written = latency_figure(folder / "latency", costs(slope=slope), "tiny")
    full = {"context": 90, "kept": [1] * 8, "skipped_attention_share": None}
    some = {"context": context, "kept": [1, 1, 0, 1, 0, 0, 1, 1], "skipped_attention_share": 2 / 3}
    return written + skipped_figure(folder / "skipped", [full, some], "tiny")


def test_pictures_are_whole_and_the_same_for_the_same_numbers(costs, tmp_path):
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    written = draw(first, costs)
    assert [path.name for path in written] == ["latency.png", "latency.svg", "skipped.png", "skipped.svg"]
    draw(again, costs)
    draw(other, costs, slope=1e-4, context=4000)
    for path in written:
        assert path.read_bytes() == (again / path.name).read_bytes()
        assert path.read_bytes() != (other / path.name).read_bytes()
    svg = (first / "latency.svg").read_text()
    assert "attention, fit within 0.0%" in svg
    assert "k = 64" in svg
    assert svg.rstrip().endswith("</svg>")


def test_plans_that_skip_nothing_have_a_picture_too(tmp_path):
    plans = [{"context": 90, "kept": [1] * 8, "skipped_attention_share": None}]
    assert all(path.stat().st_size > 1000 for path in skipped_figure(tmp_path / "skipped", plans, "tiny"))


def test_contexts_far_apart_stand_on_a_logarithmic_axis(tmp_path):
    def plans(*contexts):
        return [{"context": context, "kept": [0, 1], "skipped_attention_share": 1.0} for context in contexts]

    for name, contexts, powers in (("near", (128, 512), False), ("far", (128, 4096), True)):
        skipped_figure(tmp_path / name, plans(*contexts), "tiny")
        assert (">256<" in (tmp_path / f"{name}.svg").read_text()) == powers
