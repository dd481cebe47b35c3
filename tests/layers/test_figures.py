"""The pictures: both forms, whole, the same for the same numbers, and what is marked is what was said."""

import torch

from specwave.layers.figures import cka_figure, entropy_figure


def draw(folder, prompts=5):
    draw = torch.Generator().manual_seed(0)
    entropy = torch.rand(8, generator=draw)
    spread = torch.rand(prompts, 8, generator=draw)
    cka = torch.rand(8, 8, generator=draw)
    written = entropy_figure(folder / "entropy", entropy, spread, (2, 5), "tiny", 32)
    return written + cka_figure(folder / "cka", cka, cka.diagonal()[:7], [3], "tiny")


def test_four_whole_files_the_same_each_time(tmp_path):
    first, second = draw(tmp_path / "a"), draw(tmp_path / "b")
    assert [path.name for path in first] == ["entropy.png", "entropy.svg", "cka.png", "cka.svg"]
    assert sorted((tmp_path / "a").iterdir()) == sorted(first)  # nothing half-written is left
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert "3|4" in (tmp_path / "a" / "cka.svg").read_text()
    assert "of 5 prompts" in (tmp_path / "a" / "entropy.svg").read_text()


def test_without_a_spread_there_is_one_panel(tmp_path):
    draw(tmp_path, prompts=0)
    assert "prompts" not in (tmp_path / "entropy.svg").read_text()
