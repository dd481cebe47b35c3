"""One row of a data set as the turns of a conversation: ShareGPT, messages, prompt and answer, Spec-Bench's turns.

What public dumps hold is put in order by four rules, in this order:

| found                            | done                                                                   |
|----------------------------------|------------------------------------------------------------------------|
| an empty turn                    | left out: nobody said anything                                         |
| an answer before any question    | left out: long chats were split into parts, and no template opens so   |
| two turns of one role in a row   | joined by a blank line: cutting there would lose the answer to both    |
| a system turn after the opening  | the conversation ends before it: no template has a place for it        |

Knows nothing about files or tokens.
"""

from __future__ import annotations

from typing import Any

from specwave.artifacts import UserError

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
}
ANSWERS = ("response", "answer", "completion")  # columns beside `prompt`

Turns = tuple[tuple[str, str], ...]  # (role, content)


class _Row:
    """A row and where it came from, for the one line that says what is wrong with it."""

    def __init__(self, key: str, where: str):
        self.key, self.where = key, where

    def wrong(self, remedy: str) -> UserError:
        return UserError(self.key, self.where, remedy)

    def text(self, value: Any) -> str:
        """A text; None is empty, and a list is of parts {"type": "text", "text"}."""
        if value is None:
            return ""
        if isinstance(value, list):
            return "".join(self._part(part) for part in value)
        if not isinstance(value, str):
            raise self.wrong(f"a turn must be a text, got {str(value)[:40]!r}")
        return whole(value)

    def _part(self, part: Any) -> str:
        if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            return whole(part["text"])
        kind = part.get("type") if isinstance(part, dict) else part
        raise self.wrong(f"a part of a turn is no text ({str(kind)[:40]!r}): only text can be read")

    def said(self, value: Any, role: str) -> list[tuple[str, str]]:
        """A text said by `role`, or a list of messages that say themselves whose they are."""
        if not isinstance(value, list):
            return [(role, self.text(value))]
        return [self._message(entry) for entry in value]

    def _message(self, entry: Any) -> tuple[str, str]:
        if not isinstance(entry, dict):
            raise self.wrong(
                f"a turn must be an object with from and value, or role and content, got {str(entry)[:40]!r}"
            )
        name = _given(entry, "from", "role")
        role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
        if role is None:
            raise self.wrong(f"the role {name!r} is unknown, these are read: {', '.join(ROLES)}")
        return role, self.text(_given(entry, "value", "content"))


def _given(entry: dict[str, Any], *names: str) -> Any:
    """The first of these columns that is there and not null: a table holds the columns of all its rows."""
    return next((entry[name] for name in names if entry.get(name) is not None), None)


def whole(text: str) -> str:
    """The text with surrogate pairs joined and halves of one replaced: JSON may escape half, no tokeniser takes it."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def read_turns(row: Any, key: str, where: str) -> Turns:
    """The turns of a row, in order; empty when nobody asks anything in it.

    Args:
        key: the config key that named the source.
        where: the place of the row, as `path:line`.

    Raises:
        UserError: no known format, an unknown role, a turn that is no text.
    """
    source = _Row(key, where)
    if not isinstance(row, dict):
        raise source.wrong(f"each conversation must be a JSON object, got {str(row)[:40]!r}")
    for name in ("conversations", "messages", "conversation"):
        if row.get(name) is not None:
            if not isinstance(row[name], list):
                raise source.wrong(f"{name} must be a list of turns, got {str(row[name])[:40]!r}")
            return ordered(source.said(row[name], "user"))
    if row.get("prompt") is not None:
        return ordered(source.said(row["prompt"], "user") + source.said(_given(row, *ANSWERS), "assistant"))
    if isinstance(row.get("turns"), list) and row["turns"]:
        # what the user says second answers a reply that is not in the file: only the first turn stands alone
        first = row["turns"][0]
        return ordered(source.said(row["turns"], "user") if isinstance(first, dict) else source.said(first, "user"))
    found = ", ".join(list(map(str, row))[:8]) or "none"
    raise source.wrong(f"no conversation: a row has conversations, messages, prompt or turns, this one has {found}")


def ordered(turns: list[tuple[str, str]]) -> Turns:
    """The rules at the top of this file."""
    system: list[str] = []
    talk: list[tuple[str, str]] = []
    for role, text in turns:
        if not text.strip():
            continue
        if role == "system":
            if talk:
                break
            system.append(text)
        elif talk and talk[-1][0] == role:
            talk[-1] = (role, f"{talk[-1][1]}\n\n{text}")
        elif talk or role == "user":
            talk.append((role, text))
    if not talk:
        return ()
    opening = [("system", "\n\n".join(system))] if system else []
    return tuple(opening + talk)
