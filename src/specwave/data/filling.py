"""A folder of shards (states.py) made whole: what is missing or damaged is made, what is finished stays, whoever was
killed meanwhile. What the shards hold is their maker's affair."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

from specwave.data.states import (
    Index,
    Plan,
    alone,
    check_room,
    damaged,
    free_bytes,
    name_of,
    readable,
    size,
    write_shard,
)


def fill(
    folder: Path,
    index: Index,
    plan: Plan,
    make: Callable[[range, tqdm], dict[str, Tensor]],
    say: Callable[[str], None],
    *,
    key: str,
    holds: str,
    verify: bool = False,
) -> Index:
    """The index of the folder, all its shards written.

    Args:
        index: of the plan; the one in the folder, or a new one.
        make: the columns of a shard, given the numbers of its samples; moves the bar on by its tokens.
        key: the config key that named the folder.
        holds: what a token's columns are, for the console.
        verify: compare finished shards with their checksums, which is done anyway where a capture goes on.

    Raises:
        UserError: too little room, before anything is written; a folder that cannot be written.
    """
    seen, shards = dict(index.shards), plan.shards(index.shard_tokens)
    bad = damaged(folder, index, checksums=verify or (bool(seen) and not index.complete))
    todo = [number for number in range(index.total) if number not in seen or number in bad]
    for number, why in bad.items():
        say(f"states: {name_of(number)} is damaged ({why}) and is made again")
    if not todo:
        say(f"states: re-used from {folder}")
        return index
    tokens = [sum(plan.lengths[row] for row in rows) for rows in shards]
    needed = size(index.columns.values(), [(len(shards[number]), tokens[number]) for number in todo])
    say(
        f"states: {plan.tokens:,} tokens of {index.bytes_per_token:,} bytes ({holds}), {len(todo)} of {index.total} "
        f"shards to make: {readable(needed)} in {folder}, {readable(free_bytes(folder))} free"
    )
    check_room(folder, needed, key)
    with alone(folder, key):
        index = Index.load(folder, key) or index
        todo = [number for number in todo if index.shards.get(number) == seen.get(number)]  # made meanwhile: kept
        if bad:  # they are listed no more, whatever happens now
            index.shards = {number: entry for number, entry in index.shards.items() if number not in todo}
            index.save(folder)
        done = sum(tokens[number] for number in index.shards)
        shown = {"desc": "states", "unit": "token", "unit_scale": True}
        with tqdm(total=plan.tokens, initial=done, disable=None, **shown) as bar:
            for number in todo:
                samples = [(plan.digests[row], plan.lengths[row]) for row in shards[number]]
                write_shard(folder, index, number, samples, make(shards[number], bar))
    return index


def passes(lengths: Sequence[int], tokens: int) -> Iterator[range]:
    """Which of the sequences are forwarded together: runs of so many tokens at most, padding included, one sequence at
    least. They come by length, the shortest first, so little is padded."""
    first = 0
    for place, length in enumerate(lengths):
        if place > first and (place - first + 1) * length > tokens:
            yield range(first, place)
            first = place
    if lengths:
        yield range(first, len(lengths))
