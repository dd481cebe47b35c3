"""All drafters of a run behind one target pass, as a LightningModule: calls the loss, logs, builds the optimiser."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from specwave.artifacts import UserError
from specwave.eagle.drafter import Eagle3Drafter
from specwave.eagle.loss import Outcome, ttt_loss
from specwave.eagle.options import Eagle3
from specwave.eagle.tally import Tally, columns, not_finite
from specwave.eagle.targets import Online, Source, TargetBatch, read_target
from specwave.eagle.watch import Watch


class GroupTraining(pl.LightningModule):
    """`drafters` (name → drafter, one vocabulary map for all) learn from `target`, which is no submodule.

    Losses add up, parameters are disjoint, and each drafter is clipped alone: a joint run equals single runs. Where a
    loss or a gradient is not finite that drafter stops, its weights as they were, and the others go on.
    """

    def __init__(
        self,
        target: Any,
        drafters: dict[str, Eagle3Drafter],
        options: Eagle3,
        max_steps: int,
        log_every: int,
        source: Source | None = None,
        watch: Watch | None = None,
    ):
        """`source`: where the target's states come from; None: from the target itself. `watch` decodes with every
        drafter at a validation."""
        super().__init__()
        self.target, self.options, self.max_steps, self.log_every = target, options, max_steps, log_every
        self.drafters = nn.ModuleDict(drafters)
        first = next(iter(drafters.values()))
        self.draft_ids, self.t2d = first.draft_ids.to(target.device), first.t2d.to(target.device)
        layers = [layer for drafter in drafters.values() for layer in drafter.config.layers]
        self.source, self.watch = source or Online(target, layers), watch
        self.facts = {"target": target.fingerprint, "groups": list(drafters)}
        self.tokens, self.seconds = 0, 0.0  # of all steps so far, those before a resume included
        self.validated: dict[str, Any] = {}  # step and, per drafter, the figures of the last validation
        self.stopped: dict[str, str] = {}  # drafters that learn no more, and why
        self._tallies, self._norms, self._since, self._names = self._fresh(), dict[str, float](), (0, 0.0), list[str]()

    def _fresh(self) -> dict[str, Tally]:
        return {name: Tally(self.options.steps) for name in self.drafters}

    def _figures(self, tallies: dict[str, Tally]) -> dict[str, dict[str, float]]:
        return {name: tally.figures(self.options.decay) for name, tally in tallies.items()}

    def read(self, batch: dict[str, Any]) -> TargetBatch:
        """The target's side of a batch, in the target's own precision."""
        with torch.no_grad(), torch.autocast(batch["ids"].device.type, enabled=False):
            states, last, logits = self.source.read(batch)
            documents = batch.get("documents")
            if documents is None and self.options.count_from == "eagle":  # its rule alone would count padding
                place = torch.arange(batch["ids"].shape[1], device=batch["ids"].device)
                lengths = torch.tensor(batch["lengths"], device=place.device)
                documents = torch.where(place < lengths[:, None], 0, -1)
            return read_target(
                batch["ids"],
                batch["answer"],
                states,
                last,
                self.target.embedding,
                logits,
                self.draft_ids,
                self.t2d,
                count_from=self.options.count_from,
                with_mass=self.options.loss == "lk",
                documents_BT=documents,
            )

    def _outcomes(self, batch: dict[str, Any]) -> dict[str, Outcome]:
        read, options, outcomes = self.read(batch), self.options, {}
        for name, drafter in self.drafters.items():
            if self.training and name in self.stopped:
                continue
            outcomes[name] = ttt_loss(
                drafter,  # type: ignore[arg-type]
                read,
                options.steps,
                options.decay,
                options.normaliser,
                loss=options.loss,
                count_from=options.count_from,
                checkpointing=options.checkpointing,
            )
        return outcomes

    # ---------------------------------------------------------------- steps

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._names, self._started = batch["names"], time.perf_counter()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        losses = []
        for name, outcome in self._outcomes(batch).items():
            if self._finite(outcome.loss, "loss", name):
                self._tallies[name].add(outcome)
                losses.append(outcome.loss)
        self.tokens += batch["tokens"]
        return torch.stack(losses).sum()

    def _finite(self, value: Tensor, what: str, name: str) -> bool:
        """Stops the drafter where not; the run, where none is left."""
        found = not_finite(value, f"{what} of {name}", self.global_step, self._names)
        if found is None:
            return True
        self.stopped[name] = str(found)
        if len(self.stopped) == len(self.drafters):
            raise found
        warnings.warn(f"{found}; the other drafters go on", stacklevel=2)
        return False

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        for name, drafter in self.drafters.items():
            if name in self.stopped:
                continue
            norm = torch.nn.utils.clip_grad_norm_(drafter.parameters(), self.options.clip)
            if self._finite(norm, "gradient", name):
                self._norms[name] = float(norm)
            else:
                drafter.zero_grad()  # to None: the optimiser passes over it

    def finish_step(self) -> None:
        """Time and, every `log_every` steps, a row of figures; called before a checkpoint of the step is taken."""
        self.seconds += time.perf_counter() - self._started
        if self.global_step % self.log_every and self.global_step != self.max_steps:
            return
        rate = (self.tokens - self._since[0]) / max(self.seconds - self._since[1], 1e-9)
        lr = self.options.lr * self.options.rate(self.global_step - 1, self.max_steps)
        norms = {f"{name}/grad_norm": norm for name, norm in self._norms.items()}
        self._log({"tokens_per_second": rate, "lr": lr} | columns(self._figures(self._tallies)) | norms)
        self._tallies, self._since = self._fresh(), (self.tokens, self.seconds)

    def on_validation_epoch_start(self) -> None:
        self._held_out = self._fresh()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        for name, outcome in self._outcomes(batch).items():
            self._held_out[name].add(outcome)

    def on_validation_epoch_end(self) -> None:
        self.validated = {"step": self.global_step, "figures": self._figures(self._held_out)}
        if self.watch is not None:
            for name, drafter in self.drafters.items():
                tau = self.watch.tau(drafter)  # type: ignore[arg-type]
                self.validated["figures"][name] |= {} if tau is None else {"tau": tau}
        self._log(columns(self.validated["figures"], "val_"))

    def _log(self, row: dict[str, float]) -> None:
        self.logger.log_metrics({"tokens": self.tokens} | row, self.global_step)  # type: ignore[union-attr]

    # ---------------------------------------------------------------- optimiser and checkpoint

    def configure_optimizers(self) -> Any:
        options = self.options
        groups = [{"params": list(drafter.parameters()), "name": name} for name, drafter in self.drafters.items()]
        betas, decay = (options.betas[0], options.betas[1]), options.weight_decay
        optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=betas, weight_decay=decay, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: options.rate(step, self.max_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = {key: getattr(self, key) for key in ("tokens", "seconds", "validated", "stopped", "_since")}
        checkpoint["specwave"] = self.facts | kept | {"tallies": {name: t.state() for name, t in self._tallies.items()}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["specwave"]
        for key, mine in self.facts.items():
            if saved[key] != mine:
                raise UserError("resume", "true", f"the checkpoint has the {key} {saved[key]}, this run {mine}")
        for key in ("tokens", "seconds", "validated", "stopped", "_since"):
            setattr(self, key, saved[key])
        for name, tally in self._tallies.items():
            tally.restore(saved["tallies"][name])
