"""Composition, types, targets: what is refused, with which words, and what `main` gets in the end."""

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import DictConfig, ListConfig

from specwave.app import complaints
from specwave.app import config as configs
from specwave.app.complaints import closest
from specwave.app.usage import keys_of
from specwave.artifacts import UserError, conf_dir
from specwave.target import ModelConfig


def checked(*overrides):
    return configs.check("toy", configs.compose("toy", overrides))


def built(*overrides):
    return configs.build("toy", checked(*overrides))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("part.k_bem=3", "part.k_bem=3: there is no such key; did you mean part.k_beam?"),
        ("k_beam=3", "k_beam=3: there is no such key; did you mean part.k_beam?"),
        ("prt.m=3", "prt.m=3: there is no such key; did you mean part.m?"),
        ("prt=plain", "prt=plain: there is no such key; did you mean part?"),
        ("+part.ratee=1", "part.ratee=1: there is no such key; did you mean part.rate?"),
        ("++part.inner.dept=1", "part.inner.dept=1: there is no such key; did you mean part.inner.depth?"),
        ("+nedeed=1", "nedeed=1: there is no such key; did you mean needed?"),
        ("~part.k_bem", "part.k_bem=: there is no such key; did you mean part.k_beam?"),
        ("hydra.run.dirr=x", "hydra.run.dirr=x: there is no such key; did you mean hydra.run.dir?"),
        ("part=plane", "part=plane: there is no such option; did you mean plain? choose one of open, plain"),
        ("part=null", "part=null: there is no such option; choose one of open, plain"),
        ("hydra/launcher=basik", "did you mean basic?"),
        ("strange=one", "strange=one: toy makes no such choice; it chooses other, part"),
        ("part=plain,open", "part=plain,open: several values: add -m"),
        ("part.m=1,2", "part.m=1,2: several values: add -m to run one job for each, or write part.m=[1,2]"),
        ("+part=plain", "part=plain: this choice is made already"),
        ("+part.m=4", "part.m=4: this key exists already: leave out the +"),
        ("part.m=[1", "part.m=[1: this value cannot be read"),
        ("part.m", "override=part.m: an override is written key=value"),
        ("=3", "an override is written key=value"),
        ("part.m=abc", "part.m=abc: a whole number is expected"),
        ("part.m=2.5", "part.m=2.5: a whole number is expected"),
        ("part.m=true", "part.m=true: a whole number is expected"),
        ("part.m=null", "part.m=null: a whole number is expected"),
        ("part.rate=fast", "part.rate=fast: a number is expected"),
        ("part.flag=maybe", "part.flag=maybe: true or false is expected"),
        ("part.note=[1]", "part.note=[1]: a text or null is expected"),
        ("part.layers=[1,x]", "part.layers=[1, 'x']: a list [a whole number, …] is expected"),
        ("part.groups=[1]", "part.groups=[1]: a list [a list [a whole number, …], …] or null is expected"),
        ("part.inner.depth=x", "part.inner.depth=x: a whole number is expected"),
        (
            "part.kind=fancey",
            "part.kind=fancey: there is no such option; did you mean fancy? choose one of plain, fancy",
        ),
        ("part.m=${nowhere}", "part.m=${…}: this reference leads nowhere"),
        ("~part", "part=???: has no value yet"),
        ("part.m=0", "part.m=0: must be at least 1"),
        ("seed=-1", "seed=-1: must be in 0"),
        ("seed=x", "seed=x: a whole number is expected"),
        ("resume=perhaps", "resume=perhaps: true or false is expected"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(toy, override, words):
    with pytest.raises(UserError) as caught:
        built(override)
    assert words in str(caught.value)


def test_all_missing_keys_are_listed_at_once(toy):
    with pytest.raises(UserError) as caught:
        checked("part=open", "needed=???")
    assert str(caught.value).startswith("needed, part.m, part.rate=???: these keys have no value yet")


def test_a_broken_file_is_named_with_its_line(toy, toy_folder):
    broken = toy_folder / "conf/part/broken.yaml"
    broken.write_text("m: 3\nrate: [1\nkind: x\n")
    try:
        with pytest.raises(UserError, match=r"broken\.yaml:3: not YAML"):
            checked("part=broken")
    finally:
        broken.unlink()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("os.system", r"only specwave, .* allow_targets=\[os\]"),
        ("specwavex.thing", "only specwave"),
        ("specwave.artifacts.os.system", "only specwave"),  # the name is specwave's, the function is not
        ("torch.serialization.pickle.loads", "only specwave"),
        ("specwave.app.toy.Prt", "specwave.app.toy has no Prt"),
        ("specwave.nothing.Part", "specwave has no nothing"),
        ("specwave.artifacts.SCHEMA", "a class or function is expected"),
        ("import os; os.system", "a dotted name"),
        ("Part", "only specwave"),
    ],
)
def test_targets_outside_the_trusted_packages_are_refused(toy, target, words):
    with pytest.raises(UserError, match=words) as caught:
        configs.locate(target, "part._target_")
    assert caught.value.key == "part._target_"


def test_a_refused_target_is_never_imported(toy, tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="only specwave"):
        checked("other=linear", "other._target_=trap.Linear")


def test_allow_targets_vouches_for_a_package(toy):
    overrides = ("other=linear", "other._target_=fractions.Fraction")
    with pytest.raises(UserError, match=r"allow_targets=\[fractions\]"):
        checked(*overrides)
    found = built(*overrides, "allow_targets=[fractions]", "~other.in_features", "~other.out_features")
    assert found.other() == 0


def test_the_error_of_a_module_that_fails_to_import_is_its_own(toy, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("import there_is_no_such_thing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_thing"):
        configs.locate("broken_module.Thing", "other._target_", ("broken_module",))


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("selector.k_bem", ["selector.k_beam", "selector.m"], "selector.k_beam"),
        ("bach_size", ["data.batch_size", "seed"], "data.batch_size"),
        ("trainer.rate", ["data.rate", "trainer.lr", "trainers.rate"], "trainers.rate"),
        ("zzz", ["selector.m", "seed"], None),
        ("selector.q", ["selector.m", "seed"], None),  # a long common prefix alone is no likeness
    ],
)
def test_closest(name, known, found):
    assert closest(name, known) == found


# ---------------------------------------------------------------- what comes out


def test_values_are_converted_and_plain(toy):
    found = built(
        "part.m='7'", "part.rate=1", "part.flag=yes", "part.layers=[1,2]", "part.inner.window=[4,5]", "part.path=a/b",
        "part.note=3", "part.groups=[[1],[2,3]]", "other=nested", "part.kind=fancy",
    )  # fmt: skip
    part = found.part
    assert (part.m, part.rate, part.flag, part.layers, part.note) == (7, 1.0, True, [1, 2], "3")
    assert part.groups == [[1], [2, 3]]
    assert type(part.rate) is float
    assert part.path == Path("a/b")
    assert part.inner == toy.Inner(depth=1, window=(4, 5))
    assert found.other == {"list": [toy.Inner(depth=4)], "plain": [1, 2]}

    def walk(value):
        assert not isinstance(value, (DictConfig, ListConfig))
        if dataclasses.is_dataclass(value):
            value = vars(value)
        for entry in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
            walk(entry)

    walk(found)


def test_what_run_yaml_holds_builds_the_same_objects(toy):
    content = checked("part.layers=[1]", "part.path=x", "part.inner.window=[1,2]", "other=nested")
    again = yaml.safe_load(yaml.safe_dump(configs.plain(content)))
    assert configs.build("toy", again) == configs.build("toy", content)


def test_keys_left_out_get_the_dataclass_default(toy):
    assert checked("~part.m", "~part.inner")["part"] == checked()["part"]


def test_a_foreign_target_is_built_when_called(toy):
    layer = built("other=linear").other
    assert isinstance(layer, configs.Deferred)
    assert layer().weight.shape == (3, 2)
    assert layer(bias=False).bias is None
    with pytest.raises(UserError, match=r"other\.in_feature=2: there is no such key; did you mean other\.in_features"):
        built("other=linear", "+other.in_feature=2")


def test_plain():
    content = {"a": (1, 2), "b": Path("x"), "c": torch.tensor(2.5), "d": {3: None}, "e": torch.float32, "f": True}
    assert configs.plain(content) == {
        "a": [1, 2], "b": "x", "c": 2.5, "d": {"3": None}, "e": "torch.float32", "f": True
    }  # fmt: skip


# ---------------------------------------------------------------- every file of conf/

APPS = [app for app in ("select", "train", "evaluate") if (conf_dir() / f"{app}.yaml").is_file()]


def choices_of(app):
    """group → option of an app's defaults list."""
    defaults = yaml.safe_load((conf_dir() / f"{app}.yaml").read_text())["defaults"]
    named = {group: option for entry in defaults if isinstance(entry, dict) for group, option in entry.items()}
    return {group: option for group, option in named.items() if not group.startswith("override")}


def options():
    """(app, group, option) for every file below conf/, once for each app that makes the choice."""
    for path in sorted(conf_dir().glob("*/**/*.yaml")):
        group, option = path.parent.relative_to(conf_dir()).as_posix(), path.stem
        if group.startswith(("experiment", "hydra")) or option.startswith("_"):  # what options include is no option
            continue
        takers = [app for app in APPS if group in choices_of(app)]
        yield from ((app, group, option) for app in takers or [None])


def filled(app, *overrides):
    """The checked config, with some value for every key that a user must give."""
    composed = configs.compose(app, overrides)
    return configs.check(app, configs.compose(app, [*overrides, *(f"{key}=0" for key in configs.missing(composed))]))


@pytest.mark.parametrize(("app", "group", "option"), list(options()))
def test_every_option_is_chosen_by_some_app_and_builds(app, group, option):
    assert app is not None, f"no app chooses conf/{group}"
    content = filled(app, f"{group}={option}")
    configs.build(app, content)
    target = (content[group] or {}).get("_target_")
    found = configs.locate(target, group) if target else None
    if dataclasses.is_dataclass(found):  # `--help` shows every key there is, with nothing left to a hidden default
        assert set(keys_of(f"{group}/{option}")) == set(content[group]) - {"_target_"}


@pytest.mark.parametrize("app", APPS)
def test_yaml_and_dataclasses_have_the_same_defaults(app):
    content = filled(app)
    own = configs.config_class(app)
    assert_defaults(own, content, skip=set(choices_of(app)))
    homes = {}
    for group in choices_of(app):
        if group == "experiment":
            continue
        for option in complaints.options(group):
            node = filled(app, f"{group}={option}")[group]
            found = configs.locate(node["_target_"], group) if node and "_target_" in node else None
            if dataclasses.is_dataclass(found):
                homes.setdefault((group, found), []).append(node)
    for (_, found), nodes in homes.items():  # one option of each class repeats its defaults; others exist to differ
        errors = []
        for node in nodes:
            try:
                assert_defaults(found, node)
                break
            except AssertionError as error:
                errors.append(error)
        else:
            raise errors[0]


def assert_defaults(cls, node, skip=()):
    for entry in dataclasses.fields(cls):
        default = entry.default
        if entry.default_factory is not dataclasses.MISSING:
            default = entry.default_factory()
        required = default is dataclasses.MISSING or default == configs.MISSING
        if required or entry.name in skip or not entry.init:
            continue
        if dataclasses.is_dataclass(default):
            default = dataclasses.asdict(default)
        given = node[entry.name]
        given = {key: value for key, value in given.items() if key != "_target_"} if isinstance(given, dict) else given
        assert configs.plain(default) == given, f"{cls.__name__}.{entry.name}"


@pytest.mark.parametrize("path", sorted((conf_dir() / "model").glob("*.yaml")), ids=lambda path: path.stem)
def test_model_files_are_plain_yaml(path):
    text = path.read_text()
    assert "${" not in text
    assert set(yaml.safe_load(text)) == {"_target_", *(entry.name for entry in dataclasses.fields(ModelConfig))}


@pytest.mark.parametrize(
    ("function", "group", "option"),
    [
        ("specwave.layers.search.elsi", "selector", "elsi"),
        ("specwave.layers.entropy.matrix_entropy", "selector", "elsi"),
        ("specwave.layers.blocks.keep_positions", "calibration", "builtin"),
    ],
)
def test_pure_functions_repeat_the_defaults_of_their_yaml(function, group, option):
    parameters = inspect.signature(configs.locate(function, "function")).parameters
    settings = filled("select", f"{group}={option}")[group]
    shared = [key for key, entry in parameters.items() if entry.default is not entry.empty and key in settings]
    assert shared
    assert {key: parameters[key].default for key in shared} == {key: settings[key] for key in shared}
