"""What the copying methods draft, against their definitions, and what they refuse."""

import math
import random
from dataclasses import asdict

import pytest
import torch
import yaml
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from specwave.artifacts import UserError, conf_dir
from specwave.copying import BanditSpecDecoding, CopySpecDecoding, PldDecoding, SuffixDecoding
from specwave.copying.composite import FirstOf
from specwave.copying.hindsight import OracleDecoding
from specwave.copying.proposers import takes_checkpoint
from specwave.decoding import Autoregressive, BaseProposer, Tree, generate, stream
from specwave.eagle import Eagle3, Eagle3Decoding
from specwave.eagle.export import TargetFacts, write_drafter

PROMPTS = [[5, 9, 200, 31, 5, 9, 200, 80, 5, 9], [4], [300, 12, 12, 12, 8, 9, 12, 12, 12, 8], [7, 8, 9] * 5]


def grown(seed, letters, size):
    """A growing text: some tokens at a time, as rounds commit them."""
    draw, text = random.Random(seed), []
    while len(text) < size:
        text += [draw.randrange(letters) for _ in range(draw.randint(1, 4))]
        yield list(text)


def drafts(proposer, context, text):
    """The chain a proposer drafts once `text` is committed."""
    context.tokens[:] = text
    (tree,) = proposer.propose([context])
    tree.check()
    assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
    return tree.tokens.tolist()


@pytest.mark.parametrize("seed", range(40))
def test_pld_drafts_what_hugging_face_does(seed, context_of):
    draw, drafted = random.Random(seed), 0
    n, length, letters = draw.randint(1, 4), draw.randint(1, 12), draw.choice([2, 3, 6, 20])
    theirs = PromptLookupCandidateGenerator(
        num_output_tokens=length, max_matching_ngram_size=n, max_length=10**9, eos_token_id=None
    )
    proposer, context = PldDecoding(n, length).build(None), context_of([0])
    proposer.begin([context])
    for text in grown(seed, letters, 120):
        wanted = theirs.get_candidates(torch.tensor([[0, *text]]))[0][0, len(text) + 1 :].tolist()
        assert drafts(proposer, context, [0, *text]) == wanted
        drafted += len(wanted)
    assert drafted > 20


def earlier(text, n):
    """Where the last n tokens' earlier occurrences end."""
    size = len(text)
    return [end for end in range(n, size) if n < size and text[end - n : end] == text[size - n :]]


@pytest.mark.parametrize("occurrence", ["first", "recent"])
@pytest.mark.parametrize("n", [1, 3, 5])
def test_copyspec_copies_or_leaves_it_to_the_drafter(n, occurrence, context_of):
    class Constant(BaseProposer):
        def propose_row(self, context):
            return Tree.chain([77, 78])

    copied = left = 0
    for with_neural in (True, False):
        proposer = CopySpecDecoding(None, n, 6, occurrence).build(None)
        if with_neural:
            proposer = FirstOf({**proposer.children, "neural": Constant()})
        context = context_of([])
        proposer.begin([context])
        for text in grown(n, 30 if n == 1 else 3, 300):
            ends = earlier(text, n)
            wanted = [77, 78] if with_neural else []
            if ends:
                start = ends[0 if occurrence == "first" else -1]
                wanted = text[start : start + 6]
            assert drafts(proposer, context, text) == wanted
            copied += bool(ends)
            left += not ends
    assert copied > 20
    assert left > 10


@pytest.mark.parametrize("settings", [{}, {"least": 3, "factor": 0.5, "length": 5}, {"occurrence": "first"}])
def test_suffix_copies_more_behind_longer_matches(settings, context_of):
    method = SuffixDecoding(**settings)
    proposer, context, lengths = method.build(None), context_of([]), set()
    proposer.begin([context])
    texts = [*grown(8, 3, 150), *([*range(40), *range(match)] for match in range(1, 15))]
    for text in texts:
        longest = max((n for n in range(1, len(text)) if earlier(text, n)), default=0)
        wanted = []
        if longest >= method.least:
            ends = earlier(text, longest)
            start = ends[0 if method.occurrence == "first" else -1]
            count = min(method.length, math.ceil(method.factor * longest))
            wanted = (text[start:] * count)[:count]
        if len(text) < len(context.tokens):  # the second kind of text begins anew
            context = context_of([])
            proposer.begin([context])
        assert drafts(proposer, context, text) == wanted
        lengths.add(len(wanted))
    assert len(lengths) > 4


def test_no_more_is_drafted_than_can_be_committed(context_of):
    for method in (PldDecoding(), SuffixDecoding(), CopySpecDecoding(None, n=2)):
        proposer, context = method.build(None), context_of([3, 1, 2, 3, 4, 1, 2], limit=4)
        proposer.begin([context])
        assert drafts(proposer, context, [3, 1, 2, 3, 4, 1, 2]) == [3, 4, 1]
        assert drafts(proposer, context, [3, 1, 2, 3, 4, 1, 2, 3, 1, 2]) == []


def test_a_text_without_repeats_is_decoded_plainly(context_of):
    for method in (PldDecoding(), SuffixDecoding(), CopySpecDecoding(None)):
        proposer, context = method.build(None), context_of(range(50))
        proposer.begin([context])
        assert drafts(proposer, context, range(50)) == []


def test_a_proposer_decodes_one_prompt_at_a_time(tiny):
    for method in (PldDecoding(), SuffixDecoding()):
        proposer = method.build(tiny)
        plain = generate(tiny, None, PROMPTS[0], max_new_tokens=12).tokens
        first = stream(tiny, proposer, PROMPTS[2], max_new_tokens=12, skip_special_tokens=False)
        next(first)
        assert generate(tiny, proposer, PROMPTS[0], max_new_tokens=12).tokens == plain
        with pytest.raises(ValueError, match="has begun another decoding since"):
            list(first)


def test_finished_rows_are_freed(tiny):
    proposer = PldDecoding().build(tiny)
    generate(tiny, proposer, PROMPTS, max_new_tokens=5)
    assert proposer.children["copy"].rows == {}


# ---------------------------------------------------------------- settings


METHODS = {
    "pld": PldDecoding,
    "suffix": SuffixDecoding,
    "copyspec": CopySpecDecoding,
    "banditspec": BanditSpecDecoding,
    "oracle": OracleDecoding,
}


@pytest.mark.parametrize("name", METHODS)
def test_yaml_repeats_the_defaults(name):
    """And every key reaches the class; the methods within are checked with all of conf/."""
    content = yaml.safe_load((conf_dir() / f"decoding/{name}.yaml").read_text(encoding="utf-8"))
    assert content.pop("_target_").rpartition(".")[2] == METHODS[name].__name__
    assert METHODS[name].label == name
    assert METHODS[name].needs_checkpoint is False
    within = {key: content.pop(key) for key in ("neural", "arms", "sources") if key in content}
    arms = {"one": PldDecoding(), "two": SuffixDecoding()}
    given = {key: None if key == "neural" else arms for key in within}
    if content.get("seed") == "${seed}":
        content["seed"] = 0
    defaults = asdict(METHODS[name](**given))
    assert {key: value for key, value in defaults.items() if key not in within} == content


TWO = {"a": PldDecoding(length=4), "b": SuffixDecoding()}


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        (PldDecoding, {"n": 0}, "decoding.n=0: must be 1 to 64"),
        (PldDecoding, {"n": 65}, "decoding.n=65: must be 1 to 64"),
        (PldDecoding, {"length": 0}, "decoding.length=0: must be 1 to 64, which one round can verify"),
        (PldDecoding, {"length": 65}, "decoding.length=65: must be 1 to 64"),
        (SuffixDecoding, {"least": 0}, "decoding.least=0: a run has at least 1 token"),
        (SuffixDecoding, {"factor": 0.0}, "decoding.factor=0.0: must be a positive number"),
        (SuffixDecoding, {"factor": math.nan}, "decoding.factor=nan: must be a positive number"),
        (SuffixDecoding, {"length": -1}, "decoding.length=-1: must be 1 to 64"),
        (CopySpecDecoding, {"neural": None, "n": 0}, "decoding.n=0: must be 1 to 64"),
        (CopySpecDecoding, {"neural": None, "length": 70}, "decoding.length=70: must be 1 to 64"),
        (CopySpecDecoding, {"neural": "eagle3"}, "decoding.neural=eagle3: a decoding method is expected, as in"),
        (CopySpecDecoding, {"neural": {"levels": 2}}, "decoding.neural=dict: a decoding method is expected"),
        (BanditSpecDecoding, {"arms": {}}, "decoding.arms=[]: a bandit chooses among at least two arms, there is none"),
        (
            BanditSpecDecoding,
            {"arms": {"a": PldDecoding()}},
            "decoding.arms=['a']: a bandit chooses among at least",
        ),
        (BanditSpecDecoding, {"arms": {"a": PldDecoding(), "b": None}}, "decoding.arms=['a']: a bandit chooses among"),
        (
            BanditSpecDecoding,
            {"arms": {"a": PldDecoding(), "b": 3}},
            "decoding.arms.b=3: a decoding method is expect",
        ),
        (BanditSpecDecoding, {"arms": TWO, "c": -1.0}, "decoding.c=-1.0: must be a number from 0"),
        (BanditSpecDecoding, {"arms": TWO, "gamma": 0.0}, "decoding.gamma=0.0: must be above 0 and at most 1"),
        (BanditSpecDecoding, {"arms": TWO, "gamma": 1.1}, "decoding.gamma=1.1: must be above 0 and at most 1"),
    ],
)
def test_bad_settings_are_user_errors(method, settings, words):
    with pytest.raises(UserError) as caught:
        method(**settings)
    assert str(caught.value).startswith(words)


def test_arms_with_a_drafter_are_left_out_without_one(tiny):
    arms = {**TWO, "neural": Eagle3Decoding(), "nobody": None, "plain": Autoregressive()}
    proposer = BanditSpecDecoding(arms).build(tiny)
    assert proposer.names == ["a", "b", "plain"]
    assert list(proposer.settings.arms) == ["a", "b", "plain"]
    with pytest.raises(UserError, match=r"decoding\.arms=\['a'\]: .* without a checkpoint there is only a"):
        BanditSpecDecoding({"a": PldDecoding(), "neural": Eagle3Decoding()}).build(tiny)


def test_what_reads_a_drafter_says_so():
    assert takes_checkpoint(CopySpecDecoding(Eagle3Decoding()))
    assert not takes_checkpoint(CopySpecDecoding(None))
    assert not takes_checkpoint(PldDecoding())
    assert not takes_checkpoint(BanditSpecDecoding(TWO))
    assert takes_checkpoint(BanditSpecDecoding({**TWO, "neural": Eagle3Decoding()}))
    assert takes_checkpoint(BanditSpecDecoding({**TWO, "nested": CopySpecDecoding(Eagle3Decoding())}))


def test_a_drafters_folder_becomes_a_child(tiny, drafter_of, tmp_path):
    facts = TargetFacts(tiny.name, tiny.fingerprint, tiny.num_layers)
    folder = write_drafter(tmp_path / "d", drafter_of(tiny), facts, dtype=torch.float32) or tmp_path / "d"
    method = CopySpecDecoding(Eagle3Decoding(levels=4))
    proposer = method.build(tiny, folder)
    assert list(proposer.children) == ["copy", "neural"]
    assert isinstance(proposer.children["neural"], Eagle3)
    assert proposer.settings == method
    assert list(method.build(tiny).children) == ["copy"]
    assert method.build(tiny).settings.neural is None
    bandit = BanditSpecDecoding({**TWO, "three": Eagle3Decoding(levels=3), "copyspec": method}).build(tiny, folder)
    assert bandit.children["three"].levels == 3
    assert bandit.settings.arms["three"] == Eagle3Decoding(levels=3)
    assert list(bandit.children["copyspec"].children) == ["copy", "neural"]
