"""What passes between the doors: files that are whole or absent, and the mistakes a user can make with them.

Imports nothing else of specwave, so every room may use it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LAYER_CONVENTION = "block_output"  # layer l is the output of decoder block l, before the final norm
SCHEMA = 1
_LITTLE = 2**20  # bytes free where a failed write has filled a disk


class UserError(Exception):
    """A mistake of the user: printed as one line, exit code 2.

    Args:
        key: the config key, or the file (with its line), that is wrong.
        value: what was given.
        remedy: the rule that is broken and what to do, as a clause that follows "key=value: ".
    """

    def __init__(self, key: str, value: Any, remedy: str):
        super().__init__(f"{key}={value}: {remedy}")
        self.key, self.value, self.remedy = key, value, remedy


def filled(old: Any, new: Any) -> Any:
    """`old` with the keys that it lacks taken from `new`; in dicts within both, too."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return old
    kept = {key: filled(value, new.get(key)) for key, value in old.items()}
    return kept | {key: value for key, value in new.items() if key not in old}


# ---------------------------------------------------------------- places


def conf_dir() -> Path:
    """The folder of configs: inside the installed package, or the checkout's `conf/`."""
    return _shipped("conf", "select.yaml")


def assets_dir() -> Path:
    """The folder of trained drafters that come along: inside the installed package, or the checkout's `assets/`."""
    return _shipped("assets", "README.md")


def _shipped(name: str, holds: str) -> Path:
    here = Path(__file__).resolve().parent
    for folder in (here / name, here.parents[1] / name):
        if (folder / holds).is_file():
            return folder
    raise RuntimeError(f"the {name}/ folder is missing from this installation of specwave")


def cache_dir() -> Path:
    """The user's cache for what can be remade: `$SPECWAVE_CACHE`, or `specwave` in the XDG cache folder."""
    base = os.environ.get("SPECWAVE_CACHE")
    if base is None:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "specwave")
    return Path(base)


@contextlib.contextmanager
def filling_cache() -> Iterator[None]:
    """Around work that must write into the cache: a cache that cannot be written is the user's to mend."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = f"the cache cannot be written there ({reason}): set SPECWAVE_CACHE to a folder with room"
        raise UserError("SPECWAVE_CACHE", cache_dir(), remedy) from None


# ---------------------------------------------------------------- whole files


def _replace(path: Path, write: Any) -> None:
    """Write beside `path`, flush to disk, rename: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    try:
        write(temporary)
        with open(temporary, "rb+") as stream:
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except Exception as error:
        if isinstance(error, OSError) or shutil.disk_usage(path.parent).free > _LITTLE:
            raise
        # torch and safetensors do not say why a write failed
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def write_text(path: Path | str, text: str) -> None:
    _replace(Path(path), lambda name: Path(name).write_text(text, encoding="utf-8"))


def write_json(path: Path | str, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_tensors(path: Path | str, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file; tensors are made contiguous and unshared first."""
    from safetensors.torch import save_file  # with torch, seconds to import: not for a typo's sake

    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    _replace(Path(path), lambda name: save_file(whole, name, metadata=metadata))


def write_torch(path: Path | str, content: Any) -> None:
    """`torch.save`, whole or absent."""
    import torch

    _replace(Path(path), lambda name: torch.save(content, name))


FIGURE_STYLE: dict[str, Any] = {  # of what `write_figure` writes, for matplotlib's rc_context
    "font.size": 9,
    "axes.titlesize": 10,
    "figure.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "specwave",  # the same picture gives the same file
}


def write_figure(path: Path | str, figure: Any) -> list[Path]:
    """A matplotlib figure as `path`.png and `path`.svg (`path` has no suffix), the same file for the same picture."""
    finals = [Path(f"{path}.{kind}") for kind in ("png", "svg")]
    engine = figure.get_layout_engine()
    if engine is not None:  # laid out once; each file would do so again
        engine.execute(figure)
        figure.set_layout_engine("none")
    for final in finals:
        kind = final.suffix[1:]
        options = {"format": kind, "dpi": 200, "metadata": {"Date": None} if kind == "svg" else None}
        _replace(final, lambda name, options=options: figure.savefig(name, **options))
    return finals


def append_lines(stream: IO[str], rows: Iterable[dict[str, Any]]) -> None:
    """JSON objects as lines, in one write, on disk when this returns."""
    stream.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    stream.flush()
    os.fsync(stream.fileno())


def append_line(stream: IO[str], content: dict[str, Any]) -> None:
    """One JSON object as one line, on disk when this returns."""
    append_lines(stream, [content])


def drop_torn_line(path: Path) -> None:
    """Cut a last line without its newline, which a killed writer leaves behind."""
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with open(path, "rb+") as stream:
            stream.truncate(content.rfind(b"\n") + 1)


@contextlib.contextmanager
def reading(
    key: str, path: Path | str, remedy: str = "make it again, or name another", also: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Around code that takes a file apart: content of another shape than expected is the user's mistake, named by file.

    Never around anything but reading: it would take a bug for a damaged file. `also`: errors of the file's own reader.
    """
    shapeless: tuple[type[Exception], ...] = (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        EOFError,
        *also,
    )
    try:
        yield
    except shapeless as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}"
        raise UserError(key, path, f"the file is damaged or of another kind ({reason[:200]}); {remedy}") from None


def read_json(path: Path | str, key: str) -> dict[str, Any]:
    """A JSON object; `key` is the config key that named the file."""
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(key, path, "there is no such file: check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(key, path, f"the file cannot be read ({error})") from None
    except json.JSONDecodeError as error:
        raise UserError(key, path, f"line {error.lineno} is not JSON ({error.msg}): make the file again") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise UserError(key, path, f"the file is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(key, path, "a JSON object is expected")
    return content


def is_whole(text: str) -> bool:
    """Whether UTF-8 can hold it: JSON may escape half of a surrogate pair, which neither tokenisers nor files take."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def read_jsonl(path: Path | str, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of a JSON-lines file; blank lines are passed over; an empty file is refused."""
    path, seen = Path(path), False
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(key, path, "there is no such file: check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(key, path, f"the file cannot be read ({error})") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                key, f"{path}:{number}", f"this line is not JSON ({error.msg}): mend or remove it"
            ) from None
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
            raise UserError(key, f"{path}:{number}", f"this line is not JSON ({error})") from None
        if not isinstance(row, dict):
            raise UserError(key, f"{path}:{number}", "each line must be a JSON object")
        seen = True
        yield number, row
    if not seen:
        raise UserError(key, path, "the file is empty: name one with a JSON object on each line")


# ---------------------------------------------------------------- numbers, layers and selections


def check_seed(key: str, seed: int) -> None:
    """Seeds are 0 … 2³²−1."""
    if not 0 <= seed < 2**32:
        raise UserError(key, seed, "must be in 0 … 2³²−1")


def check_layers(layers: Sequence[int], num_layers: int, key: str) -> tuple[int, ...]:
    """Sorted layer ids in 0…N−1, each once; refuses anything else."""
    listed = list(layers)
    if not listed:
        raise UserError(key, "[]", "name at least one layer")
    for layer in listed:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise UserError(key, listed, f"layers are whole numbers, got {layer!r}")
        if not 0 <= layer < num_layers:
            raise UserError(key, listed, f"layer {layer} is unknown: the model has layers 0 to {num_layers - 1}")
    if len(set(listed)) != len(listed):
        raise UserError(key, listed, "a layer appears twice: name each layer once")
    return tuple(sorted(listed))


@dataclass
class Selection:
    """`selection.json`: what `select.py` found and how. Entropies are in nats."""

    model: str
    fingerprint: str
    num_layers: int
    selector: str
    m: int
    layers: list[int]
    entropy: float
    beam: list[dict[str, Any]]
    layer_entropy: list[float]
    transitions: list[float]
    calibration: dict[str, Any]
    layer_convention: str = LAYER_CONVENTION
    schema: int = SCHEMA
    settings: dict[str, Any] = field(default_factory=dict)
    optimum: dict[str, Any] | None = None  # the best of all sets of this size, where it was computed
    score: float | None = None  # of `layers`, where something else than the entropy ranks; `beam` has the others'
    proxy: dict[str, Any] | None = None  # how well layers foretell the target's next step, where that was measured
    rerank: dict[str, Any] | None = None  # the training whose τ̂ put the beam in order, where one did

    def save(self, path: Path | str) -> None:
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path | str, key: str = "selection") -> Selection:
        """Reads a selection file, or `selection.json` of a run folder."""
        path = Path(path)
        path = path / "selection.json" if path.is_dir() else path
        content = read_json(path, key)
        required = ("num_layers", "layers", "beam", "layer_convention")
        missing = [name for name in required if name not in content]
        if missing:
            raise UserError(key, path, f"not a selection: it lacks {', '.join(missing)}")
        if content["layer_convention"] != LAYER_CONVENTION:
            raise UserError(
                key, path, f"its layer_convention is {content['layer_convention']!r}, {LAYER_CONVENTION!r} is read"
            )
        if content.get("schema") != SCHEMA:
            raise UserError(key, path, f"its schema is {content.get('schema')!r}, {SCHEMA} is read: select again")
        known: dict[str, Any] = {entry.name: content.get(entry.name) for entry in fields(cls)}
        chosen = cls(**known)
        with reading(key, path, "select again"):
            chosen.layers = list(check_layers(chosen.layers, chosen.num_layers, f"{key}:{path}"))
            for entry in chosen.beam:
                check_layers(entry["layers"], chosen.num_layers, f"{key}:{path}")
        return chosen

    def groups(self, top: int) -> list[tuple[int, ...]]:
        """The `top` best groups of the beam, best first."""
        ranked = [tuple(self.layers)] + [tuple(entry["layers"]) for entry in self.beam]
        return list(dict.fromkeys(ranked))[:top]


def group_name(layers: Iterable[int], switches: Mapping[str, bool] | None = None) -> str:
    """The folder name of a layer group, with the drafter's switches that are on: (2, 15, 27) → "L2-15-27",
    with fc_norm "L2-15-27+fc_norm"."""
    return "+".join(["L" + "-".join(map(str, layers)), *(name for name, on in (switches or {}).items() if on)])
