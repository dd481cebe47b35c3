"""Kangaroo's adapter as a LightningModule: calls the loss, logs, builds the optimiser. One process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from specwave.artifacts import UserError
from specwave.data.world import Engine
from specwave.skipping.adapter import Adapter
from specwave.skipping.adapter_folder import METHOD as NAME
from specwave.skipping.distil import Outcome, Sums, distil, refuse_not_finite
from specwave.skipping.options import Kangaroo

# A batch's block outputs by layer, rows of some width for every position, and the target's logits of such rows.
Read = Callable[[dict[str, Any]], tuple[Mapping[int, Tensor], Tensor, Callable[[Tensor], Tensor]]]
KEPT = ("tokens", "seconds", "validated", "_since")


class AdapterTraining(pl.LightningModule):
    """The adapter learns from `target`, which is no submodule and stays as it is. `read`: what the target says of a
    batch. `watch` decodes with the adapter at a validation and gives τ. Figures are those of distil.py."""

    def __init__(
        self,
        target: Any,
        adapter: Adapter,
        options: Kangaroo,
        max_steps: int,
        log_every: int,
        read: Read,
        watch: Callable[[Adapter], float | None] | None = None,
        rows: int | None = None,
    ):
        super().__init__()
        self.target, self.options, self.max_steps, self.log_every = target, options, max_steps, log_every
        self.drafters = nn.ModuleDict({NAME: adapter})
        self.read, self.watch, self.layer = read, watch, adapter.config.exit - 1
        self.engine, self.stopped = Engine(), dict[str, str]()  # what exports ask of a module: nothing special here
        self.facts = {"target": target.fingerprint, "exit": adapter.config.exit, "rows of a step": rows}
        self.tokens, self.seconds = 0, 0.0  # of all steps so far, those before a resume included
        self.validated: dict[str, Any] = {}  # step and figures of the last validation
        self._sums, self._norm, self._since = Sums(), 0.0, (0, 0.0)

    def _outcome(self, batch: dict[str, Any]) -> Outcome:
        with torch.no_grad(), torch.autocast(batch["ids"].device.type, enabled=False):
            states, rows_BTX, score = self.read(batch)
        adapter: Any = self.drafters[NAME]
        own_BTD, target = states[self.layer], self.target
        found = distil(adapter, batch, own_BTD, score, rows_BTX, target.rope, target.head)
        refuse_not_finite(found.loss, "loss", self.global_step, batch)
        return found

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._batch, self._started = batch, time.perf_counter()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        found = self._outcome(batch)
        self._sums.add(found)
        self.tokens += batch["tokens"]
        return found.loss

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), self.options.clip)
        refuse_not_finite(norm, "gradient", self.global_step, self._batch)
        self._norm = float(norm)

    def finish_step(self) -> None:
        """Time and, every `log_every` steps, a row of figures; called before a checkpoint of the step is taken."""
        self.seconds += time.perf_counter() - self._started
        if self.global_step % self.log_every and self.global_step != self.max_steps:
            return
        rate = (self.tokens - self._since[0]) / max(self.seconds - self._since[1], 1e-9)
        lr = self.options.lr * self.options.rate(self.global_step - 1, self.max_steps)
        self._log({"tokens_per_second": rate, "lr": lr}, self._sums.figures() | {"grad_norm": self._norm})
        self._sums, self._since = Sums(), (self.tokens, self.seconds)

    def on_validation_epoch_start(self) -> None:
        self._held_out = Sums()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._held_out.add(self._outcome(batch))

    def on_validation_epoch_end(self) -> None:
        tau = None if self.watch is None else self.watch(self.drafters[NAME])  # type: ignore[arg-type]
        figures = self._held_out.figures() | ({} if tau is None else {"tau": tau})
        self.validated = {"step": self.global_step, "figures": {NAME: figures}}
        self._log({}, {f"val_{key}": value for key, value in figures.items()})

    def _log(self, plain: dict[str, float], own: dict[str, float]) -> None:
        row = {"tokens": self.tokens} | plain | {f"{NAME}/{key}": value for key, value in own.items()}
        self.logger.log_metrics(row, self.global_step)  # type: ignore[union-attr]

    # ---------------------------------------------------------------- optimiser and checkpoint

    def configure_optimizers(self) -> Any:
        options = self.options
        betas, decay = (options.betas[0], options.betas[1]), options.weight_decay
        optimizer = torch.optim.AdamW(self.parameters(), lr=options.lr, betas=betas, weight_decay=decay, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: options.rate(step, self.max_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["specwave"] = self.facts | {key: getattr(self, key) for key in KEPT} | {"sums": asdict(self._sums)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["specwave"]
        for key, mine in self.facts.items():
            if saved.get(key) != mine:
                raise UserError("resume", "true", f"the checkpoint has the {key} {saved.get(key)}, this run {mine}")
        for key in KEPT:
            setattr(self, key, saved[key])
        self._sums = Sums(**saved["sums"])
