"""For mkdocs: puts the keys of conf/ into keys.md."""

from __future__ import annotations

from typing import Any

from specwave.app.usage import reference

MARK = "<!-- every key -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return markdown.replace(MARK, reference()) if page.file.src_uri == "keys.md" else markdown
