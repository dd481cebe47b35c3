"""Where an early exit lies: a number of blocks, or a share of them."""

from __future__ import annotations

from specwave.artifacts import UserError


def check_exit(given: float, key: str) -> None:
    """Refuses what is neither, whatever the target.

    Raises:
        UserError: so.
    """
    if not (0 < given < 1 or (given >= 1 and float(given).is_integer())):
        raise UserError(key, given, "a number of blocks, or a share of them between 0 and 1")


def exit_block(given: float, num_layers: int, key: str) -> int:
    """How many blocks run up to an exit, 1 … N−1: `given` itself, or below 1 that share of all, rounded.

    Raises:
        UserError: there are not so many before the last block.
    """
    last = num_layers - 1
    block = min(max(round(given * num_layers), 1), last) if given < 1 else int(given)
    if not 1 <= block <= last:
        raise UserError(key, f"{given:g}", f"an exit leaves out a block at least: 1 to {last} of {num_layers} may run")
    return block
