"""All drafters of a run behind one target pass, as a LightningModule: calls the loss, logs, builds the optimiser."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from specwave.artifacts import UserError
from specwave.data import world
from specwave.eagle.drafter import Eagle3Drafter
from specwave.eagle.gradients import take
from specwave.eagle.loss import Outcome, ttt_loss
from specwave.eagle.options import Eagle3
from specwave.eagle.slots import counting_slots
from specwave.eagle.tally import Tally, columns, not_finite, summed
from specwave.eagle.targets import Online, Source, TargetBatch, read_target
from specwave.eagle.watch import Watch


class GroupTraining(pl.LightningModule):
    """`drafters` (name → drafter, one vocabulary map for all) learn from `target`, which is no submodule.

    Losses add up, parameters are disjoint, and each drafter is clipped alone: a joint run equals single runs. Where a
    loss or a gradient is not finite that drafter stops, its weights as they were, and the others go on.

    Several processes: each reads rows of its own, losses are divided by what counts in all of them, and gradients and
    figures are summed, so that n processes of b rows equal one of n·b to rounding. What stops a drafter in one of them
    stops it in all.
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
        rows: int | None = None,
    ):
        """`source`: where the target's states come from; None: from the target itself. `watch` decodes with every
        drafter at a validation. `rows`: of a step, in all processes together; a resumed run must have as many."""
        super().__init__()
        self.target, self.options, self.max_steps, self.log_every = target, options, max_steps, log_every
        self.drafters = nn.ModuleDict(drafters)
        first = next(iter(drafters.values()))
        self.draft_ids, self.t2d = first.draft_ids.to(target.device), first.t2d.to(target.device)
        layers = [layer for drafter in drafters.values() for layer in drafter.config.layers]
        self.source, self.watch = source or Online(target, layers), watch
        self.engine = world.Engine()
        self.facts = {"target": target.fingerprint, "groups": list(drafters), "rows of a step": rows}
        self.tokens, self.seconds = 0, 0.0  # of all steps so far, those before a resume included
        self.validated: dict[str, Any] = {}  # step and, per drafter, the figures of the last validation
        self.stopped: dict[str, str] = {}  # drafters that learn no more, and why
        self._tallies, self._norms, self._since, self._names = self._fresh(), dict[str, float](), (0, 0.0), list[str]()
        self._sound: dict[str, Tensor] = {}  # where the engine clips: whether a drafter's gradients were all finite

    def _fresh(self) -> dict[str, Tally]:
        return {name: Tally(self.options.steps) for name in self.drafters}

    def _figures(self, tallies: dict[str, Tally]) -> dict[str, dict[str, float]]:
        """Of all processes together."""
        return {name: tally.figures(self.options.decay) for name, tally in summed(tallies).items()}

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
        """Of every drafter that still learns. In training each of several takes its gradients before the next one
        begins, unless the engine holds the weights in parts: activations of one drafter at a time."""
        read, outcomes = self.read(batch), {}
        apart = self.training and len(self.drafters) > 1 and not self.engine.parted
        normaliser = self._normaliser(read, batch)
        for name, drafter in self.drafters.items():
            if self.training and name in self.stopped:
                continue
            outcome = outcomes[name] = self._outcome(name, read, normaliser)
            if apart:
                outcome.loss = take(outcome.loss, list(drafter.parameters()))
        return outcomes

    def _outcome(self, name: str, read: TargetBatch, normaliser: Tensor | str) -> Outcome:
        options = self.options
        return ttt_loss(
            self.drafters[name],  # type: ignore[arg-type]
            read,
            options.steps,
            options.decay,
            normaliser,
            loss=options.loss,
            count_from=options.count_from,
            checkpointing=options.checkpointing,
        )

    def _normaliser(self, read: TargetBatch, batch: dict[str, Any]) -> Tensor | str:
        """What a step's sum is divided by; in several processes one number for all of them, [S]."""
        options = self.options
        if world.size() == 1 or not self.training:
            return options.normaliser
        if options.normaliser == "all":
            return torch.full((options.steps,), batch["cells"], device=read.ids.device)
        slots_SBT = counting_slots(read.answer, read.in_vocab, options.steps, options.count_from, read.documents)
        return world.total(slots_SBT.sum((1, 2)))

    # ---------------------------------------------------------------- steps

    def on_fit_start(self) -> None:
        if self.engine.clips:
            for name, drafter in self.drafters.items():
                for parameter in drafter.parameters():
                    parameter.register_hook(partial(self._look, name))

    def _look(self, name: str, gradient: Tensor) -> None:
        sound = gradient.isfinite().all()
        self._sound[name] = self._sound[name] & sound if name in self._sound else sound

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._names, self._started = batch["names"], time.perf_counter()
        self._sound.clear()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        outcomes, losses = self._outcomes(batch), []
        self._sound.clear()  # a drafter that has taken its gradients has been looked at; of its loss more is said below
        finite = self._finite({name: outcome.loss.detach() for name, outcome in outcomes.items()}, "loss")
        for name in finite:
            self._tallies[name].add(outcomes[name])
            losses.append(outcomes[name].loss)
        self.tokens += batch["tokens"]
        loss = torch.stack(losses).sum()
        if world.size() == 1:
            return loss
        loss = loss * world.size()  # engines take the mean of the processes' gradients; these are parts of one sum
        if not self.engine.clips:  # a stopped drafter too must take part in it, or the others wait for its gradients
            for name in self.stopped:
                loss = loss + 0.0 * sum(parameter.sum() for parameter in self.drafters[name].parameters())
        return loss

    def _finite(self, values: dict[str, Tensor], what: str, alone: bool = True) -> list[str]:
        """The drafters whose value is finite in every process. Each other one stops; the run, where none is left, or
        where a drafter cannot stop `alone`."""
        bad = world.anywhere(~torch.stack([value.float() for value in values.values()]).isfinite()).tolist()
        for name, lost in zip(values, bad, strict=True):
            if not lost:
                continue
            seen = world.collected((float(values[name]), self._names))
            value, names = next(entry for entry in seen if not math.isfinite(entry[0]))
            found = not_finite(value, f"{what} of {name}", self.global_step, names)
            self.stopped[name] = str(found)
            if not alone or len(self.stopped) == len(self.drafters):
                raise found
            if world.rank() == 0:
                warnings.warn(f"{found}; the other drafters go on", stacklevel=2)
        return [name for name, lost in zip(values, bad, strict=True) if not lost]

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if self.engine.clips:
            if self._sound:
                # The engine holds the gradients and would clip all of them by one that is not finite.
                self._finite(
                    {n: torch.where(sound, 0.0, torch.nan) for n, sound in self._sound.items()}, "gradient", False
                )
            for group in optimizer.param_groups:
                group["lr"] = 0.0 if group["name"] in self.stopped else group["lr"]
            return
        going = {name: drafter for name, drafter in self.drafters.items() if name not in self.stopped}
        clip: Callable[..., Tensor] = world.clip_parts if self.engine.parted else torch.nn.utils.clip_grad_norm_
        norms = {name: clip(drafter.parameters(), self.options.clip) for name, drafter in going.items()}
        for name in self._finite(norms, "gradient"):
            self._norms[name] = float(norms[name])
        for name in self.stopped:
            self.drafters[name].zero_grad()  # to None: the optimiser passes over it

    def finish_step(self) -> None:
        """Time and, every `log_every` steps, a row of figures; called before a checkpoint of the step is taken."""
        self.seconds += time.perf_counter() - self._started
        if self.global_step % self.log_every and self.global_step != self.max_steps:
            return
        rate = (self.tokens - self._since[0]) / max(self.seconds - self._since[1], 1e-9)
        lr = self.options.lr * self.options.rate(self.global_step - 1, self.max_steps)
        going = {name: tally for name, tally in self._tallies.items() if name not in self.stopped}
        norms = {f"{name}/grad_norm": norm for name, norm in self._norms.items() if name in going}
        if self.engine.norm is not None:
            norms = {"grad_norm": self.engine.norm()}
        self._log({"tokens_per_second": rate, "lr": lr} | columns(self._figures(going)) | norms)
        self._tallies, self._since = self._fresh(), (self.tokens, self.seconds)

    def on_validation_epoch_start(self) -> None:
        self._held_out, self._names = self._fresh(), ["held-out prompts"]

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        for name, outcome in self._outcomes(batch).items():
            if not batch.get("again"):  # another process counts it
                self._held_out[name].add(outcome)

    def on_validation_epoch_end(self) -> None:
        found = self._figures(self._held_out)
        losses = {name: torch.tensor(each["loss"]) for name, each in found.items()}
        finite = {name: each for name, each in found.items() if math.isfinite(each["loss"])}
        if new := {name: loss for name, loss in losses.items() if name not in self.stopped}:
            self._finite(new, "held-out loss")
        self.validated = {"step": self.global_step, "figures": finite}
        for name, tau in self._decoded().items():
            self.validated["figures"][name] |= {} if tau is None else {"tau": tau}
        self._log(columns(self.validated["figures"], "val_"))

    def _decoded(self) -> dict[str, float | None]:
        """The τ of really decoding; the drafters are shared out among the processes."""
        found: dict[str, float | None] = {}
        names = list(self.validated["figures"]) if self.watch is not None else []
        for place, name in enumerate(names):
            drafter = self.drafters[name]
            with self.engine.whole(drafter):
                if place % world.size() == world.rank():
                    found[name] = self.watch.tau(drafter)  # type: ignore[arg-type,union-attr]
        parts = world.collected(found)
        return {name: parts[place % len(parts)][name] for place, name in enumerate(names)}

    def _log(self, row: dict[str, float]) -> None:
        if world.rank() == 0:
            self.logger.log_metrics({"tokens": self.tokens} | row, self.global_step)  # type: ignore[union-attr]

    # ---------------------------------------------------------------- optimiser and checkpoint

    def configure_optimizers(self) -> Any:
        options = self.options
        groups = [{"params": list(drafter.parameters()), "name": name} for name, drafter in self.drafters.items()]
        betas, decay = (options.betas[0], options.betas[1]), options.weight_decay
        optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=betas, weight_decay=decay, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [self._schedule(name) for name in self.drafters])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _schedule(self, name: str) -> Callable[[int], float]:
        """Zero for a stopped drafter: an engine that clips steps all of them."""
        return lambda step: 0.0 if name in self.stopped else self.options.rate(step, self.max_steps)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = {key: getattr(self, key) for key in ("tokens", "seconds", "validated", "stopped", "_since")}
        tallies = {name: tally.state() for name, tally in summed(self._tallies).items()}
        checkpoint["specwave"] = self.facts | kept | {"tallies": tallies}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["specwave"]
        for key, mine in self.facts.items():
            if saved.get(key, mine) != mine:
                raise UserError("resume", "true", f"the checkpoint has the {key} {saved[key]}, this run {mine}")
        for key in ("tokens", "seconds", "validated", "stopped", "_since"):
            setattr(self, key, saved[key])
        for name, tally in self._tallies.items():
            if world.rank() == 0:  # they are sums over all processes
                tally.restore(saved["tallies"][name])
