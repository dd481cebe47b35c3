"""The composite rule: whoever drafts, every child stays up to date; and the account of who drafted what."""

import pytest
import torch

from specwave.copying import PldDecoding, SuffixDecoding
from specwave.copying.composite import Composite, FirstOf
from specwave.copying.hindsight import Hindsight, accepted
from specwave.decoding import BaseProposer, Sampling, Tree, generate
from specwave.skipping import KnapSpecDecoding, LayerSkipDecoding
from specwave.target import Wants

PROMPTS = [[5, 9, 200, 31, 5, 9, 200, 80, 5, 9], [4], [300, 12, 12, 12, 8, 9, 12, 12, 12, 8], [7, 8, 9] * 5]


class Alternating(Composite):
    """Asks its children in turn, each for several rounds; the rows of a batch are at different places."""

    def __init__(self, children, turn=1):
        super().__init__(children)
        self.turn, self.round, self.drafted = turn, 0, {name: [] for name in children}

    def draft(self, contexts):
        self.round += 1
        trees, names = {}, list(self.children)
        for place, name in enumerate(names):
            own = [c for c in contexts if (self.round // self.turn + c.row) % len(names) == place]
            for context, tree in zip(own, self.ask(name, own) if own else [], strict=True):
                trees[context.row] = tree
                self.ledger.note(context.row, name, "its turn")
                self.drafted[name].append((list(context.tokens), tree.tokens.tolist(), tree.parents.tolist()))
        return trees


class FirstDraftError(Exception):
    """A first draft: (tokens, parents)."""


class First(BaseProposer):
    """Raises its child's first draft."""

    def __init__(self, child):
        self.child, self.wants, self.begin = child, child.wants, child.begin

    def propose(self, contexts):
        (tree,) = self.child.propose(contexts)
        raise FirstDraftError(tree.tokens.tolist(), tree.parents.tolist())


@pytest.mark.parametrize(
    ("family", "turn", "sampling"),
    [
        ("llama", 1, Sampling()),
        ("llama", 7, Sampling()),
        ("llama", 3, Sampling(0.8, seed=4)),
        ("qwen3", 2, Sampling()),
    ],
)
def test_alternating_children_draft_what_each_would_alone(family, turn, sampling, families, neural):
    """Every draft of the mixed decoding, against a decoding of that child's own that begins at that very context."""
    target = families[family]

    def children():
        return {
            "copy": PldDecoding().build(target),
            "chain": neural(target, 3),
            "suffix": SuffixDecoding().build(target),
            "tree": neural(target, 3, top_k=3, total_token=10),
        }

    mixed = Alternating(children(), turn)
    generate(target, mixed, PROMPTS, max_new_tokens=40, sampling=sampling, eos_ids=())
    checked = 0
    for name, drafted in mixed.drafted.items():
        child = children()[name]
        for tokens, ids, parents in drafted:
            done = next(len(tokens) - len(prompt) for prompt in PROMPTS if tokens[: len(prompt)] == prompt)
            with pytest.raises(FirstDraftError) as alone:
                generate(target, First(child), tokens, max_new_tokens=40 - done, sampling=sampling, eos_ids=())
            assert alone.value.args == (ids, parents)
            checked += bool(ids)
    assert checked > 40


def test_a_child_that_is_not_told_drafts_something_else(tiny, neural):
    """The control: without `observe` in the other children's rounds the neural drafts differ or break."""

    class Forgetful(Alternating):
        def observe(self, verdicts):
            self.ledger.observe(verdicts)
            name = list(self.children)[self.round // self.turn % 2]
            self.children[name].observe(verdicts)

    told, untold = (kind({"chain": neural(tiny, 3), "none": None}, turn=5) for kind in (Alternating, Forgetful))
    for proposer in (told, untold):
        generate(tiny, proposer, PROMPTS[:1], max_new_tokens=40, eos_ids=())
    ours = {tuple(tokens): draft for tokens, draft, _ in told.drafted["chain"]}
    theirs = {tuple(tokens): draft for tokens, draft, _ in untold.drafted["chain"]}
    assert any(theirs[tokens] != ours[tokens] for tokens in ours.keys() & theirs.keys())


class Wanting(BaseProposer):
    def __init__(self, blocks, attentions, ask=1):
        self.wanted, self.shown = Wants(tuple(blocks), tuple(attentions)), 0

    def wants(self, contexts):
        return self.wanted

    def observe(self, verdicts):
        for verdict in verdicts:
            assert set(self.wanted.blocks) <= set(verdict.context.blocks)
            assert set(self.wanted.attentions) <= set(verdict.context.attentions)
            self.shown += 1


def test_what_any_child_wants_is_captured(tiny):
    children = {"one": Wanting([1, 5], []), "two": Wanting([5, 7], [2]), "copy": PldDecoding().build(tiny)}
    proposer = FirstOf(children)
    assert proposer.wants([]) == Wants((1, 5, 7), (2,))
    made = generate(tiny, proposer, PROMPTS[0], max_new_tokens=20, eos_ids=())
    assert children["one"].shown == children["two"].shown == made.rounds


def test_what_a_child_learns_along_the_stream_the_composite_does(tiny):
    learning = BaseProposer()
    learning.scope = "stream"
    assert FirstOf({"copy": PldDecoding().build(tiny), "neural": learning}).scope == "stream"
    assert FirstOf({"copy": PldDecoding().build(tiny), "neural": None}).scope == "sequence"


# ---------------------------------------------------------------- the account


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["alone", "batch"])
def test_the_account_adds_up(prompts, tiny, neural):
    copy = SuffixDecoding(least=2).build(tiny).children["copy"]
    proposer = FirstOf({"copy": copy, "neural": neural(tiny, 2)})
    made = generate(tiny, proposer, prompts, max_new_tokens=60, eos_ids=())
    sources = set()
    for row, lengths in enumerate(made.accept_lengths):
        account = proposer.ledger.of(row)
        sources |= set(account)
        assert sum(tally["rounds"] for tally in account.values()) == len(lengths)
        assert sum(tally["accepted"] for tally in account.values()) == sum(lengths) - len(lengths)
        assert sum(sum(tally["why"].values()) for tally in account.values()) == len(lengths)
        for source, tally in account.items():
            assert tally["hits"] <= tally["rounds"]
            assert tally["hits"] <= tally["accepted"] <= tally["drafted"]
            assert set(tally["why"]) <= {"copy": {"match"}, "neural": {"no copy"}, "plain": {"no neural"}}[source]
    assert {"copy", "neural"} <= sources
    every = [tally for row in range(len(prompts)) for tally in proposer.ledger.of(row).values()]
    drafting = sum(tally["draft_seconds"] for tally in every)
    assert 0 < drafting < sum(tally["seconds"] for tally in every) < made.seconds


def test_who_drafted_is_who_is_noted(tiny):
    """Each source drafts a length of its own, so the account can be told from the trees."""

    class Fixed(BaseProposer):
        def __init__(self, tokens, period):
            self.tokens, self.period = tokens, period

        def propose_row(self, context):
            return Tree.chain(self.tokens if len(context.tokens) % self.period == 0 else [])

    proposer = FirstOf({"rare": Fixed([1, 2, 3], 4), "often": Fixed([4, 5], 2)})
    made = generate(tiny, proposer, [[7, 8, 9] * 5], max_new_tokens=40, eos_ids=())
    account, length, wanted = proposer.ledger.of(0), 15, {"rare": 0, "often": 0, "plain": 0}
    for step in made.accept_lengths[0]:
        wanted["rare" if length % 4 == 0 else "often" if length % 2 == 0 else "plain"] += 1
        length += step
    assert {name: account[name]["rounds"] for name in wanted} == wanted
    assert account["plain"]["drafted"] == 0
    assert account["rare"]["drafted"] > 2 * account["rare"]["rounds"]  # fewer only where the limit cut them


def test_the_account_is_of_the_decoding_that_began_last(tiny):
    proposer = PldDecoding().build(tiny)
    generate(tiny, proposer, PROMPTS, max_new_tokens=10, eos_ids=())
    assert proposer.ledger.of(3)
    made = generate(tiny, proposer, PROMPTS[0], max_new_tokens=6, eos_ids=())
    assert proposer.ledger.of(3) == {}
    assert sum(tally["rounds"] for tally in proposer.ledger.of(0).values()) == made.rounds


def test_a_composite_within_a_composite_counts_its_own_rounds_only(tiny):
    inner = PldDecoding().build(tiny)
    outer = Alternating({"inner": inner, "none": None}, turn=1)
    made = generate(tiny, outer, [[7, 8, 9] * 5], max_new_tokens=20, eos_ids=())
    account = outer.ledger.of(0)
    assert account["inner"]["rounds"] + account["none"]["rounds"] == made.rounds
    assert sum(tally["rounds"] for tally in inner.ledger.of(0).values()) == account["inner"]["rounds"]
    assert torch.tensor(made.accept_lengths[0]).sum() == 20


# ---------------------------------------------------------------- hindsight


def test_drafts_on_the_way():
    tree = Tree(torch.tensor([5, 6, 7, 8]), torch.tensor([-1, -1, 1, 2]))
    assert [accepted(tree, future) for future in ([5, 6], [6, 7, 8, 9], [6, 7], [6, 8], [7], [])] == [1, 3, 2, 1, 0, 0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=4)], ids=["greedy", "sampled"])
def test_hindsight_commits_what_the_best_child_would_have(sampling, five, neural):
    prompts = [[1, 2, 3, 4, 1, 2], [4, 4, 4, 3, 4, 4]]

    def children():
        return {"copy": PldDecoding(2, 4).build(five), "chain": neural(five, 3), "suffix": SuffixDecoding().build(five)}

    plain = generate(five, None, prompts, max_new_tokens=60, sampling=sampling)
    proposer = Hindsight(children())
    best = generate(five, proposer, prompts, max_new_tokens=60, sampling=sampling)
    assert best.tokens == plain.tokens
    for row, lengths in enumerate(best.accept_lengths):
        done, account = 0, proposer.ledger.of(row)
        for length in lengths:
            tokens, room = prompts[row] + plain.tokens[row][:done], 60 - done
            each = []
            for child in children().values():
                with pytest.raises(FirstDraftError) as alone:
                    generate(five, First(child), tokens, max_new_tokens=room)
                ids, parents = alone.value.args
                drafted = Tree(torch.tensor(ids), torch.tensor(parents)).cut(room - 1) if ids else Tree.empty()
                each.append(accepted(drafted, plain.tokens[row][done:]))
            assert length == max(each) + 1
            done += length
        assert sum(tally["accepted"] for tally in account.values()) == sum(lengths) - len(lengths)
        assert set(account) <= {"copy", "chain", "suffix", "plain"}
        assert all(tally["hits"] == tally["rounds"] for name, tally in account.items() if name != "plain")
    for child in children().values():  # a greedy walk through a text is not the fewest rounds there are, but near it
        alone = generate(five, child, prompts, max_new_tokens=60, sampling=sampling)
        assert best.rounds <= alone.rounds + 1


def test_what_a_child_left_in_the_cache_is_not_gone_on_from_where_another_ran(tiny):
    """Early exits leave their blocks' keys behind the committed tokens; the second one overwrites the first one's."""

    class Two(Composite):
        """Asks both, takes the first."""

        def draft(self, contexts):
            trees, _ = (self.ask(name, contexts) for name in self.children)
            return {context.row: tree for context, tree in zip(contexts, trees, strict=True)}

    def children():
        return {str(block): LayerSkipDecoding(gamma=4, exit=block).build(tiny) for block in (4, 1)}

    plain = generate(tiny, None, PROMPTS, max_new_tokens=60, eos_ids=())
    for proposer in (Two(children()), Hindsight(children())):
        made = generate(tiny, proposer, PROMPTS, max_new_tokens=60, eos_ids=())
        assert made.tokens == plain.tokens
        assert made.rounds < plain.rounds
    seen = []

    class One(FirstOf):
        def propose(self, contexts):
            trees = super().propose(contexts)
            seen.extend(tree.resume for tree in trees if len(tree))
            return trees

    only = One({"copy": PldDecoding(2, 4).build(tiny), "exit": LayerSkipDecoding(gamma=4, exit=4).build(tiny)})
    assert generate(tiny, only, PROMPTS, max_new_tokens=60, eos_ids=()).tokens == plain.tokens
    assert any(one is not None for one in seen)  # who runs alone is gone on from


def test_children_write_into_folders_of_their_own(tiny, tmp_path):
    kinds = {"a": KnapSpecDecoding(plan_share=None), "b": KnapSpecDecoding(plan_share=None, gamma=2)}
    proposer = FirstOf({"copy": PldDecoding().build(tiny), **{name: kind.build(tiny) for name, kind in kinds.items()}})
    proposer.take_up(tmp_path)
    proposer.warmed_up()
    generate(tiny, proposer, PROMPTS[0], max_new_tokens=20, eos_ids=())
    proposer.flush(tmp_path)
    proposer.report(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    assert (tmp_path / "a/plans.jsonl").is_file()


def test_hindsight_looks_ahead_again_where_the_output_went_elsewhere(five):
    """As below float32, where rounding may turn a near-tie: here what is foreseen is spoilt from the fifth token on."""

    class Misled(Hindsight):
        spoilt = 0

        def _look_ahead(self, contexts):
            super()._look_ahead(contexts)
            for context in contexts if self.spoilt < 2 else ():
                self.spoilt += 1
                future = self.outputs[context.row]
                self.outputs[context.row] = future[:4] + [(token + 1) % five.vocab_size for token in future[4:]]

    prompts = [[1, 2, 3, 4, 1, 2], [4, 4, 4, 3, 4, 4]]
    right, misled = (kind({"suffix": SuffixDecoding().build(five)}) for kind in (Hindsight, Misled))
    found = [generate(five, one, prompts, max_new_tokens=60) for one in (right, misled)]
    assert found[0].tokens == found[1].tokens
    assert misled.spoilt == 2
    assert found[0].rounds <= found[1].rounds <= found[0].rounds + 2


def test_hindsight_is_charged_for_the_source_it_took(five, monkeypatch):
    """By a clock that ticks with what is done: looking ahead and asking the sources that lose cost nothing."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    class Costly(BaseProposer):
        """Drafts tokens that come, or others, for a price."""

        def __init__(self, right, price):
            self.right, self.price = right, price

        def propose_row(self, context):
            clock[0] += self.price
            future = plain.tokens[0][len(context.tokens) - context.prompt_length :]
            draft = future[:2] if self.right else [(token + 1) % five.vocab_size for token in future[:2]]
            return Tree.chain(draft)

    forward = type(five.session(1, 8)).forward

    def timed(session, *args, **options):
        clock[0] += 100.0
        return forward(session, *args, **options)

    plain = generate(five, None, [[1, 2, 3, 4, 1, 2]], max_new_tokens=30, eos_ids=())
    monkeypatch.setattr("specwave.target.Session.forward", timed)
    made = generate(
        five, Hindsight({"right": Costly(True, 3.0), "wrong": Costly(False, 7.0)}), [[1, 2, 3, 4, 1, 2]],
        max_new_tokens=30, eos_ids=(),
    )  # fmt: skip
    assert made.rounds == 10
    assert made.draft_seconds == pytest.approx(10 * 3.0)
    assert made.verify_seconds == pytest.approx(10 * 100.0)
    assert made.seconds == pytest.approx(made.prefill_seconds + made.draft_seconds + made.verify_seconds)
    assert made.warmup_seconds > 30 * 100.0
