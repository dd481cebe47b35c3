"""What the benchmark scripts say of runs that can show nothing."""

import itertools
import sys
from types import SimpleNamespace

import pytest


def test_no_draws_are_refused(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["distribution.py", "--draws", "0"])
    with pytest.raises(SystemExit) as ended:
        script("distribution").main()
    assert ended.value.code == 2
    assert "--draws must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(("p", "control", "code"), [(0.5, 1e-9, 0), (0.5, 0.2, 1), (1e-9, 1e-9, 1)])
def test_a_control_that_is_not_rejected_fails_too(script, p, control, code, monkeypatch, capsys):
    """Draws that cannot tell a hotter target apart show nothing of the right one."""
    benchmark, values = script("distribution"), itertools.cycle([p, control])
    monkeypatch.setattr(sys, "argv", ["distribution.py", "--draws", "2"])
    monkeypatch.setattr(benchmark, "chi_square_p", lambda *_: next(values))
    assert benchmark.main() == code
    printed = capsys.readouterr().out
    assert ("12 cells cannot tell a target 3 % hotter" in printed) == (control > 1e-4)
    assert ("12 cells are not distributed" in printed) == (p < 1e-4)


@pytest.mark.parametrize("positions", [64, 256, 512])
def test_a_short_target_has_no_line_of_costs(script, positions, capsys):
    script("decode").print_context_cost(SimpleNamespace(max_length=positions))
    assert f"{positions} positions are too few" in capsys.readouterr().out


def test_the_parts_of_a_round_are_the_clock_s(script, tiny, capsys):
    script("decode").print_round(tiny, {}, [[5, 6, 7]], 6)
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[3:] == ["all", "draft", "forward", "accept", "accept", "%", "tokens"]
    name, whole, draft, forward, accept, share, tokens = line.split()
    assert name == "plain"
    assert min(map(float, (draft, forward, accept, share))) >= 0
    assert float(draft) + float(forward) + float(accept) <= float(whole) + 0.04  # four figures rounded to 0.01
    assert float(tokens) == 1
