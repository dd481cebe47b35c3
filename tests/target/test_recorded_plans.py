"""Recorded forwards of kept sets: what eager ones give, few of them kept, none of them lent to later sessions."""

import gc

import torch

from specwave.target.session import PLANS


def opened(target, rows=1):
    session = target.session(rows, 60)
    draw = torch.Generator().manual_seed(0)
    session.forward(torch.randint(512, (rows, 9), generator=draw), logits=False)
    session.advance([9] * rows)
    return session


def drafted(session, kept, count=5):
    """Logits of a chain drafted with a kept set, rolled back."""
    mark, found = session.mark(), []
    for token in range(20, 20 + count):
        found.append(session.forward(torch.full((session.batch, 1), token), plan=kept).logits)
        session.advance([1] * session.batch)
    session.rollback(mark)
    return torch.stack(found)


def test_recorded_drafts_are_eager_drafts_and_leave_no_trace(recording, tiny):
    draw = torch.Generator().manual_seed(1)
    ours, theirs = opened(recording, 2), opened(tiny, 2)
    token = torch.tensor([[7], [8]])
    before = ours.forward(token).logits
    for _ in range(3):
        kept = (torch.rand(16, generator=draw) < 0.6).tolist()
        for _ in range(2):
            # Sums over more slots, all masked.
            torch.testing.assert_close(drafted(ours, kept), drafted(theirs, kept), atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(ours.forward(token).logits, before, atol=2e-4, rtol=1e-4)
    assert all(len(programs) == 1 for programs in ours._planned.values())


def test_the_full_set_and_no_plan_are_programs_of_their_own(recording):
    session = opened(recording)
    assert torch.equal(drafted(session, [True] * 16), drafted(session, None))
    assert (len(session.programs), len(session._planned[(True,) * 16])) == (1, 1)


def test_few_kept_sets_stay_recorded(recording):
    """The one that has not been asked for longest makes room."""
    session = opened(recording)
    sets = [tuple(place != skipped for place in range(16)) for skipped in range(PLANS + 1)]
    for kept in sets[:PLANS]:
        drafted(session, kept, 2)
    drafted(session, sets[0], 1)
    drafted(session, sets[PLANS], 2)
    assert set(session._planned) == {*sets[:1], *sets[2:]}


def test_recordings_of_kept_sets_end_with_their_session_and_its_rows(recording):
    session = opened(recording, 2)
    drafted(session, (True,) * 16, 3)
    place = session.programs
    del session
    gc.collect()
    later = opened(recording, 2)
    assert (later.programs, later._planned) == (place, {})
    drafted(later, (True,) * 16, 3)
    later.select_rows([1])
    assert later._planned == {}
