"""What a trainer is made of, put together and compared between the ranks before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import nn

from fxpart.errors import FxpartError, error
from fxpart.events.event import LEFT
from fxpart.events.ring import Ring
from fxpart.program import ProgramSpec
from fxpart.rng import microbatch_key
from fxpart.runtime.agreement import agree
from fxpart.runtime.ambient import Ambient, process_modes
from fxpart.runtime.asks import Asks
from fxpart.runtime.batch import Cut
from fxpart.runtime.compiled import Compiled, Compiler, backend_of, compile_stages
from fxpart.runtime.engine import Engine, place
from fxpart.runtime.entry_point import EntryPoints
from fxpart.runtime.executor import Around
from fxpart.runtime.groups import Group, Groups, own
from fxpart.runtime.held import Held
from fxpart.runtime.lane_batch import LaneFeed
from fxpart.runtime.lanes import Crew, Lane, Ranks, lane_ranks, mesh_of, rank_table, shared_text
from fxpart.runtime.meshes import Meshes, sum_axes
from fxpart.runtime.needs import Needs
from fxpart.runtime.optimizer import (
    check_elementwise,
    describe_groups,
    groups_of,
    make_optimizer,
)
from fxpart.runtime.options import Options
from fxpart.runtime.outputs import Outputs
from fxpart.runtime.pinning import Pinned, pin_rank
from fxpart.runtime.reading import Reading, Source
from fxpart.runtime.rows import check_gradients
from fxpart.runtime.sharded_state import ShardedState
from fxpart.runtime.slow import Pace
from fxpart.runtime.state import ModelState
from fxpart.runtime.transport import Transport
from fxpart.schedule.action import Kind, Schedule

T = TypeVar("T")
Prediction = Callable[[bool], tuple[Sequence[Lane], Outputs]]
Evaluation = Callable[[], tuple[ProgramSpec, Mapping[int, nn.Module]] | Sequence[Lane]]


class Assembly(EntryPoints):
    """The parts of a trainer, which its own methods and those of its bases share.

    options: what it was given. optimizer: this process's torch optimizer, for learning-rate
    schedulers and options. events: what this process did last, in memory until it is given a file.
    pace: how long each rank computes, and whether one has become slow.
    ambient: the modes of torch that the program was compiled under.
    asks: what this process asks of all, and what it heard. shared_rows: whether sparse gradients
    of tables that several stages hold stay sparse. flows: stages do not wait for each other between
    steps. repeats: the same once more gives the same bits, where the device's operations do.
    """

    shared_rows = True
    flows = False
    repeats = True

    def __init__(
        self,
        spec: ProgramSpec,
        modules: Mapping[int, nn.Module],
        *,
        ranks: Sequence[int | Sequence[int]],
        transport: Transport,
        optimizer: Any = None,
        groups: Groups | None = None,
        evaluation: Evaluation | None = None,
        prediction: Prediction | None = None,
        devices: Mapping[int, torch.device] | None = None,
        unused: Mapping[str, torch.Tensor] | None = None,
        lanes: Sequence[Lane] | None = None,
        **options: Any,
    ) -> None:
        """modules: the stage modules of this process, by stage. ranks: the rank of each stage.

        lanes: of a sharded program, those of this process (``spec`` is that of any lane, and
        ``modules`` is not looked at); ranks: of each stage, the rank of each lane, or that of the
        first where the others follow it.

        optimizer: see :func:`~fxpart.runtime.optimizer.make_optimizer`; None to compute gradients
        only. groups: its parameter groups by name, see :func:`~fxpart.runtime.groups.assign`.
        evaluation: gives the program and modules (or the lanes) for ``eval_step`` when it is
        first called; they share the state of ``modules``. prediction: gives the lanes for
        ``predict`` and what they return; its argument says whether with the loss, too. devices: per
        local rank, by default where its parameters are. unused: state that no stage needs, for
        ``state_dict``. options: the fields of :class:`~fxpart.runtime.options.Options`.

        Raises FXP501 on every rank where they were not given the same.
        """
        self.spec = spec
        self.options = Options.of(options)
        self.calls = 0
        self.ambient = Ambient()
        self._ranks = rank_table(ranks, mesh_of(spec).size)
        self._transport = transport
        self.events = Ring(transport.local[0])
        self.pace = Pace(self._ranks, warns=0 in transport.local)
        self.asks = Asks(alone=len(transport.local) == transport.ranks)
        self._evaluation = evaluation
        self._prediction = prediction
        self._unused = dict(unused or {})
        self._lanes = (Lane(0, spec, modules),) if lanes is None else tuple(lanes)
        self._devices = dict(devices or _devices(self._lanes, self._ranks, transport))
        agree(transport, "the programs", lambda: (True, self._describe(optimizer)))
        firsts = lane_ranks(self._ranks, 0)
        schedule = self.options.schedule
        placed = place(schedule, spec, firsts, max(self.microbatches, 1), transport.ranks)
        self._meshes: Meshes | None = None
        if spec.sharding is not None:
            sums = sum_axes(spec.sharding)
            self._meshes = Meshes(mesh_of(spec), self._lanes, self._ranks, transport, sums)
        leave = _nobody if self._meshes is None else self._meshes.leave
        self._crew = Crew([lane.index for lane in self._lanes], leave)
        self._compiler = self._compile(any(a.kind is Kind.W for row in placed.ranks for a in row))
        self._pinned = pin_rank(self.options.pin, transport)
        self._state = ModelState(self._lanes, self._ranks, transport, self._devices)
        self._sharded_state = ShardedState(self._state, self._meshes)
        self._held = Held(self._state, self._meshes, shared_rows=self.shared_rows)
        self._feed = LaneFeed(self._lanes)
        self._source = Source(self._feed, self.microbatches)
        self._engine = self._make_engine(
            self._lanes,
            schedule,
            around=self._held.around,
        )
        self._eval: tuple[Source, Engine] | None = None
        self._predictors: dict[bool, tuple[Source, Engine, Outputs]] = {}
        self._pending = 0  # batches accumulated since the last update
        self._stale = False  # gradients are those that the last update used, ties summed
        self._groups: tuple[Group, ...] = ()
        self.optimizer: torch.optim.Optimizer | None = None
        if optimizer is not None:
            self.optimizer = self._make_optimizer(optimizer, groups)

    @property
    def microbatches(self) -> int:
        """Into how many a batch is cut."""
        return self.options.microbatches

    @property
    def seed(self) -> int:
        """What seeds the random ops."""
        return self.spec.seed if self.options.seed is None else self.options.seed

    @property
    def rank(self) -> int:
        """This process's rank; 0 where one process holds them all."""
        return self._transport.local[0]

    @property
    def transport(self) -> Transport:
        """What moves tensors and messages between the ranks."""
        return self._transport

    @cached_property
    def needs(self) -> Needs:
        """What this process needs of each batch: names, rows, and a sampler for a DataLoader."""
        return Needs.of(self._lanes, self._feed.needed, self.microbatches)

    @property
    def compiled(self) -> Compiled | None:
        """What torch.compile made of this process's stages until now; None where none is."""
        return None if self._compiler is None else self._compiler.found()

    @property
    def pinned(self) -> Pinned:
        """The cores of this process, or why it has none of its own."""
        return self._pinned

    def close(self) -> None:
        """Give back the transport's resources; the trainer cannot be used after it."""
        self.events.put(LEFT, "end")
        self._crew.close()
        if self._meshes is not None:
            self._meshes.close()
        self._transport.close()
        self._pinned.restore()

    # -- inner ----------------------------------------------------------------------------------

    def _compile(self, splits: bool) -> Compiler | None:
        """Have the stages compiled, where that is asked for; every rank or none."""
        wanted = self.options.compile_stages
        if not backend_of(wanted):
            return None
        recompute = self.options.recomputes(len(self.spec.stages))
        return agree(
            self._transport, "compiled stages",
            lambda: (
                compile_stages(
                    wanted, self._lanes, list(self._devices.values()), recompute=recompute,
                    splits=splits,
                ),
                "",
            ),
        )  # fmt: skip

    def _keys(self, cut: Cut) -> list[int]:
        return [microbatch_key(self.seed, self.calls, i) for i in range(len(cut.rows))]

    def _each_lane(self, do: Callable[[Lane], T]) -> dict[int, T]:
        """``do`` for every lane of this process, at the same time."""
        try:
            return self._crew.together({lane.index: partial(do, lane) for lane in self._lanes})
        finally:
            if self._meshes is not None:
                self._meshes.recover()

    def _make_optimizer(self, given: Any, groups: Groups | None) -> torch.optim.Optimizer:
        """The optimizer of this process, with the same groups on every rank."""

        def make() -> tuple[torch.optim.Optimizer, str]:
            self._groups = groups_of(given, groups, self._state.trainable())
            mine = self._state.parameters()
            made = make_optimizer(given, [p for _, p in mine], own(self._groups, mine))
            check_elementwise(made, self._held.cut(), self._groups)
            check_gradients(made, self._state, self._held.rows)
            names = " ".join(",".join(group.names) for group in self._groups)
            return made, f"{describe_groups(made)} {names}"

        made = agree(self._transport, "the optimizer's parameter groups", make)
        self._held.install(made)
        return made

    def _make_engine(
        self,
        lanes: Sequence[Lane],
        schedule: str | Schedule,
        around: Callable[[int], Around | None] | None = None,
    ) -> Engine:
        return Engine(
            lanes,
            self._ranks,
            self._transport,
            self._devices,
            schedule=schedule,
            meshes=self._meshes,
            crew=self._crew,
            around=around,
            recompute=self.options.recomputes(len(self.spec.stages)),
            events=self.events,
        )

    def _read(self, source: Source, batch: Any, mode: str, local: bool = False) -> Reading:
        self._engine.check_whole()
        mode = f"{mode} call {self.calls}" + (f" after {self._pending}" if self._pending else "")
        if len(self._transport.local) < self._transport.ranks:
            mode += process_modes()
        return Reading(self._transport, source, batch, mode, local=local, asks=self.asks)

    def _evaluator(self) -> tuple[Source, Engine]:
        if self._eval is None:
            if self._evaluation is None:
                raise _no_evaluation("eval_step")
            made = self._evaluation()
            self._eval = self._forward_only([Lane(0, *made)] if isinstance(made, tuple) else made)
        return self._eval

    def _predictor(self, loss: bool) -> tuple[Source, Engine, Outputs]:
        if loss not in self._predictors:
            if self._prediction is None:
                raise _no_evaluation("predict")
            lanes, outputs = self._prediction(loss)
            self._predictors[loss] = (*self._forward_only(lanes), outputs)
        return self._predictors[loss]

    def _forward_only(self, lanes: Sequence[Lane]) -> tuple[Source, Engine]:
        if self._meshes is not None:
            for lane in lanes:
                self._meshes.attach(lane.index, lane.modules)
        source = Source(LaneFeed(lanes), self.microbatches)
        return source, self._make_engine(lanes, "forward")

    def _describe(self, optimizer: Any) -> str:
        kind = getattr(optimizer, "func", optimizer)
        name = getattr(kind, "__qualname__", None) or type(kind).__name__
        return (
            f"ranks {self._ranks} seed {self.seed} {self.options.describe()} optimizer {name} "
            f"program {shared_text(self.spec)}"
        )


def _no_evaluation(call: str) -> FxpartError:
    return error(
        "FXP109", where=call, why="the trainer has no evaluation program",
        fix="a trainer of the model itself has one; one of an exported program has not",
    )  # fmt: skip


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
