"""`logger=wandb`: a run on Weights & Biases, online, or in a folder for `wandb sync`.

Of training it shows the rows of metrics.csv, which it writes too, and the drafters; of a selection its sets and
pictures; of an evaluation its tables, plots and report. A run has an id of its own, kept in its folder: resuming joins
the same run, and jobs of a sweep are runs beside each other in one group. Knows nothing about what it shows.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pytorch_lightning.loggers import CSVLogger

from specwave.artifacts import UserError, read_json, write_json

NOTE = "wandb.json"  # in the run's folder: the id to join


class Tracker(CSVLogger):
    """See `conf/logger/wandb.yaml` for what the keys mean.

    Raises:
        UserError: W&B cannot be reached, or nobody is logged in.
    """

    def __init__(
        self,
        save_dir: str,
        project: str = "specwave",
        entity: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        name: str | None = None,
        mode: Literal["online", "offline"] = "online",
        tags: Sequence[str] = (),
        artifacts: bool = True,
    ):
        super().__init__(save_dir, name="", version="", flush_logs_every_n_steps=1)
        if mode not in ("online", "offline"):
            raise UserError("logger.mode", mode, "must be online or offline")
        import wandb

        folder = Path(save_dir).absolute()
        self.folder, self.artifacts = folder, artifacts
        note = folder / NOTE
        known = read_json(note, "resume") if note.is_file() else {}
        given: dict[str, Any] = {
            "project": project,
            "entity": entity,
            "group": group or sweep_of(folder),
            "job_type": job_type or record_of(folder).get("app"),
        }
        try:
            self.run: Any = wandb.init(
                **given,
                name=name or folder.name,
                id=known.get("id") or secrets.token_hex(4),
                resume="allow",
                mode=mode,
                dir=str(folder),
                tags=list(tags),
                config=record_of(folder).get("config") or {},
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.errors.Error as error:
            reason = " ".join(str(error).split())[:200]
            remedy = f"W&B says: {reason}; log in with `wandb login`, or use logger.mode=offline"
            raise UserError("logger.mode", mode, remedy) from None
        write_json(note, {"id": self.run.id, **given})

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        super().log_metrics(dict(metrics), step)
        self.run.log(dict(metrics), step=step)

    def finalize(self, status: str) -> None:
        """Lightning's word on a part of the run; only a failure ends it at W&B."""
        super().finalize(status)
        if status == "failed":
            self.close(1)

    def report(self, figures: Mapping[str, Mapping[str, float]], folders: Mapping[str, Path]) -> None:
        """The last validation as a table, a row for each drafter, and the drafters' folders as artefacts."""
        import wandb

        columns = list(dict.fromkeys(key for found in figures.values() for key in found))
        rows = [[name, *(found.get(key) for key in columns)] for name, found in figures.items()]
        self.run.log({"drafters": wandb.Table(columns=["drafter", *columns], data=rows)})
        for name, folder in folders.items() if self.artifacts else ():
            artifact = wandb.Artifact(f"{name.replace('+', '_')}-{self.run.id}", type="drafter")
            artifact.add_dir(str(folder))
            self.run.log_artifact(artifact)

    def show(
        self,
        tables: Mapping[str, Sequence[Sequence[Any]]],
        pages: Mapping[str, str],
        figures: Mapping[str, float],
        files: Sequence[Path],
        kind: str,
        pictures: Mapping[str, Path] | None = None,
    ) -> None:
        """What a selection or an evaluation found.

        Args:
            tables: by name, a header and rows.
            pages: by title, HTML that needs nothing beside itself.
            figures: the summary of the run, by which W&B sorts and compares runs.
            files: uploaded as one artefact of this `kind`.
            pictures: by title, image files.
        """
        import wandb

        shown: dict[str, Any] = {
            name: wandb.Table(columns=[str(entry) for entry in header], data=list(map(_plain, rows)))
            for name, (header, *rows) in tables.items()
        }
        shown |= {
            f"plots/{title}": wandb.Html(page, inject=False, data_is_not_path=True) for title, page in pages.items()
        }
        shown |= {f"plots/{title}": wandb.Image(str(path)) for title, path in (pictures or {}).items()}
        self.run.log(shown)
        self.run.summary.update(dict(figures))
        if self.artifacts:
            artifact = wandb.Artifact(f"{kind}-{self.run.id}", type=kind)
            for path in files:
                artifact.add_file(str(path))
            self.run.log_artifact(artifact)

    def close(self, code: int = 0) -> None:
        """Ends the run at W&B; once is enough, and a run that is not ended would swallow the next job's rows."""
        with contextlib.suppress(AttributeError):
            self.run.finish(exit_code=code)


def _plain(row: Sequence[Any]) -> list[Any]:
    """Cells as W&B takes them: a tree's lists as a text."""
    return [value if value is None or isinstance(value, int | float | str) else str(value) for value in row]


def sweep_of(folder: Path) -> str | None:
    """The name of the sweep a run's folder belongs to: Hydra leaves multirun.yaml in the sweep's."""
    parent = folder.parent
    return f"{parent.parent.name}-{parent.name}" if (parent / "multirun.yaml").is_file() else None


def record_of(folder: Path) -> dict[str, Any]:
    """What run.yaml says of the run in this folder: its app and its whole config among it. {} without one."""
    path = folder / "run.yaml"
    return (yaml.safe_load(path.read_text(encoding="utf-8")) or {}) if path.is_file() else {}
