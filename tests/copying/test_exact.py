"""Every copying method in the loop: the output is the target's own, greedy and sampled, alone and in a batch."""

import pytest

from specwave.copying import BanditSpecDecoding, CopySpecDecoding, PldDecoding, SuffixDecoding
from specwave.copying.bandit import Exp3, Ucb
from specwave.copying.banditspec import BanditSpec
from specwave.copying.composite import FirstOf
from specwave.copying.hindsight import Hindsight
from specwave.decoding import Autoregressive, Sampling, generate

PROMPTS = [[5, 9, 200, 31, 5, 9, 200, 80, 5, 9], [4], [300, 12, 12, 12, 8, 9, 12, 12, 12, 8], [7, 8, 9] * 5]
FIVE = [[1, 2, 3, 4, 1, 2], [0], [4, 4, 4, 3, 4, 4], [2, 0] * 6]
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(0.8, seed=4),
    "processed": Sampling(0.9, seed=5, top_k=40, top_p=0.95, repetition_penalty=1.2),
}


def methods(target, neural):
    copies = {"short": PldDecoding(2, 3), "long": SuffixDecoding()}
    copy = PldDecoding().build(target).children["copy"]
    return {
        "pld": PldDecoding().build(target),
        "pld, recent": PldDecoding(2, 20, "recent").build(target),
        "suffix": SuffixDecoding().build(target),
        "suffix, first": SuffixDecoding(2, 5.0, 30, "first").build(target),
        "copyspec": CopySpecDecoding(None, 3).build(target),
        "copyspec and a chain": FirstOf({"copy": copy, "neural": neural(target)}),
        "copyspec and a tree": FirstOf({"copy": copy, "neural": neural(target, 3, top_k=3, total_token=12)}),
        "bandit of copies": BanditSpecDecoding({**copies, "plain": Autoregressive()}, c=0.5).build(target),
        "bandit of all": BanditSpec(
            {
                "copy": PldDecoding().build(target),
                "suffix": SuffixDecoding().build(target),
                "chain": neural(target, 2),
                "tree": neural(target, 2, top_k=4, total_token=9),
                "plain": None,
            },
            lambda arms, sequence: Exp3(arms, 0.5, sequence),
        ),
        "bandit of a stream": BanditSpec(
            {"copy": SuffixDecoding().build(target), "chain": neural(target, 2)},
            lambda arms, sequence: Ucb(arms, 0.5),
            stream=True,
        ),
        "oracle": Hindsight({"copy": SuffixDecoding().build(target), "tree": neural(target, 2, top_k=3)}),
    }


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "greedy"),
        ("mistral", "sampled"),
        ("qwen3", "processed"),
        ("five", "greedy"),
        ("five", "sampled"),
        ("five", "processed"),
    ],
)
def test_output_is_the_targets(family, kind, families, five, neural):
    target, prompts = (five, FIVE) if family == "five" else (families[family], PROMPTS)
    limit, sampling = (60 if family == "five" else 32), SAMPLINGS[kind]
    plain = generate(target, None, prompts, max_new_tokens=limit, sampling=sampling)
    for name, proposer in methods(target, neural).items():
        drafted = generate(target, proposer, prompts, max_new_tokens=limit, sampling=sampling)
        assert drafted.tokens == plain.tokens, name
        assert drafted.rounds < plain.rounds or family != "five", name  # with five tokens every method hits at times
        alone = generate(target, proposer, prompts[2], max_new_tokens=limit, sampling=sampling, sequence_ids=[2])
        assert alone.tokens == plain.tokens[2], name
        if "bandit" not in name:  # whose rewards are times
            assert alone.accept_lengths == drafted.accept_lengths[2], name


@pytest.mark.parametrize("name", ["copyspec and a chain", "bandit of all"])
def test_rows_that_end_early_leave_the_others_alone(name, families, neural):
    """End tokens, a limit, and the batch that shrinks."""
    target = families["llama"]
    plain = generate(target, None, PROMPTS, max_new_tokens=40, eos_ids=()).tokens
    stop = plain[1][4]
    wanted = [row[: row.index(stop) + 1] if stop in row else row for row in plain]
    assert len({len(row) for row in wanted}) > 1
    proposer = methods(target, neural)[name]
    assert generate(target, proposer, PROMPTS, max_new_tokens=40, eos_ids=(stop,)).tokens == wanted
