"""Training of a captured model in any weight mode, with the versions of a pipeline of K stages.

It is the asynchronous trainer with all stages in this process: each has its own optimizer and reads
the same versions as over K ranks, bit for bit. Results are those of a real run; times are not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxpart.codegen.materialization import constants_of, materialize
from fxpart.codegen.stage_loader import load_stage
from fxpart.compat.optimizer_choice import describe_optimizer
from fxpart.emulator.emulation_result import SYNC, EmulationResult
from fxpart.emulator.even_partition import cut_evenly
from fxpart.emulator.penalty import PenaltyMeasurement
from fxpart.emulator.weight_snapshots import WeightSnapshots
from fxpart.errors import error
from fxpart.plan.staleness_penalty import StalenessPenalty
from fxpart.runtime import InProcess, Trainer
from fxpart.runtime.asynchronous.pipeline import AsyncPipeline
from fxpart.runtime.asynchronous.stage_graph import AsyncStageGraph
from fxpart.runtime.optimizer.factory import make_default_optimizer
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_modes import FLUSH, SPECTRAIN, WeightMode, weight_mode

Progress = Callable[[int, float], object]  # (updates so far, newest loss)


class Emulator:
    """A model compiled into a pipeline of stages, to be trained from its weights repeatedly.

    program: compiled chain of ``stages`` stages of about equal time.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stages: int,
        microbatches: int = 1,
        loss: Callable[..., Any] | None = None,
        example_inputs: Any = None,
        seed: int = 0,
        device: str | torch.device = "cpu",
        **options: Any,
    ) -> None:
        """Compile the model. stages: 1 to 32. microbatches: of a minibatch, which makes one update.

        loss, example_inputs, seed, and options (batch_size, batch_dims, precision, example_kwargs):
        as for :func:`fxpart.compile`. device: of all stages. Each run starts from the model's
        weights, which are copied and never changed. Raises FXP201 if the model has fewer blocks
        with weights than stages, and what compile raises.
        """
        self.stages, self.microbatches = stages, microbatches
        self.program = cut_evenly(
            model, stages, microbatches=microbatches, loss=loss, example_inputs=example_inputs,
            seed=seed, **options,
        )  # fmt: skip
        if self.program.captured.loss_kind == "mean-square":
            raise error(
                "FXP106",
                where=self.program.plan.model.name,
                why="its output has no loss, and no loss was given",
                fix="use Emulator(..., loss=torch.nn.functional.cross_entropy), with targets last "
                "in the example inputs",
            )
        self._device = torch.device(device)
        self._state = {
            name: tensor.detach().clone() for name, tensor in self.program.captured.state.items()
        }

    def run(
        self,
        batches: Any,
        weights: str | WeightMode = SPECTRAIN,
        optimizer: Any = None,
        steps: int | None = 500,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        clip_norm: float | None = None,
        evaluate: Callable[[dict[str, torch.Tensor]], float] | None = None,
        every: int = 0,
        *,
        initial: Mapping[str, torch.Tensor] | None = None,
        microbatches: int | None = None,
        seed: int | None = None,
        watch: int = 0,
        progress: Progress | None = None,
        **trainer: Any,
    ) -> EmulationResult:
        """Train ``steps`` updates in a weight mode, or until the batches end.

        batches: an iterable of global batches, repeated until there are enough steps, or a function
        that returns one; an iterator is used once. weights: a mode's name
        (:data:`fxpart.schedule.weight_modes.MODES`), "sync" for "flush", or a mode. optimizer: a
        name, class, partial or function of a parameter list, made once per stage; by default the
        mode's ("nadam-stash") or AdamW, as for a trainer. scheduler: makes
        a learning-rate scheduler for each of these. clip_norm: each stage clips its own share, see
        the documentation. evaluate: a function of a whole state dict, called at the end and, if
        ``every`` is above 0, after every so many updates, without a flush. initial: other weights
        to start from, by name. microbatches: of a minibatch, as compiled by default. seed: of
        random ops, as compiled by default. watch: measure prediction errors (ρ) every so many
        updates. progress: called after each update whose loss is known. trainer: further options of
        the asynchronous trainer, with its defaults; but ``guard`` is off, as the run ends below.

        The run ends with the first non-finite loss. FXP109 for an unknown mode and for invalid
        arguments.
        """
        name = weights if isinstance(weights, str) else weights.name
        mode = self.check(weights, microbatches)
        if (steps is not None and steps < 1) or every < 0:
            why = "steps must be at least 1 and every at least 0"
            raise error(
                "FXP109", where=f"steps={steps}, every={every}", why=why, fix="use steps=500"
            )
        given = make_default_optimizer(mode) if optimizer is None else optimizer
        run = _EmulatorRun(self, mode, microbatches or self.microbatches, given, initial, {
            "guard": False, "scheduler": scheduler, "clip_norm": clip_norm, "seed": seed,
            "watch": watch,
            **({"total_updates": steps} if mode.discount else {}), **trainer,
        })  # fmt: skip
        limit = steps if steps is not None else -1
        run.snapshots.copy_every(every if evaluate is not None else 0)
        try:
            found = run.train(_repeat(batches, limit), evaluate, progress)
        finally:
            run.trainer.close()
        return replace(found, weights=name)

    def measure_penalty(
        self, runs: Iterable[EmulationResult], target_loss: float, *, window: int | None = None
    ) -> StalenessPenalty:
        """Return the staleness penalty for ``compile(..., mode="auto", staleness_penalty=)``.

        It compares the updates until the mean of the last ``window`` losses (by default a twentieth
        of the longest run) is at most the target, for each seed with those of the synchronous run.
        runs: of this emulator and of others of the same model and batches, with weights="sync" and
        asynchronous weight modes, each with the same seeds and optimizer. Pass each seed's weights
        as ``initial`` to run(): of equal runs there is no interval. FXP109 where they cannot be
        compared, or where a synchronous run does not reach the target.
        """
        all_runs, plan = list(runs), self.program.plan
        longest = max((len(run.losses) for run in all_runs), default=0)
        width = max(1, longest // 20) if window is None else window
        return PenaltyMeasurement(plan.model, plan.batch_size, target_loss, width).summarize(
            all_runs
        )

    def check(self, weights: str | WeightMode, microbatches: int | None = None) -> WeightMode:
        """Return the mode; FXP109 if it is unknown, or the pipeline cannot train with it.

        microbatches: of a minibatch, as compiled by default.
        """
        mode = weight_mode(FLUSH if weights == SYNC else weights)
        ahead = AsyncStageGraph.of(self.program.spec).ahead
        WeightVersionCounters(ahead, microbatches or self.microbatches).check(mode)
        return mode

    def modules(self, initial: Mapping[str, torch.Tensor] | None) -> dict[int, nn.Module]:
        """Return new stage modules with copies of the weights. FXP110 for other names or shapes."""
        spec, modules_ = self.program.spec, {}
        constants = constants_of(spec, self._state)
        for stage in spec.stages:
            module = load_stage(self.program.sources[stage.index], stage, self._device)
            source = self._state if initial is None else {**self._state, **initial}
            materialize(module, spec, source, constants=constants, strict=False)
            modules_[stage.index] = module
        return modules_

    @property
    def unused(self) -> dict[str, torch.Tensor]:
        """State of the model that no stage uses."""
        used = {s.name for stage in self.program.spec.stages for s in stage.state}
        captured = self.program.captured
        names = [*captured.parameters, *sorted(captured.persistent)]
        return {name: self._state[name] for name in names if name not in used}


class _EmulatorRun:
    """One training run from the initial weights."""

    def __init__(
        self,
        emulator: Emulator,
        mode: WeightMode,
        microbatches: int,
        optimizer: Any,
        initial: Mapping[str, torch.Tensor] | None,
        options: dict[str, Any],
    ) -> None:
        self.emulator, self.mode, self.microbatches = emulator, mode, microbatches
        spec, modules = emulator.program.spec, emulator.modules(initial)
        self.snapshots = WeightSnapshots(spec, modules, emulator.unused)
        self.trainer = Trainer(
            spec,
            modules,
            ranks=range(emulator.stages),
            transport=InProcess(emulator.stages),
            microbatches=microbatches,
            optimizer=optimizer,
            unused=emulator.unused,
            weights=mode,
            **{name: value for name, value in options.items() if value is not None},
        )
        assert isinstance(self.trainer.pipeline, AsyncPipeline), "an emulation has no flushes"
        self.snapshots.follow(self.trainer.pipeline.stages.weights)
        self.seed = options["seed"]
        self.optimizer = describe_optimizer(optimizer)
        self.losses: list[float] = []
        self.evaluations: list[tuple[int, float]] = []

    def train(
        self,
        batches: Iterator[Any],
        evaluate: Callable[[dict[str, torch.Tensor]], float] | None,
        progress: Progress | None,
    ) -> EmulationResult:
        """Train until the batches end, or until the first non-finite loss."""
        started = time.perf_counter()
        for batch in batches:
            self.trainer.submit(batch)
            self._record(self.trainer.pop_losses(), evaluate, progress)
            if self.losses and not math.isfinite(self.losses[-1]):
                break
        self._record(self.trainer.finish(), evaluate, progress)
        finite = [math.isfinite(loss) for loss in self.losses]
        diverged = None if all(finite) else finite.index(False) + 1
        state, report = self.trainer.state_dict(), self.trainer.report()
        done = [updates for updates, _ in self.evaluations]
        if evaluate is not None and done[-1:] != [len(self.losses)]:
            self.evaluations.append((len(self.losses), float(evaluate(state))))
        return EmulationResult(
            weights=self.mode.name,
            stages=self.emulator.stages,
            microbatches=self.microbatches,
            losses=tuple(self.losses[:diverged]),
            evaluations=tuple(self.evaluations),
            staleness=self.trainer.staleness,
            copies=tuple(stage.copies for stage in report),
            rho=tuple(stage.mean_rho for stage in report),
            diverged=diverged,
            seconds=time.perf_counter() - started,
            seed=self.emulator.program.plan.seed if self.seed is None else self.seed,
            optimizer=self.optimizer[0],
            options=self.optimizer[1],
            state_dict=state,
        )

    def _record(
        self,
        losses: Iterable[tuple[int, torch.Tensor]],
        evaluate: Callable[[dict[str, torch.Tensor]], float] | None,
        progress: Progress | None,
    ) -> None:
        for _, loss in losses:
            self.losses.append(float(loss))
            if progress is not None:
                progress(len(self.losses), self.losses[-1])
        for updates, state in self.snapshots.pop_complete():
            if evaluate is not None:
                self.evaluations.append((updates, float(evaluate(state))))


def _repeat(batches: Any, limit: int) -> Iterator[Any]:
    """Yield ``limit`` batches, repeating the data; all of them once if limit is negative."""
    given = 0
    while given != limit:
        before = given
        for batch in batches() if callable(batches) else batches:
            yield batch
            given += 1
            if given == limit:
                return
        if not given:
            raise error(
                "FXP109",
                where="batches",
                why="there are no batches",
                fix="pass a non-empty iterable",
            )
        if given == before:
            return
        if limit < 0 or iter_once(batches):
            return


def iter_once(batches: Any) -> bool:
    """Return whether the batches can be iterated only once."""
    return isinstance(batches, Iterator)
