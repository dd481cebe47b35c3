"""The switches of EAGLE-3.1 and `norm_before_fc`: the same function in training, in decoding and in the file."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
import yaml
from safetensors.torch import load_file

from specwave.app.run import Run
from specwave.app.train import TrainConfig, main
from specwave.app.trainer import TrainerConfig
from specwave.artifacts import UserError, conf_dir
from specwave.data.samples import BuiltinData
from specwave.decoding import generate
from specwave.eagle import Eagle3 as Proposer
from specwave.eagle import load_drafter
from specwave.eagle.drafter import SWITCHES, DrafterConfig, Eagle3Drafter
from specwave.eagle.engines import engine_config
from specwave.eagle.export import TargetFacts, read_drafter, write_drafter
from specwave.eagle.frozen import FrozenDrafter
from specwave.eagle.loss import ttt_loss
from specwave.eagle.options import Eagle3
from specwave.eagle.reference import ttt_loss_reference, unrolled_logits
from specwave.eagle.vocab import build_vocab_map
from specwave.target import ModelConfig

FACTS = TargetFacts("tiny", "f" * 64, 6)
ONE_LAYER = [("fc_norm",), ("norm_output",), ("fc_norm", "norm_output")]
EVERY = [(), *ONE_LAYER, ("norm_before_fc",), ("norm_before_fc", "norm_output")]
every = pytest.mark.parametrize("on", EVERY, ids=lambda on: "+".join(on) or "plain")


def switched(case, on):
    """The case with another drafter, of random weights, those of its norms too."""
    config = replace(case.drafter.config, **dict.fromkeys(on, True))
    drafter = Eagle3Drafter(config, case.drafter.d2t, case.drafter.t2d).to(case.drafter.dtype)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    case.drafter = drafter
    return case


def on_target(target, on, layers=(1, 4, 6)):
    """A drafter of random weights for a target."""
    d2t, t2d = build_vocab_map(torch.randint(0, 9, (target.vocab_size,)), 200)
    drafter = Eagle3Drafter(DrafterConfig.of_target(target.arch, layers, 200, **dict.fromkeys(on, True)), d2t, t2d)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    return drafter


def step(drafter, states, embedding):
    """(state handed on, logits) of one step in which a slot attends to itself."""
    positions = torch.arange(embedding.shape[1])[None]
    share = drafter.config.num_heads // drafter.config.num_kv_heads
    own = drafter.fuse([states[layer] for layer in drafter.config.layers])
    handed = drafter.forward_step(embedding, own, lambda q, k, v: v.repeat_interleave(share, 1), positions)
    return handed, drafter.logits(handed)


# ---------------------------------------------------------------- the function


def scaled(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


@every
def test_by_its_formula(make_case, on):
    """What the switches change of a plain drafter with the same weights: what fc reads, and what is handed on."""
    case = switched(make_case((0, 2, 5), (6,)), on)
    drafter, w = case.drafter, case.drafter.state_dict()
    parts, joined = list(case.states.values()), torch.cat(list(case.states.values()), -1)
    if "fc_norm" in on:
        joined = torch.cat([scaled(part, w[f"fc_norm.{place}.weight"]) for place, part in enumerate(parts)], -1)
    if "norm_before_fc" in on:
        joined = scaled(joined, w["input_norm.weight"])
    torch.testing.assert_close(drafter.fuse(parts), joined @ w["fc.weight"].T, rtol=1e-12, atol=1e-12)

    plain = Eagle3Drafter(replace(drafter.config, **dict.fromkeys(SWITCHES, False)), drafter.d2t, drafter.t2d).double()
    plain.load_state_dict({name: w[name] for name in plain.state_dict()})
    plain.fuse = drafter.fuse
    handed, logits = step(drafter, case.states, case.embedding[case.ids])
    before, expected = step(plain, case.states, case.embedding[case.ids])
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)  # of one step; later ones read `handed`
    if "norm_output" in on:
        before = scaled(before, w["norm.weight"])
    torch.testing.assert_close(handed, before, rtol=1e-12, atol=1e-12)


@every
def test_names_and_shapes_of_the_engines(make_case, on):
    """vLLM 0.32 and SGLang 0.5.23 read `fc_norm.{i}.weight` and, of norm_before_fc, `input_norm.weight`."""
    plain = make_case().drafter.state_dict()
    found = switched(make_case(), on).drafter.state_dict()
    added = {name: tuple(tensor.shape) for name, tensor in found.items() if name not in plain}
    expected = {}
    if "fc_norm" in on:
        expected = {"fc_norm.0.weight": (12,), "fc_norm.1.weight": (12,)}
    if "norm_before_fc" in on:
        expected = {"input_norm.weight": (24,)}
    assert added == expected
    assert plain.keys() <= found.keys()


# ---------------------------------------------------------------- training and decoding


@pytest.mark.parametrize(
    ("layers", "on"), [*(((0, 2, 5), on) for on in EVERY), *(((3,), on) for on in ONE_LAYER)], ids=str
)
def test_the_path_used_equals_the_plain_loops(make_case, layers, on):
    """Value and gradient of every parameter, four steps deep; float64, so only the order of sums may differ."""
    case = switched(make_case(layers, (9, 12, 7)), on)
    expected = ttt_loss_reference(case.drafter, case.ids, case.answer, case.states, case.embedding, case.logits, 4)
    got = ttt_loss(case.drafter, case.batch(), 4)
    torch.testing.assert_close(got.losses, expected.losses, rtol=1e-12, atol=1e-12)
    assert torch.equal(got.hits, expected.hits)
    names, parameters = zip(*case.drafter.named_parameters(), strict=True)
    gradients = (torch.autograd.grad(outcome.loss, parameters) for outcome in (got, expected))
    for name, have, want in zip(names, *gradients, strict=True):
        assert want.abs().max() > 0, name
        torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-12, msg=name)


class Read(Proposer):
    """Keeps, per round, the context's tokens, the drafts and the logits that they were taken from."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.rounds, self.scored, score = [], [], self.drafter.logits
        self.drafter.logits = lambda hidden: self.scored.append(score(hidden)) or self.scored[-1]

    def propose(self, contexts):
        self.scored = []
        trees = super().propose(contexts)
        self.rounds += [
            (
                list(context.tokens),
                tree.tokens.tolist(),
                [logits[self.places[context.row], 0] for logits in self.scored],
            )
            for context, tree in zip(contexts, trees, strict=True)
        ]
        return trees


@every
def test_a_server_reads_the_logits_of_training(tiny, on):
    """A chain drafted with a cache, round after round, against the steps of training unrolled on the same tokens.

    Slot t = n − 2 of n known tokens is the chain's; at step s it reads draft s. Float32, sums in another order.
    """
    drafter = on_target(tiny, on)
    proposer = Read(drafter, tiny, levels=4)
    generate(tiny, proposer, [[5, 9, 200, 31, 7, 7, 80], [300, 12, 12, 8]], max_new_tokens=10, eos_ids=())
    assert len(proposer.rounds) > 10
    with torch.no_grad():
        for tokens, drafts, read in proposer.rounds:
            ids = torch.tensor([tokens + drafts])
            states = tiny.states(ids, drafter.config.layers)
            whole = [states[layer][0] for layer in drafter.config.layers]
            unrolled = unrolled_logits(drafter, whole, tiny.embed(ids)[0], 4)
            for depth, logits in enumerate(read):
                torch.testing.assert_close(logits, unrolled[depth][len(tokens) - 2], rtol=1e-4, atol=1e-4)


@every
def test_frozen_equals_plain(tiny, on):
    drafter = on_target(tiny, on)
    frozen = FrozenDrafter(drafter, tiny)
    states, embedding = (
        tiny.states(torch.tensor([[5, 9, 200, 31]]), (1, 4, 6)),
        tiny.embed(torch.tensor([[9, 200, 31, 7]])),
    )
    with torch.no_grad():
        for ours, theirs in zip(step(frozen, states, embedding), step(drafter, states, embedding), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # float32, packed products


# ---------------------------------------------------------------- the file


DEFAULT = """{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 12,
 "target_hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 4,
 "num_key_value_heads": 2, "head_dim": 6, "hidden_act": "silu", "attention_bias": false, "mlp_bias": false,
 "rms_norm_eps": 1e-05, "max_position_embeddings": 64, "rope_theta": 100.0, "rope_scaling": null,
 "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "vocab_size": 23, "draft_vocab_size": 9,
 "tie_word_embeddings": false, "norm_before_residual": false, NEW "num_aux_hidden_states": 2,
 "eagle_aux_hidden_state_layer_ids": [2, 5],
 "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4], "use_aux_hidden_state": true},
 "torch_dtype": "bfloat16"}"""


@every
def test_config_of_the_engines(make_case, on):
    """Beside what plain EAGLE-3 always wrote, byte for byte, the three switches, those that are off too."""
    said = json.dumps({name: name in on for name in ("fc_norm", "norm_output", "norm_before_fc")})[1:-1]
    expected = DEFAULT.replace("\n", "").replace("NEW", f"{said},")
    config = switched(make_case((1, 4)), on).drafter.config
    assert json.dumps(engine_config(config, (1, 4), torch.bfloat16)) == expected


@pytest.mark.parametrize(
    ("layers", "on"),
    [*(((1, 4), on) for on in EVERY), *(((layer,), on) for layer in (0, 3, 5) for on in ONE_LAYER)],
    ids=str,
)
def test_round_trip(make_case, tmp_path, layers, on):
    """Read back it is the same drafter; the file, padding included, computes the same logits."""
    case = switched(make_case(layers, dtype=torch.float32), on)
    drafter = case.drafter
    write_drafter(tmp_path, drafter, FACTS, dtype=torch.float32)
    config, tensors, card = read_drafter(tmp_path)
    assert config == drafter.config
    assert card["switches"] == {name: name in on for name in SWITCHES}
    assert tensors.keys() == drafter.state_dict().keys()
    assert all(torch.equal(value, tensors[name]) for name, value in drafter.state_dict().items())

    written = json.loads((tmp_path / "config.json").read_text())["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert len(written) == max(2, len(layers))
    engine = Eagle3Drafter(replace(config, layers=tuple(written)))
    engine.load_state_dict(load_file(tmp_path / "model.safetensors"))
    embedding = case.embedding[case.ids]
    states = {layer: case.states.get(layer, 100 * torch.randn_like(embedding)) for layer in written}
    for ours, theirs in zip(step(engine, states, embedding), step(drafter, states, embedding), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # 12 more zeros in each sum of fc


@pytest.mark.parametrize("on", ONE_LAYER, ids="+".join)
def test_a_padded_folder_decodes_the_same(tiny, tmp_path, on):
    drafter = on_target(tiny, on, (5,))
    write_drafter(tmp_path, drafter, TargetFacts(tiny.name, tiny.fingerprint, tiny.num_layers), dtype=torch.float32)
    direct, again = Read(drafter, tiny, levels=3), Read(load_drafter(tmp_path, tiny).drafter, tiny, levels=3)
    for proposer in (direct, again):
        generate(tiny, proposer, [5, 9, 200, 31], max_new_tokens=8, eos_ids=())
    assert [drafts for _, drafts, _ in direct.rounds] == [drafts for _, drafts, _ in again.rounds]


def rewrite(path, change):
    whole = json.loads(path.read_text())
    change(whole)
    path.write_text(json.dumps(whole))


def test_a_folder_from_before_the_switches_is_plain(make_case, tmp_path):
    drafter = make_case((3,), dtype=torch.float32).drafter
    write_drafter(tmp_path, drafter, FACTS, dtype=torch.float32)
    rewrite(tmp_path / "config.json", lambda file: [file.pop(name) for name in SWITCHES])
    rewrite(tmp_path / "card.json", lambda file: file.pop("switches"))
    assert read_drafter(tmp_path)[0] == drafter.config


@pytest.mark.parametrize(
    ("on", "change", "words"),
    [
        (("norm_output",), {"norm_output": False}, "config.json has .*'norm_output': False.*, card.json .*True"),
        (("norm_output",), {"norm_output": None}, "config.json has .*'norm_output': None"),
        ((), {"norm_output": True}, "'norm_output': True.*: export it again"),
    ],
)
def test_a_switch_that_got_lost_is_refused(make_case, tmp_path, on, change, words):
    """Tensors do not tell whether `norm_output` was trained: config.json and card.json must agree."""
    write_drafter(tmp_path, switched(make_case((1, 4)), on).drafter, FACTS)
    rewrite(tmp_path / "config.json", lambda file: file.update(change))
    with pytest.raises(UserError, match=words):
        read_drafter(tmp_path)


def test_both_norms_in_a_file_are_refused(make_case, tmp_path):
    write_drafter(tmp_path, switched(make_case((1, 4)), ("fc_norm",)).drafter, FACTS)
    rewrite(tmp_path / "config.json", lambda file: file.update(norm_before_fc=True))
    rewrite(tmp_path / "card.json", lambda file: file["switches"].update(norm_before_fc=True))
    with pytest.raises(UserError, match=r"checkpoint=.*excludes drafter.fc_norm"):
        read_drafter(tmp_path)


def test_norms_that_are_missing_are_refused(make_case, tmp_path):
    write_drafter(tmp_path, make_case((1, 4)).drafter, FACTS)
    rewrite(tmp_path / "config.json", lambda file: file.update(fc_norm=True))
    rewrite(tmp_path / "card.json", lambda file: file["switches"].update(fc_norm=True))
    with pytest.raises(UserError, match=r"lacks fc_norm\.0\.weight"):
        read_drafter(tmp_path)


# ---------------------------------------------------------------- the configuration


def training(folder, **options) -> TrainConfig:
    """A short training of a tiny target."""
    model = ModelConfig("tiny", str(folder), dtype="float32", device="cpu")
    data, trainer = BuiltinData(limit=8, validation=2, max_new_tokens=8), TrainerConfig(max_steps=2)
    logger = partial(pl.loggers.CSVLogger, name="", version="")
    return TrainConfig(model, data, Eagle3(**options), trainer, logger, groups=[[2, 4]])


def test_every_drafter_key_arrives(family_folders, tmp_path):
    """Automodel#2897: keys set in YAML never reached the draft's config, and a plain EAGLE-3 was trained."""
    keys = yaml.safe_load((conf_dir() / "drafter/eagle3.yaml").read_text(encoding="utf-8"))
    assert keys.pop("_target_") == "specwave.eagle.options.Eagle3"
    assert set(SWITCHES) <= keys.keys()
    for on in (("fc_norm", "norm_output"), ("norm_before_fc",)):
        changed = dict.fromkeys(on, True) | {"draft_vocab_size": 77, "export_dtype": "float32"}
        config, folder = training(family_folders["llama"], **(keys | changed)), tmp_path / "-".join(on)
        main(config, SimpleNamespace(folder=folder, resume=False, main=True, say=lambda _: None, note=lambda **_: None))
        folder = folder / "drafters" / "+".join(["L2-4", *on])
        written = yaml.safe_load((folder / "config.json").read_text())
        assert {name: written[name] for name in SWITCHES} == {name: name in on for name in SWITCHES}
        assert (written["draft_vocab_size"], written["torch_dtype"]) == (77, "float32")
        described, tensors, card = read_drafter(folder)
        assert asdict(config.drafter).items() <= card["training"].items()
        built = Eagle3Drafter(described)
        built.load_state_dict(tensors)
        assert built.config.switches == {name: name in on for name in SWITCHES}
        assert len(built.fc_norm) == (2 if "fc_norm" in on else 0)
        assert ("input_norm.weight" in tensors) == ("norm_before_fc" in on)
        assert built.lm_head.weight.shape[0] == 77


def refused(make) -> str:
    with pytest.raises(UserError) as caught:
        make()
    return str(caught.value)


def test_what_cannot_be_served_is_refused(family_folders, tiny, tmp_path):
    said = refused(lambda: Eagle3(fc_norm=True, norm_before_fc=True))
    assert said.startswith("drafter.norm_before_fc=True: must be false where drafter.fc_norm is true")
    both = {"fc_norm": True, "norm_before_fc": True}
    said = refused(lambda: DrafterConfig.of_target(tiny.arch, (1, 4), 99, **both))
    assert said.startswith("drafter.norm_before_fc=true: excludes drafter.fc_norm")
    config = training(family_folders["llama"], norm_before_fc=True)
    config.groups = [[1, 4], [5]]
    said = refused(lambda: main(config, Run(tmp_path / "run")))
    assert said == (
        "drafter.norm_before_fc=true: SGLang serves one layer (5) as two, and one norm over two is another function: "
        "set drafter.fc_norm=true in its place, which is the same for one layer"
    )


def test_for_one_layer_either_norm_is_the_same(make_case):
    """What the refusal above advises. Where the widths differ SGLang reads one layer as it is: nothing is refused."""
    narrow = replace(make_case((3,)).drafter.config, target_hidden_size=8)
    one, other = (Eagle3Drafter(replace(narrow, **{name: True})) for name in ("norm_before_fc", "fc_norm"))
    weights = {name.replace("input_norm", "fc_norm.0"): value for name, value in one.state_dict().items()}
    torch.nn.init.normal_(weights["fc_norm.0.weight"])
    other.load_state_dict(weights)
    state = torch.randn(1, 4, 8)
    assert torch.equal(one.fuse([state]), other.fuse([state]))
