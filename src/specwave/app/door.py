"""The program of the doors: a tidy process first, then the app, and an exit code for whatever happens.

0 success · 2 a mistake of the user, one line · 1 a crash, its traceback · 130 interrupted.
Nothing heavy is imported at the top: libraries read their settings from the environment when they are imported.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn


def door(app: str) -> NoReturn:
    """The whole program of `<app>.py`."""
    sys.exit(run_door(app, sys.argv[1:]))


def run_door(app: str, argv: Sequence[str]) -> int:
    """Runs an app with command-line arguments; the exit code."""
    prepare_environment()
    try:
        if app == "chain":
            from specwave.app.chain import run_chain

            return run_chain(argv)
        from specwave.app.command import run_command  # seconds: torch and Hydra

        return run_command(app, argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception:
        traceback.print_exc()
        return 1


def prepare_environment() -> None:
    """Quiet libraries; no bars where stderr is no terminal, so that logs and error lines stay whole."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us as they are
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for package in ("pytorch_lightning", "lightning_fabric"):  # "GPU available: False", tips, …
        logging.getLogger(f"{package}.utilities.rank_zero").setLevel(logging.WARNING)
    logging.getLogger("DeepSpeed").addFilter(_worth_saying)  # transformers imports it, used or not
    warnings.formatwarning = lambda message, *_, **__: f"warning: {' '.join(str(message).split())}\n"
    warnings.filterwarnings("ignore", message=r".*LeafSpec.* is deprecated")  # Lightning's use of torch, not the user's


def _worth_saying(record: logging.LogRecord) -> bool:
    return "Setting accelerator to CPU" not in record.getMessage()
