"""Arguments of a call that come as other types than they should: numpy's or torch's numbers are taken, 1.5 is not."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

from specwave.artifacts import UserError


def whole(key: str, value: Any, remedy: str) -> int:
    """A whole number of any type.

    Raises:
        UserError: it is none; `key`, the value and `remedy` make the message.
    """
    try:
        return index(value)
    except (TypeError, ValueError):  # a tensor of several raises either
        raise UserError(key, value, remedy) from None


def wholes(key: str, values: Any, remedy: str) -> list[int]:
    """Whole numbers: a list, a range, an array or tensor of one dimension, or one number alone.

    Raises:
        UserError: they are none.
    """
    plain = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(plain, (str, bytes)) or not isinstance(plain, Iterable):
        plain = [plain]
    return [whole(key, value, remedy) for value in plain]
