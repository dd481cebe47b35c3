"""Lemma 4.1: nobody above the bound has another argmax, on made-up numbers and on a target's own states."""

import math

import pytest
import torch
import torch.nn.functional as F

from specwave.skipping.lemma import least_cosine, on_sphere, violations


def test_two_tokens_in_the_plane():
    """Rows (1, 0) and (0, 1): the argmax turns at 45°. At u = 0° the lead is √2, so the bound is 1 − 2/(2·2·2) = 3/4,
    and the lemma is not sharp: the truth is cos 45° = 0.71."""
    head, gain = torch.eye(2), torch.ones(2)
    for degrees in (0, 10, 30, 44, 45):
        angle = math.radians(degrees)
        state = 3.7 * torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
        bound = float(least_cosine(state, head, gain))
        assert bound == pytest.approx(1 - (math.cos(angle) - math.sin(angle)) ** 2 / 4, abs=1e-12)
        assert bound >= math.cos(math.radians(45) - angle) - 1e-12


def test_the_gain_belongs_to_the_head():
    state, head, gain = torch.randn(9, 6), torch.randn(20, 6), torch.rand(6) + 0.5
    expected = least_cosine(state, head * gain, torch.ones(6))
    torch.testing.assert_close(least_cosine(state, head, gain), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(least_cosine(2.5 * state, head, gain), least_cosine(state, head, gain))


def test_a_tie_is_above_every_cosine():
    assert float(least_cosine(torch.tensor([1.0, 1.0]), torch.eye(2), torch.ones(2))) == pytest.approx(1.0)


def around(state, cosine, draw):
    """A state with exactly this cosine to each of `state` [n, D]."""
    unit = F.normalize(state.double(), dim=-1)
    other = torch.randn(unit.shape, generator=draw, dtype=torch.float64)
    other = F.normalize(other - (other * unit).sum(-1, keepdim=True) * unit, dim=-1)
    return cosine[:, None] * unit + (1 - cosine**2).sqrt()[:, None] * other


def test_above_the_bound_the_argmax_stays_and_below_it_need_not():
    draw = torch.Generator().manual_seed(0)
    head, gain = torch.randn(40, 8, generator=draw), torch.rand(8, generator=draw) + 0.5
    states = torch.randn(4000, 8, generator=draw)
    bound = least_cosine(states, head, gain)
    inside = around(states, (bound + 1e-9).clamp(-1, 1), draw)
    assert not violations(states, inside, head, gain).any()
    assert (F.cosine_similarity(states.double(), inside, dim=-1) > bound).float().mean() > 0.9
    weights = (head * gain).double()
    beyond = around(states, (1 - 8 * (1 - bound)).clamp(-1, 1), draw)
    changed = (on_sphere(states) @ weights.T).argmax(-1) != (beyond @ weights.T).argmax(-1)
    assert changed.float().mean() > 0.1  # so the test above could have failed


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_no_token_of_a_target_violates_it(family, mild):
    target, draw = mild[family], torch.Generator().manual_seed(1)
    ids = torch.randint(3, 512, (8, 40), generator=draw)
    whole = target.session(8, 40).forward(ids).hidden
    covered = 0
    for _ in range(12):
        kept = (torch.rand(16, generator=draw) < 0.85).tolist()
        draft = target.session(8, 40).forward(ids, plan=kept).hidden
        assert not violations(whole, draft, target.head, target.final_norm).any()
        cosine = F.cosine_similarity(whole.double(), draft.double(), dim=-1)
        covered += int((cosine > least_cosine(whole, target.head, target.final_norm)).sum())
    assert covered > 0  # some tokens are near enough for the lemma to speak of them


def test_one_token_is_no_vocabulary():
    with pytest.raises(ValueError, match="two tokens"):
        least_cosine(torch.ones(2), torch.ones(1, 2), torch.ones(2))
