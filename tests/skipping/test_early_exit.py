"""Early exit in the loop: drafts of the first blocks, verified from there on; nothing changes but the speed."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from specwave.app.evaluate import EvaluateConfig, main
from specwave.app.run import Run
from specwave.artifacts import UserError, conf_dir
from specwave.benchmark import Benchmark
from specwave.decoding import BaseProposer, Sampling, Tree, generate
from specwave.decoding.resume import verify
from specwave.skipping import Below, DelDecoding, LayerSkipDecoding
from specwave.skipping.early_exit import draft_to_exit
from specwave.skipping.exits import exit_block
from specwave.skipping.plans import read_plan
from specwave.target import ModelConfig, Session, Wants, load_target
from specwave.target.tiny import make_tiny

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
PROMPTS = [[5, 9, 200, 31, 7, 7, 80], [4, 8], [300, 12, 12, 12, 8, 9, 10, 11, 400, 3, 17], [9] * 5]
NAMES = ["greedy", "nucleus", "penalty"]
SAMPLINGS = [Sampling(), Sampling(0.7, seed=11, top_p=0.9), Sampling(1.1, 3, repetition_penalty=1.2)]
METHODS = {"layerskip": LayerSkipDecoding(exit=3, gamma=4), "del": DelDecoding(gamma=5, exits=[1, 3, 5])}
CLOSE = {"atol": 1e-3, "rtol": 1e-3}  # float32, other shapes of the same sums, 8 blocks


@pytest.fixture
def forwards(monkeypatch):
    """Of every forward over more than one token a row, in order: the block it started at."""
    starts, forward = [], Session.forward

    def noted(self, tokens, *args, **more):
        new = (tokens if tokens is not None else more["hidden"]).shape[1]
        if new > 1 and more.get("logits", True):
            starts.append(more.get("start_block", 0))
        return forward(self, tokens, *args, **more)

    monkeypatch.setattr(Session, "forward", noted)
    return starts


def make_flat(folder: Path) -> Path:
    """A checkpoint whose blocks from 3 on now add nothing: an exit at 3 is the whole target."""
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    for layer in range(3, 8):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.{layer}.{name}.weight"].zero_()
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def flat_folder(tmp_path_factory):
    return make_flat(make_tiny(tmp_path_factory.mktemp("flat")))


@pytest.fixture(scope="session")
def flat(flat_folder):
    return load_target(flat_folder, dtype="float32")


# ---------------------------------------------------------------- drafts


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("lengths", [(9,), (9, 14, 5)])
def test_chains_are_the_early_argmax_and_bring_their_states(family, lengths, mild, opened, contexts_of):
    """Each draft by a forward of its own over the whole text, up to the exit; states of root and drafts, the last too.
    Then with a stop rule that ends some chains early."""
    target, block = mild[family], 3
    session, prompts = opened(target, lengths)
    texts, given = [prompt.tolist() for prompt in prompts], [[] for _ in prompts]
    for text, probabilities in zip(texts, given, strict=True):
        for _ in range(5):
            logits = target.logits(target.states(torch.tensor([text]), [block - 1])[block - 1][0, -1])
            probabilities.append(float(logits.softmax(-1).max()))
            text.append(int(logits.argmax()))
    ordered = sorted(probability for row in given for probability in row)
    middle = len(ordered) // 2
    before = session.mark()
    for stop in (0.0, (ordered[middle - 1] + ordered[middle]) / 2):
        trees = draft_to_exit(contexts_of(session, prompts, Sampling()), block, 5, Below(stop), (0, 1, 2, 6))
        assert session.mark() == before
        for prompt, text, probabilities, tree in zip(prompts, texts, given, trees, strict=True):
            count = next((place + 1 for place, one in enumerate(probabilities) if one < stop), 5)
            assert tree.tokens.tolist() == text[len(prompt) :][:count]
            nodes = slice(len(prompt) - 1, len(prompt) + count)
            states = target.states(torch.tensor([text]), [0, 1, 2])
            assert tree.resume.block == block
            torch.testing.assert_close(tree.resume.hidden, states[2][0, nodes], **CLOSE)
            assert sorted(tree.resume.blocks) == [0, 1]
            for layer in (0, 1):
                torch.testing.assert_close(tree.resume.blocks[layer], states[layer][0, nodes], **CLOSE)
    assert min(map(len, trees)) < 5


def test_idle_rows_are_left_alone(mild, opened, contexts_of):
    """Rows 0 and 2 of four are live; row 3 idles at the last position there is."""
    target = mild["llama"]
    session, prompts = opened(target, (9, 12, 5, 2000))
    session.rollback([8, 11, 4, 2047])
    contexts = contexts_of(session, prompts, Sampling())
    both = draft_to_exit([contexts[0], contexts[2]], 3, 4, Below(0.0))
    assert session.mark() == [8, 11, 4, 2047]
    for row, tree in zip((0, 2), both, strict=True):
        alone, prompt = opened(target, (9, 12, 5))
        (found,) = draft_to_exit(contexts_of(alone, prompt, Sampling())[row : row + 1], 3, 4, Below(0.0))
        assert tree.tokens.tolist() == found.tokens.tolist()
        torch.testing.assert_close(tree.resume.hidden, found.resume.hidden, **CLOSE)


def test_drafts_end_before_the_limit_and_an_error_rolls_back(mild, opened, contexts_of, monkeypatch):
    session, prompts = opened(mild["llama"], (9, 14))
    contexts = contexts_of(session, prompts, Sampling())
    contexts[0].limit, contexts[1].limit = 3, 1
    assert [len(tree) for tree in draft_to_exit(contexts, 3, 8, Below(0.0))] == [2, 2]  # the loop cuts row 1
    contexts[0].limit = 1
    assert [len(tree) for tree in draft_to_exit(contexts, 3, 8, Below(0.0))] == [0, 0]
    contexts[0].limit = 9
    monkeypatch.setattr(mild["llama"], "logits", lambda hidden: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        draft_to_exit(contexts, 3, 8, Below(0.0))
    assert session.mark() == [8, 13]


# ---------------------------------------------------------------- verification


@pytest.mark.parametrize("lengths", [(9,), (9, 14, 5)])
def test_verification_from_an_exit_is_verification_from_the_start(lengths, mild, opened, contexts_of, forwards):
    """Ragged chains of one batch, states of blocks before and after the exit wanted: the same logits and states."""
    target, wants = mild["qwen3"], Wants((0, 2, 5))
    session, prompts = opened(target, lengths)
    contexts = contexts_of(session, prompts, Sampling())
    trees = draft_to_exit(contexts, 3, 4, Below(0.0), wants.blocks)
    trees = [tree.cut(4 - row) for row, tree in enumerate(trees)]
    tokens = torch.zeros(len(lengths), 5, dtype=torch.int64)
    for row, (context, tree) in enumerate(zip(contexts, trees, strict=True)):
        tokens[row, : len(tree) + 1] = torch.tensor([context.tokens[-1], *tree.tokens.tolist()])
    sees = torch.ones(5, 5, dtype=torch.bool).tril().expand(len(lengths), -1, -1)
    positions = torch.tensor(session.lengths)[:, None] + torch.arange(5)
    given = session, tokens, positions, sees, range(len(lengths))
    found = verify(*given, trees, wants)
    fresh = verify(*given, [Tree(tree.tokens, tree.parents) for tree in trees], wants)
    unlike = [replace(tree.resume, block=4) if row else tree.resume for row, tree in enumerate(trees)]
    others = verify(*given, [Tree(t.tokens, t.parents, resume=r) for t, r in zip(trees, unlike, strict=True)], wants)
    verify(*given, trees, Wants((1,)))  # which no draft kept
    verify(*given, trees, Wants((), (1,)))
    assert forwards[-5:] == [3, 0, 3 if len(lengths) == 1 else 0, 0, 0]
    for row, tree in enumerate(trees):
        mine = slice(len(tree) + 1)
        torch.testing.assert_close(found.logits[row, mine], fresh.logits[row, mine], **CLOSE)
        torch.testing.assert_close(others.logits[row, mine], fresh.logits[row, mine], **CLOSE)
        for layer in wants.blocks:
            torch.testing.assert_close(found.blocks[layer][row, mine], fresh.blocks[layer][row, mine], **CLOSE)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "four"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
def test_output_is_the_targets(method, prompts, sampling, mild, forwards):
    target = mild[FAMILIES[(len(prompts) + len(method)) % 4]]
    plain = generate(target, None, prompts, max_new_tokens=30, sampling=sampling)
    forwards.clear()
    drafted = generate(target, METHODS[method].build(target), prompts, max_new_tokens=30, sampling=sampling)
    assert drafted.tokens == plain.tokens
    assert drafted.rounds < plain.rounds  # some drafts were accepted
    assert set(forwards) <= {1, 3, 5}  # every verification of drafts went on from an exit
    assert forwards


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
@pytest.mark.parametrize("gamma", [1, 4])
def test_where_later_blocks_add_nothing_every_draft_is_right(sampling, gamma, flat):
    """Coupled draws: when sampling too. An exit before that is not."""
    limit = 3 * (gamma + 1)
    plain = generate(flat, None, PROMPTS, max_new_tokens=limit, sampling=sampling, eos_ids=())
    method = LayerSkipDecoding(exit=3, gamma=gamma).build(flat)
    drafted = generate(flat, method, PROMPTS, max_new_tokens=limit, sampling=sampling, eos_ids=())
    assert drafted.tokens == plain.tokens
    assert drafted.accept_lengths == [[gamma + 1] * 3] * 4
    early = LayerSkipDecoding(exit=1, gamma=gamma).build(flat)
    assert generate(flat, early, PROMPTS, max_new_tokens=limit, sampling=sampling, eos_ids=()).rounds > 3


def test_rows_that_end_leave_the_others_alone(mild):
    target = mild["llama"]
    plain = generate(target, None, PROMPTS, max_new_tokens=40, eos_ids=()).tokens
    ends = tuple({plain[0][2], plain[1][9], plain[2][17]})
    expected = generate(target, None, PROMPTS, max_new_tokens=40, eos_ids=ends).tokens
    assert len({len(row) for row in expected}) > 2
    for method in METHODS.values():
        assert generate(target, method.build(target), PROMPTS, max_new_tokens=40, eos_ids=ends).tokens == expected


def test_batch_invariant_decoding(mild_folders):
    """In bfloat16 too, every token is plain decoding's; where linear layers round by their shape it is refused."""
    half = load_target(mild_folders["llama"], dtype="bfloat16", device="cpu")
    if half.least_rows is None:
        with pytest.raises(UserError, match="batch_invariant"):
            generate(half, None, PROMPTS, max_new_tokens=20, batch_invariant=True)
        return
    plain = generate(half, None, PROMPTS, max_new_tokens=20, batch_invariant=True)
    method = replace(METHODS["layerskip"], batch_invariant=True).build(half)
    assert generate(half, method, PROMPTS, max_new_tokens=20, batch_invariant=True).tokens == plain.tokens


def test_beside_another_method_that_wants_earlier_states_verification_is_whole(mild, forwards):
    """As within a composite: the loop is asked for more than the drafts brought."""
    target = mild["llama"]
    inner = METHODS["layerskip"].build(target)

    class Wanting(BaseProposer):
        def begin(self, contexts):
            inner.begin(contexts)

        def wants(self, contexts):
            return Wants((1, 6))

        def propose(self, contexts):
            return inner.propose(contexts)

        def observe(self, verdicts):
            assert all({1, 6} == set(verdict.context.blocks) for verdict in verdicts)
            inner.observe(verdicts)

    plain = generate(target, None, PROMPTS, max_new_tokens=12)
    forwards.clear()
    assert generate(target, Wanting(), PROMPTS, max_new_tokens=12).tokens == plain.tokens
    assert set(forwards) == {0}


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(("name", "settings"), [("layerskip", LayerSkipDecoding()), ("del", DelDecoding())])
def test_the_yaml_repeats_the_defaults(name, settings):
    content = yaml.safe_load((conf_dir() / f"decoding/{name}.yaml").read_text(encoding="utf-8"))
    assert content.pop("_target_") == f"specwave.skipping.{type(settings).__name__}"
    assert content == asdict(settings)
    assert settings.label == name


def test_an_exit_is_a_number_of_blocks_or_a_share_of_them():
    assert [exit_block(share, 8, "key") for share in (0.01, 0.25, 0.5, 0.7, 0.99)] == [1, 2, 4, 6, 7]
    assert [exit_block(share, 30, "key") for share in (0.25, 1, 29)] == [8, 1, 29]
    assert exit_block(0.5, 2, "key") == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LayerSkipDecoding(gamma=0), "decoding.gamma=0: must be 1 to 64"),
        (lambda: LayerSkipDecoding(gamma=65), "decoding.gamma=65: must be 1 to 64"),
        (lambda: LayerSkipDecoding(exit=0), "decoding.exit=0: a number of blocks"),
        (lambda: LayerSkipDecoding(exit=-1), "decoding.exit=-1: a number of blocks"),
        (lambda: LayerSkipDecoding(exit=2.5), "decoding.exit=2.5: a number of blocks"),
        (lambda: LayerSkipDecoding(exit=float("nan")), "decoding.exit=nan: a number of blocks"),
        (lambda: LayerSkipDecoding(exit=float("inf")), "decoding.exit=inf: a number of blocks"),
        (lambda: LayerSkipDecoding(stop=1.5), "decoding.stop=1.5: is a probability"),
        (lambda: DelDecoding(gamma=0), "decoding.gamma=0: must be 1 to 64"),
        (lambda: DelDecoding(decay=1.5), "decoding.decay=1.5: must be 0"),
        (lambda: DelDecoding(exits=[]), "decoding.exits=[]: numbers of blocks"),
        (lambda: DelDecoding(exits=[0, 3]), "decoding.exits=[0, 3]: numbers of blocks"),
    ],
)
def test_bad_settings_are_user_errors(make, words):
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value).startswith(words)


def test_the_plan_lies_beside_the_answers(tiny, tmp_path):
    LayerSkipDecoding(exit=3, gamma=4).build(tiny).report(tmp_path)
    plan = read_plan(tmp_path / "plan.json", 8, 1)
    assert (plan.kept, plan.gamma) == ((True,) * 6 + (False,) * 10, 4)


def test_an_exit_beyond_the_target_is_a_user_error(tiny, five):
    rule = "an exit leaves out a block at least: 1 to 7 of 8 may run"
    for block in (8, 9, 300):
        with pytest.raises(UserError) as caught:
            LayerSkipDecoding(exit=block).build(tiny)
        assert str(caught.value) == f"decoding.exit={block}: {rule}"
    with pytest.raises(UserError, match=r"decoding\.exits=8: an exit leaves out"):
        DelDecoding(exits=[2, 8]).build(tiny)
    assert LayerSkipDecoding().build(tiny).settings == LayerSkipDecoding(exit=2)  # what it came to
    assert LayerSkipDecoding().build(five).settings.exit == 1


def test_evaluated_by_the_door(flat_folder, tmp_path):
    model = ModelConfig("flat", str(flat_folder), dtype="float32")
    config = EvaluateConfig(model=model, benchmark=Benchmark(), decoding=METHODS["del"], limit=1, max_new_tokens=16)
    (tmp_path / "run").mkdir()
    main(config, Run(tmp_path / "run"))
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["method"] == "del"
    assert results["overall"]["exact_match_rate"] == 1.0
    assert results["overall"]["tau"] > 2.0
    assert results["settings"]["decoding"]["stop"] == {"name": "midway", "decay": 0.95}
    plans = [json.loads(line) for line in (tmp_path / "run/plans.jsonl").read_text().splitlines()]
    assert plans
    assert all(sum(row["kept"]) in (2, 6, 10, 16) for row in plans)
