"""`export.push_to_hub`: finished drafter folders as repositories of the Hugging Face hub, with their model cards.

What can be known beforehand (names, a token, that the hub answers) is checked before training; what was exported is
whole before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specwave.artifacts import UserError
from specwave.eagle.export import Export, read_drafter

KEY = "export.push_to_hub"


def repositories(named: str, groups: Sequence[str]) -> dict[str, str]:
    """Group → repository: the one that is named, or one for each of several groups, with the group's name behind."""
    if len(groups) == 1:
        return {groups[0]: named}
    return {group: f"{named}-{group.replace('+', '_')}" for group in groups}  # ids have no plus


def check_push(export: Export, groups: Sequence[str], ask: bool = True) -> None:
    """Refuses, before anything is computed, a push that could not be done in the end.

    Args:
        ask: whether the hub is asked who we are; one process of a run is enough.
    Raises:
        UserError: no repository can have this id, there is no token, the hub is switched off or does not take it.
    """
    if export.push_to_hub is None:
        return
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    for repository in repositories(export.push_to_hub, groups).values():
        try:
            validate_repo_id(repository)
        except HFValidationError as error:
            raise UserError(KEY, repository, f"no repository can be called so ({_line(error)})") from None
        if repository.count("/") != 1:
            raise UserError(KEY, repository, "name it as <user or organisation>/<repository>")
    if constants.HF_HUB_OFFLINE:
        raise UserError(KEY, export.push_to_hub, "the hub is switched off by HF_HUB_OFFLINE: unset it, or use null")
    if get_token() is None:
        raise UserError(KEY, export.push_to_hub, "nobody is logged in: `hf auth login`, or set HF_TOKEN")
    if ask:
        _asked(export.push_to_hub, "use null to train without it", HfApi().whoami)


def push(export: Export, folders: Mapping[str, Path], say: Callable[[str], None]) -> dict[str, str]:
    """Sends whole drafter folders, group → folder; group → address. Nothing where `push_to_hub` is null.

    Raises:
        UserError: a folder is not whole (then nothing is sent), or the hub refuses; the folders stay as they are, and
            it says which drafters are there already.
    """
    if export.push_to_hub is None:
        return {}
    from huggingface_hub import HfApi

    for folder in folders.values():
        read_drafter(folder)
    api = HfApi()
    sent: dict[str, str] = {}
    for group, repository in repositories(export.push_to_hub, list(folders)).items():
        folder = folders[group]
        remedy = f"the drafter is whole in {folder}; `hf upload {repository} {folder}` sends it"
        remedy += f"; sent before it: {', '.join(sent.values())}" if sent else ""
        waiting = [str(folders[other]) for other in folders if other != group and other not in sent]
        remedy += f"; not tried: {', '.join(waiting)}" if waiting else ""
        _asked(repository, remedy, api.create_repo, repo_id=repository, private=export.private, exist_ok=True)
        sending = {"repo_id": repository, "folder_path": folder, "ignore_patterns": [".*"]}
        done = _asked(repository, remedy, api.upload_folder, **sending, commit_message="A drafter of specwave")
        sent[group] = str(done.repo_url)
        say(f"pushed: {sent[group]}")
    return sent


def _asked(repository: str, remedy: str, call: Callable[..., Any], **given: Any) -> Any:
    """What the hub answers."""
    try:
        return call(**given)
    except Exception as error:  # its errors are many: no network, no right to write, no such organisation, full
        raise UserError(KEY, repository, f"the hub does not take it ({_line(error)}); {remedy}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
