"""The trainer: steps over a partitioned program with the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from fxpart.errors import error
from fxpart.program import ProgramSpec
from fxpart.rng import microbatch_key
from fxpart.runtime.agreement import Pending, agree, reporting
from fxpart.runtime.batch import Cut
from fxpart.runtime.engine import Engine, place
from fxpart.runtime.gradients import clip, gather_gradients, share_ties
from fxpart.runtime.held import Held
from fxpart.runtime.lane_batch import LaneFeed
from fxpart.runtime.lanes import Crew, Lane, Ranks, lane_ranks, mesh_of, rank_table, shared_text
from fxpart.runtime.meshes import Meshes
from fxpart.runtime.optimizer import check_elementwise, make_optimizer
from fxpart.runtime.optimizer_state import gather_optimizer, load_optimizer
from fxpart.runtime.recorder import Recorder
from fxpart.runtime.sharded_state import ShardedState, has_parts
from fxpart.runtime.state import ModelState
from fxpart.runtime.transport import Transport
from fxpart.schedule.recording import CLIP, OPTIMIZER, SPREAD, SUMS, TIES

T = TypeVar("T")
Phase = tuple[str, Callable[[], None]]
Evaluation = Callable[[], tuple[ProgramSpec, Mapping[int, nn.Module]] | Sequence[Lane]]


class Trainer:
    """Trains a program's stages; every rank makes one and gives it the same global batches.

    optimizer: this process's torch optimizer, for learning-rate schedulers and options.
    last_grad_norm: the global norm before clipping, after an update with ``clip_norm``.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        modules: Mapping[int, nn.Module],
        *,
        ranks: Sequence[int | Sequence[int]],
        transport: Transport,
        microbatches: int,
        schedule: str = "1f1b",
        optimizer: Any = None,
        clip_norm: float | None = None,
        seed: int | None = None,
        evaluation: Evaluation | None = None,
        devices: Mapping[int, torch.device] | None = None,
        unused: Mapping[str, torch.Tensor] | None = None,
        lanes: Sequence[Lane] | None = None,
    ) -> None:
        """modules: the stage modules of this process, by stage. ranks: the rank of each stage.

        lanes: of a sharded program, those of this process (``spec`` is that of any lane, and
        ``modules`` is not looked at); ranks: of each stage, the rank of each lane, or that of the
        first where the others follow it.

        microbatches: into how many a batch is cut (fewer if it has fewer rows). optimizer: see
        :func:`~fxpart.runtime.optimizer.make_optimizer`; None to compute gradients only. clip_norm:
        largest global gradient norm. seed: of random ops, by default the program's. evaluation:
        gives the program and modules (or the lanes) for ``eval_step`` when it is first called; they
        share the state of ``modules``. devices: per local rank, by default where its parameters
        are. unused: state that no stage needs, for ``state_dict``.

        Raises FXP501 on every rank where they were not given the same.
        """
        self.spec = spec
        self.seed = spec.seed if seed is None else seed
        self.microbatches = microbatches
        self.clip_norm = clip_norm
        self.last_grad_norm: torch.Tensor | None = None
        self.calls = 0
        self._schedule = schedule
        self._ranks = rank_table(ranks, mesh_of(spec).size)
        self._transport = transport
        self._evaluation = evaluation
        self._unused = dict(unused or {})
        self._lanes = (Lane(0, spec, modules),) if lanes is None else tuple(lanes)
        self._devices = dict(devices or _devices(self._lanes, self._ranks, transport))
        agree(transport, "the programs", lambda: (True, self._describe(schedule, optimizer)))
        firsts = lane_ranks(self._ranks, 0)
        place(schedule, spec, firsts, max(microbatches, 1), transport.ranks)
        self._meshes: Meshes | None = None
        if spec.sharding is not None:
            self._meshes = Meshes(mesh_of(spec), self._lanes, self._ranks, transport)
        leave = _nobody if self._meshes is None else self._meshes.leave
        self._crew = Crew([lane.index for lane in self._lanes], leave)
        self._state = ModelState(self._lanes, self._ranks, transport, self._devices)
        self._sharded_state = ShardedState(self._state, self._meshes)
        self._held = Held(self._state, self._meshes)
        self._feed = LaneFeed(self._lanes)
        self._engine = self._make_engine(
            self._lanes,
            schedule,
            after_backward=self._held.after_backward if self._held.zero == 2 else None,
        )
        self._eval: tuple[LaneFeed, Engine] | None = None
        self._pending = 0  # batches accumulated since the last update
        self._stale = False  # gradients are those that the last update used, ties summed
        self.optimizer: torch.optim.Optimizer | None = None
        if optimizer is not None:
            self.optimizer = make_optimizer(optimizer, [p for _, p in self._state.parameters()])
            check_elementwise(self.optimizer, self._held.cut())
            self._held.install(self.optimizer)
        self._recorder: Recorder | None = None
        self._phases = self._update_phases()
        self._doing = tuple(do for _, do in self._phases)

    @property
    def rank(self) -> int:
        """This process's rank; 0 where one process holds them all."""
        return self._transport.local[0]

    @property
    def transport(self) -> Transport:
        """What moves tensors and messages between the ranks."""
        return self._transport

    # -- training -------------------------------------------------------------------------------

    def step(self, batch: Any, accumulate: bool = False) -> torch.Tensor:
        """One training step on the global batch; the loss (0-d, equal on every rank).

        accumulate: only add to the gradients; the next step without it updates with all of them.
        Raises FXP105 for a batch that does not fit, FXP501 if ranks have different ones (nothing
        was sent then), FXP503 and FXP504 for a failed transfer or stage (nothing was updated, the
        gradients are dropped).
        """
        loss = self.backward(batch)
        if not accumulate:
            self.update()
        return loss

    def backward(self, batch: Any) -> torch.Tensor:
        """Add the batch's gradients to what was accumulated since the last update; the loss."""
        if not self.spec.loss:
            raise error(
                "FXP106", where="trainer", why="the program has no loss", fix="compile with loss="
            )
        if self._recorder is not None:
            self._recorder.begin(self.calls)
        read = self._read(self._feed, batch, "training")
        if self._stale:
            self.zero_grad()
        try:
            cuts = self._feed.parts(read.value)
            keys = self._keys(read.value)
            loss = self._engine.run(cuts, keys, train=True, gate=read.confirm).loss
            if self._held.zero == 2 and self.spec.ties:
                with reporting(self._transport, "sharing gradients"):
                    self._each_lane(self._held.collect)
        except BaseException:
            if read.confirmed:
                self.zero_grad()
            raise
        self.calls += 1
        self._pending += 1
        if self._recorder is not None:
            self._recorder.end()
        assert loss is not None
        return loss

    def update(self) -> None:
        """Sum over lanes, share ties, clip, let the optimizer step; then gradients start from zero.

        Does nothing if no batch came since the last update.
        """
        if self.optimizer is None:
            raise error(
                "FXP109",
                where="update()",
                why="the trainer was made without an optimizer",
                fix="program.trainer(optimizer=torch.optim.AdamW)",
            )
        if not self._pending:
            return
        for do in self._doing:
            do()
        self._stale, self._pending = True, 0
        if self._recorder is not None:
            self._recorder.end()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._held.reset()
        self._stale, self._pending = False, 0

    def eval_step(self, batch: Any) -> torch.Tensor:
        """The loss of a batch in evaluation mode, without gradients; equal on every rank."""
        feed, engine = self._evaluator()
        read = self._read(feed, batch, "evaluation")
        cuts, keys = feed.parts(read.value), self._keys(read.value)
        loss = engine.run(cuts, keys, train=False, gate=read.confirm).loss
        if loss is None:
            raise error("FXP106", where="eval_step", why="the program has no loss", fix="")
        return loss

    def record(self, *, baseline: int | None = None) -> AbstractContextManager[Recorder]:
        """Measure the training steps within: what each rank does when, and its memory.

            with trainer.record() as recorder:
                trainer.step(batch)
            recorder.recording.summary()

        Every rank must begin and end it at the same steps; when it ends, what was measured is
        exchanged. If the block raises, nothing is. Recording changes no number of the training.
        baseline: bytes of this process before it held the model, if they are known.
        """
        recorder = Recorder(
            self._transport, self._ranks, self._devices,
            schedule=self._schedule, microbatches=self.microbatches, baseline=baseline,
        )  # fmt: skip
        return recorder.during(self._attach)

    # -- state ----------------------------------------------------------------------------------

    def state_dict(
        self, *, first_only: bool = False, sharded: bool = False
    ) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers by original name, aliases too, copied and whole.

        first_only: only rank 0 gets them, the others an empty dict. sharded: DTensors instead, of
        what this rank's own stage holds (for torch.distributed.checkpoint); nothing is gathered.
        Every rank must call it.
        """
        if sharded:
            found: dict[str, torch.Tensor] = {**self._sharded_state.give()}
            found.update({name: t.detach().clone() for name, t in self._unused.items()})
            found.update({a: found[m] for a, m in self.spec.aliases.items() if m in found})
            return found
        own = {name: entry.owned() for name, entry in self._state.saved()}
        with reporting(self._transport, "gathering state"):
            found = self._state.gather(own, first_only=first_only)
        if not first_only or 0 in self._transport.local:
            found.update({name: t.detach().clone() for name, t in self._unused.items()})
            found.update({a: found[m] for a, m in self.spec.aliases.items() if m in found})
        return found

    def load_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """Take parameters and buffers by original name; FXP110 on every rank if they do not fit.

        state: whole tensors, of which each rank takes its part; or, as ``state_dict(sharded=True)``
        gives them, DTensors of any layout.
        """
        inner = {n: t for n, t in state.items() if n not in self._unused}
        text = "parts" if has_parts(inner) else " ".join(sorted(state))
        agree(
            self._transport, "the state dict",
            lambda: (self._state.load(inner, strict=strict), text),
        )  # fmt: skip
        for name, tensor in self._unused.items():
            if name in state:
                tensor.copy_(state[name])

    def optimizer_state_dict(self, *, first_only: bool = False) -> dict[str, Any]:
        """``{"state": {name: {...}}, "param_groups": [...]}`` by original parameter name."""
        assert self.optimizer is not None, "there is no optimizer"
        with reporting(self._transport, "gathering optimizer state"):
            return gather_optimizer(self._state, self._held, self.optimizer, first_only=first_only)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`optimizer_state_dict` gave, whatever the number of ranks was."""
        assert self.optimizer is not None, "there is no optimizer"
        load_optimizer(self._state, self._held, self.optimizer, state)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients by original name on every rank: accumulated, or as the last update had them."""
        with reporting(self._transport, "gathering gradients"):
            own = self._each_lane(partial(self._held.current, summed=self._stale))
            return gather_gradients(self._state, self._held, own)

    def close(self) -> None:
        """Give back the transport's resources; the trainer cannot be used after it."""
        self._crew.close()
        if self._meshes is not None:
            self._meshes.close()
        self._transport.close()

    # -- inner ----------------------------------------------------------------------------------

    def _attach(self, recorder: Recorder | None) -> None:
        if recorder is not None and self._recorder is not None:
            raise error("FXP109", where="record()", why="a recording is under way", fix="end it")
        self._recorder = recorder
        self._engine.record(recorder)
        if self._meshes is not None:
            self._meshes.watch(None if recorder is None else lambda r: recorder.pen(r).meeting)
        self._doing = tuple(
            do if recorder is None else recorder.timed(name, do) for name, do in self._phases
        )

    def _update_phases(self) -> tuple[Phase, ...]:
        return (
            (SUMS, lambda: self._gradients(lambda: self._each_lane(self._held.finish))),
            (TIES, lambda: self._gradients(lambda: share_ties(self._state, self._held))),
            (CLIP, self._clip),
            (OPTIMIZER, self._optimize),
            (SPREAD, self._spread),
        )

    def _gradients(self, do: Callable[[], object]) -> None:
        with reporting(self._transport, "sharing gradients"):
            do()

    def _clip(self) -> None:
        if self.clip_norm is not None:
            with reporting(self._transport, "sharing gradients"):
                self.last_grad_norm = clip(self._state, self._held, self.clip_norm)

    def _optimize(self) -> None:
        assert self.optimizer is not None, "an update needs one"
        self.optimizer.step()

    def _spread(self) -> None:
        with reporting(self._transport, "sharing parameters"):
            self._each_lane(self._held.spread)

    def _keys(self, cut: Cut) -> list[int]:
        return [microbatch_key(self.seed, self.calls, i) for i in range(len(cut.rows))]

    def _each_lane(self, do: Callable[[Lane], T]) -> dict[int, T]:
        """``do`` for every lane of this process, at the same time."""
        try:
            return self._crew.together({lane.index: partial(do, lane) for lane in self._lanes})
        finally:
            if self._meshes is not None:
                self._meshes.recover()

    def _make_engine(
        self,
        lanes: Sequence[Lane],
        schedule: str,
        after_backward: Callable[[int, int], None] | None = None,
    ) -> Engine:
        return Engine(
            lanes,
            self._ranks,
            self._transport,
            self._devices,
            schedule=schedule,
            meshes=self._meshes,
            crew=self._crew,
            after_backward=after_backward,
        )

    def _read(self, feed: LaneFeed, batch: Any, mode: str) -> Pending[Cut]:
        def read() -> tuple[Cut, str]:
            cut = feed.read(batch, self.microbatches)
            return cut, f"{mode} call {self.calls} {cut.describe()}"

        return Pending(self._transport, "the batches", read)

    def _evaluator(self) -> tuple[LaneFeed, Engine]:
        if self._eval is None:
            if self._evaluation is None:
                raise error(
                    "FXP109", where="eval_step", why="the trainer has no evaluation program", fix=""
                )
            made = self._evaluation()
            lanes = [Lane(0, *made)] if isinstance(made, tuple) else list(made)
            if self._meshes is not None:
                for lane in lanes:
                    self._meshes.attach(lane.index, lane.modules)
            self._eval = (LaneFeed(lanes), self._make_engine(lanes, "forward"))
        return self._eval

    def _describe(self, schedule: str, optimizer: Any) -> str:
        kind = getattr(optimizer, "func", optimizer)
        name = getattr(kind, "__qualname__", None) or type(kind).__name__
        return (
            f"ranks {self._ranks} microbatches {self.microbatches} schedule {schedule} "
            f"seed {self.seed} clip {self.clip_norm} optimizer {name} "
            f"program {shared_text(self.spec)}"
        )


def _nobody(lane: int, cause: BaseException | str) -> None:
    """A single lane: nobody waits for it."""


def _devices(lanes: Sequence[Lane], ranks: Ranks, transport: Transport) -> dict[int, torch.device]:
    """Where each local rank's state is; the CPU for a rank without state."""
    found = dict.fromkeys(transport.local, torch.device("cpu"))
    for lane in lanes:
        for stage, module in lane.modules.items():
            for tensor in [*module.parameters(), *module.buffers()]:
                found[ranks[stage][lane.index]] = tensor.device
                break
    return found
