"""Conversations from the package, from a file, from the hub, and from several of these by weight.

Knows nothing about tokens, selection or training. Everything is in the order of its source: no sampling by chance.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from specwave.artifacts import UserError
from specwave.data.conversations import Conversation, builtin_calibration_prompts
from specwave.data.turns import read_turns, whole

T = TypeVar("T")

_CHUNK = 1 << 22  # characters of a JSON list read at once: the public dumps are lists of 600 MB and more
_GAP = re.compile(r"[\s,]*")
_TABLES = (".parquet", ".arrow")
_NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # what `datasets` writes

# The public sets by name: dataset id and split.
SHAREGPT = ("Aeala/ShareGPT_Vicuna_unfiltered", "train")
ULTRACHAT = ("HuggingFaceH4/ultrachat_200k", "train_sft")

Rows = Iterable[tuple[int, str, Any]]  # number from 1, place as path:line, content


def builtin_conversations() -> list[Conversation]:
    """The 65 built-in calibration prompts: one question each, no answer."""
    return [Conversation((("user", text),), name, category) for name, category, text in builtin_calibration_prompts()]


# ---------------------------------------------------------------- files


def file_conversations(path: Path | str, key: str) -> list[Conversation]:
    """The conversations of a `.jsonl` file, or of a `.json` file that is a list; turns.py says which rows are read.

    Args:
        key: the config key that named the file.

    Raises:
        UserError: naming file and line, for what cannot be read; a file in which nobody asks anything.
    """
    path = Path(path).expanduser()
    return _conversations(_file_rows(path, key), path.stem, key, path)


def _file_rows(path: Path, key: str) -> Iterator[tuple[int, str, Any]]:
    try:
        with open(path, encoding="utf-8-sig") as stream:  # a byte order mark is no content
            head = blank = stream.read(1)
            while head.isspace():
                head = stream.read(1)
                blank += head
            if head == "[":
                yield from _list_rows(stream, 1 + blank.count("\n"), path, key)
            else:
                stream.seek(0)
                yield from _line_rows(stream, path, key)
    except FileNotFoundError:
        raise UserError(key, path, "there is no such file: check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(key, path, f"the file cannot be read ({error})") from None


def _line_rows(stream: IO[str], path: Path, key: str) -> Iterator[tuple[int, str, Any]]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, thousands of brackets
                raise _no_json(key, f"{path}:{number}", error) from None
            yield number, f"{path}:{number}", row


def _list_rows(stream: IO[str], line: int, path: Path, key: str) -> Iterator[tuple[int, str, Any]]:
    """The entries of a list, its bracket already read in line `line`: a chunk and an entry are in memory, not the file.

    Lenient about commas.
    """
    decoder = json.JSONDecoder()
    text, at, number, size = "", 0, 0, _CHUNK
    while True:
        start = at
        at = _GAP.match(text, start).end()  # type: ignore[union-attr] # it matches anywhere, nothing at least
        line += text.count("\n", start, at)
        if text.startswith("]", at):
            return
        try:
            row, end = decoder.raw_decode(text, at)
        except RecursionError as error:
            raise _no_json(key, f"{path}:{line}", error) from None
        except ValueError as error:  # an entry that ends beyond the chunk, or a fault
            more = stream.read(size)
            if more:
                text, at, size = text[at:] + more, 0, 2 * size  # doubled: an entry of any size is met in few attempts
                continue
            if at == len(text):
                raise UserError(
                    key, f"{path}:{line}", "the list is not closed, the file is cut off: fetch it again"
                ) from None
            raise _no_json(key, f"{path}:{line + text.count(chr(10), at, getattr(error, 'pos', at))}", error) from None
        number, size = number + 1, _CHUNK
        yield number, f"{path}:{line} (conversation {number})", row
        line += text.count("\n", at, end)
        at = end


def _no_json(key: str, where: str, error: Exception) -> UserError:
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    return UserError(key, where, f"this is not JSON ({reason}): mend or remove it")


def _conversations(rows: Rows, stem: str, key: str, source: Path | str) -> list[Conversation]:
    """Rows as conversations, with an id each that no other has."""
    kept: list[Conversation] = []
    taken: dict[str, int] = {}
    silent = 0
    for number, where, row in rows:
        messages = read_turns(row, key, where)
        if messages:
            name = _unique(_named(row, ("id", "question_id")) or f"{stem}-{number}", taken)
            kept.append(Conversation(messages, name, _named(row, ("category", "source"))))
        else:
            silent += 1
    if not kept:
        reason = f"in none of its {silent} conversations does a user say anything" if silent else "it is empty"
        raise UserError(key, source, f"{reason}: name a file with one conversation in each row")
    if silent:
        total = len(kept) + silent
        warnings.warn(f"{key}={source}: {silent} of {total} conversations without a user are passed over", stacklevel=3)
    return kept


def _named(row: dict[str, Any], names: Sequence[str]) -> str:
    """The first of these columns that holds a text or a whole number; "" when none does."""
    for name in names:
        value = row.get(name)
        if isinstance(value, int | str) and not isinstance(value, bool) and str(value).strip():
            return whole(str(value))
    return ""


def _unique(name: str, taken: dict[str, int]) -> str:
    """The name, or the name with the first free number behind it; the result is taken from then on."""
    free = name
    while free in taken:
        taken[name] += 1
        free = f"{name}#{taken[name]}"
    taken[free] = 1
    return free


# ---------------------------------------------------------------- hub


def hub_conversations(source: str, split: str, key: str) -> list[Conversation]:
    """The conversations of a local file or folder where `source` is one, else of a data set of the hub.

    Args:
        source: a path, `owner/name`, or `owner/name/file.json` for one file of a repository (ShareGPT's dumps).
        split: which split of a data set; of a folder, the files with it in their names, where there are any.
        key: the config key that named the source.

    Raises:
        UserError: naming key, source and remedy, when it is not here and cannot be fetched, or cannot be read.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder_conversations(path, split, key)
    if path.is_file():
        return _table_conversations([path], key, path) if path.suffix in _TABLES else file_conversations(path, key)
    group = key.partition(".")[0]
    remedy = f"download it elsewhere and give the local file: {key}=<path>, or use {group}=builtin"

    def fetch(call: Callable[[], Any]) -> Any:
        return _attempt(call, key, source, "neither a file here nor a data set that can be fetched", remedy)

    parts = source.split("/")
    if len(parts) > 2 and all(parts):
        from huggingface_hub import hf_hub_download

        repository, file = "/".join(parts[:2]), "/".join(parts[2:])
        local = Path(fetch(lambda: hf_hub_download(repository, file, repo_type="dataset")))
        return _table_conversations([local], key, source) if local.suffix in _TABLES else file_conversations(local, key)
    from datasets import load_dataset  # seconds to import

    table = fetch(lambda: load_dataset(source, split=split))
    return _conversations(_table_rows(table, f"{source}[{split}]"), parts[-1], key, source)


def _folder_conversations(folder: Path, split: str, key: str) -> list[Conversation]:
    """What `datasets` saved, else all tables, else all JSON files below the folder, in the order of their names."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        from datasets import load_from_disk  # seconds to import

        saved = _attempt(lambda: load_from_disk(str(folder)), key, folder, "not what datasets saves", "save it again")
        if isinstance(saved, dict):
            if split not in saved:
                raise UserError(key, folder, f"there is no split {split!r} in it, there are {', '.join(saved)}")
            saved = saved[split]
        return _conversations(_table_rows(saved, str(folder)), folder.name, key, folder)
    found = sorted(path for path in folder.rglob("*.*") if path.is_file() and path.name not in _NOT_ROWS)
    found = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    for kinds in (_TABLES, (".json", ".jsonl")):
        files = [path for path in found if path.suffix in kinds]
        files = [path for path in files if split in path.stem] or files
        if len(files) > 1:
            warnings.warn(f"{key}={folder}: {len(files)} files are read, {files[0].name} first", stacklevel=3)
        if files and kinds == _TABLES:
            return _table_conversations(files, key, folder)
        if files:
            rows = itertools.chain.from_iterable(_file_rows(path, key) for path in files)
            return _conversations(rows, folder.name, key, folder)
    raise UserError(key, folder, "the folder holds no .jsonl, .json or .parquet file: name one that does")


def _table_conversations(files: Sequence[Path], key: str, source: Path | str) -> list[Conversation]:
    from datasets import load_dataset  # seconds to import

    kind = files[0].suffix[1:]
    names = [str(path) for path in files if path.suffix == files[0].suffix]
    table = _attempt(
        lambda: load_dataset(kind, data_files=names, split="train"), key, source, f"not a {kind} file", "fetch it again"
    )
    return _conversations(_table_rows(table, str(source)), files[0].stem, key, source)


def _table_rows(table: Iterable[Any], place: str) -> Rows:
    return ((number, f"{place}:{number}", row) for number, row in enumerate(table, start=1))


def _attempt(call: Callable[[], Any], key: str, source: Path | str, rule: str, remedy: str) -> Any:
    try:
        return call()
    except Exception as error:  # the errors of the hub and of its readers are many: no network, no such id, gated
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(key, source, f"{rule} ({reason[:200].rstrip('. ')}); {remedy}") from None


# ---------------------------------------------------------------- choosing among them


def with_answers(found: list[Conversation]) -> list[Conversation]:
    """Without the few that public dumps hold unanswered. In a file of one's own they are refused: see `render`."""
    answered = [one for one in found if any(role == "assistant" for role, _ in one.messages)]
    if not 0 < len(answered) < len(found):
        return found
    missing = len(found) - len(answered)
    warnings.warn(f"{missing} of {len(found)} conversations have no answer: passed over", stacklevel=3)
    return answered


def spread(items: Sequence[T], count: int | None) -> list[T]:
    """`count` of the items, evenly spaced over the list; all of them for None or where there are not more."""
    if count is None or count >= len(items):
        return list(items)
    return [items[place * len(items) // count] for place in range(count)]


def check_weights(weights: Sequence[float], count_of_sources: int, key: str) -> None:
    """Refuses weights that are not numbers ≥ 0, one for each source, with 1 as their sum."""
    shown = list(weights)
    if len(shown) != count_of_sources:
        raise UserError(key, shown, f"{len(shown)} weights for {count_of_sources} sources: give one for each")
    for weight in shown:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise UserError(key, shown, f"weights are numbers ≥ 0, got {weight!r}")
    total = math.fsum(shown)
    if abs(total - 1) > 1e-6:
        raise UserError(key, shown, f"the weights must add up to 1, their sum is {total:g}")


def mix(
    parts: Sequence[Sequence[Conversation]], weights: Sequence[float], count: int, keys: Sequence[str]
) -> list[Conversation]:
    """`count` conversations of several sources, one source after the other, ids unique over all.

    Shares follow the weights by largest remainder (each is within 1 of weight · count; of equal remainders the earlier
    source is served), and within a source they are spread evenly.

    Args:
        weights: one for each part, as `check_weights` passes them.
        keys: what each part is called in messages.

    Raises:
        UserError: a source has fewer conversations than its share.
    """
    mixed: list[Conversation] = []
    taken: dict[str, int] = {}
    for part, share, weight, key in zip(parts, _shares(weights, count), weights, keys, strict=True):
        if share > len(part):
            raise UserError(
                key,
                f"{len(part)} conversations",
                f"too few, its weight {weight:g} asks for {share} of {count}: lower the limit or its weight",
            )
        for chosen in spread(part, share):
            mixed.append(Conversation(chosen.messages, _unique(chosen.id, taken), chosen.category))
    return mixed


def _shares(weights: Sequence[float], count: int) -> list[int]:
    """Whole numbers that add up to `count`, by largest remainder."""
    total = math.fsum(weights)
    exact = [weight / total * count for weight in weights]
    shares = [math.floor(share) for share in exact]
    order = sorted(range(len(exact)), key=lambda part: shares[part] - exact[part])  # stable: the earlier of equals
    for part in order[: count - sum(shares)]:
        shares[part] += 1
    return shares
