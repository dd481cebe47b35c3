"""What goes wrong in the loop is said aloud, and costs nobody else anything."""

import time
from dataclasses import dataclass, field

import pytest
import torch
from stubs import Coached, Oracle, RandomTrees, SampledChain

from specwave.decoding import BaseProposer, Context, Sampling, Tree, generate, stream
from specwave.decoding.loop import _drafts
from specwave.decoding.sampling import NO_TOKEN, largest
from specwave.target import load_target

PROMPTS = [[5, 9, 200, 31, 7, 7, 80], [4], [300, 12, 12, 12, 8, 9, 10, 11, 400, 3, 17]]
V = 512


class Noting(BaseProposer):
    """Knows which rows are at work; one of its methods may fail in one round."""

    def __init__(self, fails="", at=2):
        self.fails, self.at, self.round, self.rows = fails, at, 0, set()

    def _fail(self, name):
        if name == self.fails and self.round >= self.at:
            raise RuntimeError(f"{name} failed")

    def begin(self, contexts):
        self.rows = {context.row for context in contexts}

    def end(self, row):
        self.rows.discard(row)

    def propose(self, contexts):
        self.round += 1
        self._fail("propose")
        return super().propose(contexts)

    def propose_row(self, context):
        return Tree.chain([7, 7])

    def observe(self, verdicts):
        self._fail("observe")


# ---------------------------------------------------------------- logits that are no numbers


@pytest.fixture
def poisoned(family_folders):
    """A target whose logits of row 1 become what the test says, from the fourth forward of the loop on."""
    target = load_target(family_folders["llama"], dtype="float32")
    honest, calls = target.logits, []

    def poison(value, node=slice(None)):
        def logits(hidden):
            found = honest(hidden)
            calls.append(1)
            if len(calls) > 3:
                found[1, node] = value
            return found

        target.logits = logits
        return target

    return poison


def drafters(plain):
    return {
        "plain": None,
        "tree": Coached(plain, 4, V),
        "sampled chain": SampledChain(torch.full((V,), 1 / V), 3, seed=4),
        "zeros": Oracle([[0] * 40] * 3, 3, V),  # the token that an argmax over nothing but NaN gives
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", ["plain", "tree", "sampled chain", "zeros"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_p=0.9), Sampling(repetition_penalty=1.2)], ids=str)
def test_logits_that_are_no_numbers_name_row_and_position(value, kind, sampling, poisoned, tiny):
    plain = generate(tiny, None, PROMPTS, max_new_tokens=20, sampling=sampling, eos_ids=()).tokens
    target, got = poisoned(value), [[], [], []]
    with pytest.raises(FloatingPointError, match="row 1, position ") as error:
        generate(
            target,
            drafters(plain)[kind],
            PROMPTS,
            max_new_tokens=20,
            sampling=sampling,
            eos_ids=(),
            on_tokens=lambda row, tokens: got[row].extend(tokens),
        )
    assert f"position {len(PROMPTS[1]) + len(got[1])}:" in str(error.value)
    if kind != "sampled chain" or sampling.greedy:
        assert got == [row[: len(mine)] for row, mine in zip(plain, got, strict=True)]


def test_a_node_beside_the_path_may_hold_anything(poisoned, tiny):
    """Only what is committed has to be numbers: NaN behind a rejected draft is nobody's."""
    plain = generate(tiny, None, PROMPTS, max_new_tokens=12, eos_ids=())
    wrong = Oracle(plain.tokens, 1, V, shift=1)
    assert (
        generate(poisoned(float("nan"), slice(1, None)), wrong, PROMPTS, max_new_tokens=12, eos_ids=()).tokens
        == plain.tokens
    )


def test_the_largest_of_numbers_is_their_argmax():
    values = torch.randn(3, 4, 9)
    values[0, 0] = -torch.inf
    values[0, 0, 5] = 1.0  # ruled out but one
    assert torch.equal(largest(values), values.argmax(-1))
    values[1, 2, 3] = torch.nan
    values[2, 0] = -torch.inf
    assert largest(values)[1, 2] == largest(values)[2, 0] == NO_TOKEN


# ---------------------------------------------------------------- whoever fails, rows are freed


@pytest.mark.parametrize("fails", ["propose", "observe"])
def test_a_failing_proposer_frees_every_row_and_decodes_again(fails, tiny):
    proposer = Noting(fails)
    with pytest.raises(RuntimeError, match=f"{fails} failed"):
        generate(tiny, proposer, PROMPTS, max_new_tokens=12)
    assert proposer.rows == set()
    proposer.fails = ""
    assert (
        generate(tiny, proposer, PROMPTS, max_new_tokens=12).tokens
        == generate(tiny, None, PROMPTS, max_new_tokens=12).tokens
    )


def test_a_failing_reader_frees_every_row_at_once(tiny):
    proposer = Noting()

    def reader(row, tokens):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        generate(tiny, proposer, PROMPTS, max_new_tokens=12, on_tokens=reader)
    assert caught.tb is not None  # the frames are still alive: nothing but closing can have freed the rows
    assert proposer.rows == set()


@dataclass
class Unhashable(BaseProposer):
    levels: int = 2

    def propose_row(self, context):
        return Tree.chain([3] * self.levels)


@dataclass(frozen=True)
class Equal(BaseProposer):
    ended: list = field(default_factory=list, compare=False)

    def end(self, row):
        self.ended.append(row)


def test_a_proposer_is_itself_whatever_it_equals(tiny):
    expected = generate(tiny, None, PROMPTS[0], max_new_tokens=6, eos_ids=()).tokens
    assert generate(tiny, Unhashable(), PROMPTS[0], max_new_tokens=6, eos_ids=()).tokens == expected
    one, other = Equal(), Equal()
    pieces = stream(tiny, one, PROMPTS[0], max_new_tokens=30, eos_ids=(), skip_special_tokens=False)
    next(pieces)
    generate(tiny, other, PROMPTS[0], max_new_tokens=3, eos_ids=())
    pieces.close()
    assert (one.ended, other.ended) == ([0], [0])


# ---------------------------------------------------------------- trees that are none


def tree_of(parents, **more):
    return Tree(torch.arange(5, 5 + len(parents)), torch.tensor(parents), **more)


BROKEN = {
    "before its parent": (tree_of([1, -1]), "after its parent"),
    "no such parent": (tree_of([-1, 7]), "after its parent"),
    "above the root": (tree_of([-3, -1]), "after its parent"),
    "its own parent": (tree_of([-1, 1]), "after its parent"),
    "deeper than said": (tree_of([-1, 0, 1], depth=1), "at most 1 deep has 3 levels"),
    "one deeper than said": (tree_of([-1, 0, 1, 2], depth=3), "at most 3 deep has 4 levels"),
}


class Given(BaseProposer):
    """Row 1 gets the tree of the test, the others a good one."""

    def __init__(self, tree):
        self.tree = tree

    def propose_row(self, context):
        return self.tree if context.row == 1 else Tree.chain([3, 3, 3, 3, 3])


@pytest.mark.parametrize("limit", [2, 3, 4, 20])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8)], ids=str)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tree_is_named_near_the_limit_too(name, sampling, limit, tiny):
    tree, words = BROKEN[name]
    with pytest.raises(ValueError, match=words):
        generate(tiny, Given(tree), PROMPTS, max_new_tokens=limit, sampling=sampling, eos_ids=())


def test_drafts_without_parents_are_refused():
    with pytest.raises(ValueError, match="2 drafts with 1 parents"):
        Tree(torch.tensor([1, 2]), torch.tensor([-1]))


def test_the_levels_of_a_round_are_counted_not_believed(tiny):
    """A tree said to have five levels at most has two; a row without drafts has none."""

    class Some(BaseProposer):
        def propose_row(self, context):
            return tree_of([-1, -1, 1], depth=5) if context.row else Tree.empty()

    made = generate(tiny, Some(), PROMPTS, max_new_tokens=4, eos_ids=())
    assert made.draft_levels[0] == [0] * 4
    for row in (1, 2):
        lengths, levels = made.accept_lengths[row], made.draft_levels[row]
        left = [4 - sum(lengths[:place]) for place in range(len(lengths))]
        assert levels == [min(2, room - 1) for room in left]


def test_drafts_are_capped_at_what_can_be_committed_with_the_targets_token(tiny):
    """transformers PR#46993: in what is verified, not only in what is committed."""
    plain = generate(tiny, None, PROMPTS, max_new_tokens=11, eos_ids=())
    rooms = []

    class Watching(Coached):
        def observe(self, verdicts):
            for verdict in verdicts:
                room = verdict.context.remaining + len(verdict.tokens)
                assert verdict.tree.check() == verdict.levels <= room - 1
                rooms.append((room, verdict.levels))

    made = generate(tiny, Watching(plain.tokens, 6, V), PROMPTS, max_new_tokens=11, eos_ids=())
    assert made.tokens == plain.tokens
    assert any(levels == room - 1 < 6 for room, levels in rooms)


def test_trees_go_to_where_the_target_is():
    """The rule for a GPU, on a device that every machine has."""
    trees = [tree_of([-1, 0, -1]), Tree.chain([4, 5, 6], q=torch.ones(3, 9) / 9), Tree.empty()]
    contexts = [Context(row, row, [1, 2], 2, limit, None, row) for row, limit in enumerate((9, 3, 9))]
    moved = _drafts(trees, contexts, torch.device("meta"))
    assert {tensor.device.type for tree in moved for tensor in (tree.tokens, tree.parents)} == {"meta"}
    assert [len(tree) for tree in moved] == [3, 2, 0]
    assert _drafts(trees[:1], contexts[:1], torch.device("cpu"))[0] is trees[0]


# ---------------------------------------------------------------- ends, caches, clocks


@pytest.mark.parametrize("proposer", ["oracle", "tree"])
def test_an_end_token_inside_an_accepted_run_cuts_tokens_path_and_states(proposer, tiny):
    """transformers#47912: and what a proposer is shown of the round is of the tokens that stand."""
    plain = generate(tiny, None, PROMPTS, max_new_tokens=30, eos_ids=()).tokens
    ends = {row[9] for row in plain}
    wanted = [row[: next(at for at, token in enumerate(row) if token in ends) + 1] for row in plain]
    cut = []

    class Seeing:
        def wants(self, contexts):
            from specwave.target import Wants

            return Wants(blocks=(2,), attentions=(5,))

        def observe(self, verdicts):
            for verdict in verdicts:
                context = verdict.context
                assert len(verdict.path) == len(verdict.tokens)
                assert len(context.blocks[2]) == len(context.attentions[5]) == len(verdict.tokens)
                whole = torch.tensor([context.tokens])
                expected = tiny.states(whole, [2])[2][0, -1 - len(verdict.tokens) : -1]
                torch.testing.assert_close(context.blocks[2], expected, atol=1e-3, rtol=1e-3)
                assert context.session.lengths[context.slot] == len(context.tokens) - 1
                cut.append(verdict.tokens[-1] in ends and len(verdict.tokens) <= verdict.levels)

    kind = {"oracle": Oracle, "tree": Coached}[proposer]
    method = type("Watching", (Seeing, kind), {})(plain, 6, V)
    made = generate(tiny, method, PROMPTS, max_new_tokens=30, eos_ids=tuple(ends))
    assert made.tokens == wanted
    assert any(cut)  # an end token came before the last of a run that would have been accepted further


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS[:2]], ids=["alone", "batch"])
def test_the_cache_stays_where_it_is(prompts, tiny):
    places = set()

    class Looking(RandomTrees):
        def propose(self, contexts):
            cache = contexts[0].session.cache
            places.add((cache.keys[0].data_ptr(), cache.values[-1].data_ptr(), cache.capacity))
            return super().propose(contexts)

    made = generate(tiny, Looking(V), prompts, max_new_tokens=30, eos_ids=())
    assert made.rounds > 5
    assert len(places) == 1


def test_what_the_reader_does_is_not_in_the_seconds(tiny):
    slept = []

    def reader(row, tokens):
        time.sleep(0.05)
        slept.append(0.05)

    start = time.perf_counter()
    made = generate(tiny, None, PROMPTS[0], max_new_tokens=6, eos_ids=(), on_tokens=reader)
    whole = time.perf_counter() - start
    assert len(slept) == 6
    assert made.seconds <= whole - sum(slept)  # however busy the machine is
    assert made.prefill_seconds + made.draft_seconds + made.verify_seconds <= made.seconds
