"""The options of a trainer, which must be equal on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast, get_args

import torch

from fxpart.accelerator import is_accelerator
from fxpart.errors import FxpartError, Problem, error
from fxpart.optim import ManagedIds
from fxpart.plan.offload import OFFLOADS, offloads_activations
from fxpart.program.replica_groups import explain_unsupported_ties
from fxpart.program.spec import ProgramSpec
from fxpart.runtime.executor.recompute import Mode
from fxpart.runtime.mesh.mesh_ranks import Ranks
from fxpart.schedule.action import Schedule
from fxpart.schedule.spec import DEFAULT_SCHEDULE
from fxpart.schedule.text import to_text
from fxpart.schedule.weight_modes import (
    FLUSH,
    STASH,
    WeightMode,
    list_queue_modes,
    weight_mode,
)

Reason = tuple[str, str]  # What is not supported, and what to do.
Kind = Literal["synchronous", "asynchronous", "queue"]
Clip = Literal["stage", "delayed"]
CLIPS: tuple[Clip, ...] = ("stage", "delayed")
TURNS, QUEUE = "turns", "queue"


class _Limit(NamedTuple):
    """The kinds of trainers that have an option, what it is, and what to do with another kind."""

    kinds: tuple[Kind, ...]
    what: str
    fix: str


# The options that not every kind of trainer has.
_LIMITS = {
    "compile_stages": _Limit(
        ("synchronous", "asynchronous"), "compiled stages", "use compile_stages=False"
    ),
    "cuda_graphs": _Limit(("synchronous",), "CUDA graphs", "use cuda_graphs=False"),
    "offload": _Limit(("synchronous",), "offload=", "omit it"),
    "ema": _Limit(("synchronous", "asynchronous"), "a moving average of the weights", "omit ema="),
    "managed_ids": _Limit(("synchronous",), "managed_ids=", "omit it"),
    "log_grad_norm": _Limit(("synchronous", "asynchronous"), "log_grad_norm=", "omit it"),
    "warm_up": _Limit(("asynchronous", "queue"), "warm_up=", "omit it"),
    "scheduler": _Limit(
        ("asynchronous", "queue"), "scheduler=", "pass it to fit() or step it after each update"
    ),
    "clip": _Limit(("asynchronous",), "clip=", "omit it"),
    "guard": _Limit(("asynchronous",), "guard=", "omit it"),
    "total_updates": _Limit(("asynchronous",), "total_updates=", "omit it"),
    "watch": _Limit(("asynchronous",), "watch=", "omit it"),
    "staleness": _Limit(("queue",), "staleness=", f'use routing="{QUEUE}"'),
    "patience": _Limit(("queue",), "patience=", f'use routing="{QUEUE}"'),
}
ASYNCHRONOUS_OPTIONS = tuple(
    name for name, limit in _LIMITS.items() if limit.kinds[0] == "asynchronous"
)


def check_accumulate(accumulate: object) -> None:
    """Raise FXP105 where a second part of the batch was passed instead of a flag."""
    if not isinstance(accumulate, bool):
        raise error(
            "FXP105",
            where="step(batch, accumulate)",
            why=f"the second argument is a {type(accumulate).__name__}; a batch is one argument",
            fix="pass inputs and targets together: step((x, y))",
        )


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """The keyword arguments of :class:`~fxpart.runtime.trainer.Trainer` that are plain data.

    microbatches: number of microbatches of a batch (fewer if it has fewer rows). schedule: a name,
    or computations for stages on these ranks (or on others that share stages in the same way).
    clip_norm: maximum global gradient norm. clip_value: maximum absolute value of gradient
    elements; at most one of the two. log_grad_norm: compute the global norm at every update, also
    without clipping. seed: of random ops, by default the program's. recompute: activation
    recomputation ("none", "selective", "full"), of all stages or by stage: see
    :mod:`fxpart.runtime.executor.recompute`. offload: what is in host memory, "optimizer" (state
    and update), "activations" or "both": see :mod:`fxpart.runtime.optimizer.host_parameters` and
    :mod:`fxpart.runtime.executor.activation_offload`. compile_stages: a backend of torch.compile
    for each stage, or whether to use inductor: see :mod:`fxpart.runtime.executor.torch_compile`.
    pin: bind each local rank to its own cores, or "auto" if that is useful: see
    :mod:`fxpart.runtime.host.cpu_affinity`. gather_ahead: for how many blocks ZeRO-3 gathers
    parameters before their use; by default one on accelerators, and none on CPUs. cuda_graphs:
    record the kernels of each stage and replay them: see
    :mod:`fxpart.runtime.executor.cuda_graphs`. ema: the decay of an exponential moving average of
    the weights, such as 0.999, that every update continues: see
    :mod:`fxpart.runtime.optimizer.weight_average`. managed_ids: of tables whose rows ids get when
    they are seen: :class:`fxpart.optim.ManagedIds`.

    routing: "turns" (round-robin), or "queue": replicas take microbatches from queues. weights:
    weight mode or its name, of training without flushes; None: the pipeline is flushed at every
    update, or, with queues, "stash". warm_up: number of first updates that are synchronous.
    scheduler: function that makes a learning-rate scheduler for an optimizer, stepped once per
    update of training without flushes.

    Without flushes: clip: the norm that ``clip_norm`` limits: "stage", the gradients of each stage,
    or "delayed", the newest known global norm; if the pipeline is flushed after every minibatch, it
    is the exact global norm. guard: skip an update whose gradients are not all finite, and flush
    after every minibatch from then on. total_updates: number of updates after which the
    learning-rate discount of a weight mode ends; by default those of ``fit``, else 100 times the
    largest staleness. watch: measure prediction errors every so many updates; 0: never.

    With queues: staleness: largest number of updates that the gradients of a minibatch may miss,
    for all stages or per stage (replicas counted once); 0: synchronous. patience: seconds of
    silence after which a rank counts as lost.
    """

    microbatches: int
    schedule: str | Schedule = DEFAULT_SCHEDULE
    clip_norm: float | None = None
    clip_value: float | None = None
    log_grad_norm: bool = False
    seed: int | None = None
    recompute: str | Mapping[int, str] = "none"
    offload: str = "none"
    compile_stages: bool | str = False
    pin: bool | str = False
    gather_ahead: int | None = None
    cuda_graphs: bool = False
    ema: float | None = None
    managed_ids: Sequence[ManagedIds] = ()
    weights: str | WeightMode | None = None
    clip: Clip = "stage"
    warm_up: int = 0
    guard: bool = True
    scheduler: Callable[..., Any] | None = None
    total_updates: int | None = None
    watch: int = 0
    routing: str = TURNS
    staleness: int | Sequence[int] = 0
    patience: float = 30.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> TrainerOptions:
        """Build from keyword arguments; FXP109 for unknown options and invalid values."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                fix = f"use one of {', '.join(known)}"
                raise _make_error(name, "there is no such option", fix)
        made = cls(**given)
        for name in ("clip_norm", "clip_value", "ema", "gather_ahead", "patience"):
            value = getattr(made, name)
            if value is not None and not _is_number(value):
                raise _make_error(f"{name}={value!r}", "it is not a number", "pass a number")
        for name in ("clip_norm", "clip_value"):
            largest = getattr(made, name)
            if largest is not None and not largest > 0:
                raise _make_error(f"{name}={largest}", "it is not positive", "leave it out")
        if made.clip_norm is not None and made.clip_value is not None:
            raise _make_error("clip_norm, clip_value", "both are given", "pass only one of them")
        if made.gather_ahead is not None and made.gather_ahead < 0:
            where = f"gather_ahead={made.gather_ahead}"
            raise _make_error(where, "it is negative", "use 0 to gather parameters at their use")
        if made.ema is not None and not 0.0 <= made.ema < 1.0:
            where = f"ema={made.ema}"
            raise _make_error(where, "a decay is at least 0 and less than 1", "use 0.999")
        made.recomputes(0)
        made._check_offload()
        made._check_counts()
        made._check_kind()
        return made

    @property
    def kind(self) -> Kind:
        """The kind of the trainer."""
        if self.routing == QUEUE:
            return "queue"
        return "synchronous" if self.weights is None else "asynchronous"

    @cached_property
    def mode(self) -> WeightMode:
        """The weights that forwards and backwards read."""
        default = STASH if self.routing == QUEUE else FLUSH
        return weight_mode(default if self.weights is None else self.weights)

    @property
    def staleness_by_group(self) -> tuple[int, ...]:
        """The given staleness: one number for all groups of replicas, or one for each."""
        given = self.staleness
        return (given,) if isinstance(given, int) else tuple(given)

    def allowed(self, minibatch: int) -> int:
        """Return the updates that a minibatch may miss on some stage, with queues."""
        return max(self.staleness_by_group, default=0) if minibatch >= self.warm_up else 0

    def _check_counts(self) -> None:
        """Raise FXP109 for invalid values of the options of training without flushes."""
        problem, given = "", self.staleness
        single = isinstance(given, str) or not isinstance(given, Sequence)
        if self.routing not in (TURNS, QUEUE):
            problem = f"routing={self.routing!r} is unknown; use {TURNS} or {QUEUE}"
        elif self.clip not in CLIPS:
            problem = f"clip={self.clip!r} is unknown; use {' or '.join(CLIPS)}"
        elif not is_count(self.warm_up) or not is_count(self.watch):
            problem = "warm_up and watch must be integers of at least 0 (updates)"
        elif self.total_updates is not None and not is_count(self.total_updates):
            problem = f"total_updates={self.total_updates!r} must be an integer of at least 0"
        elif not isinstance(self.guard, bool):
            problem = f"guard={self.guard!r} must be True or False"
        elif self.scheduler is not None and not callable(self.scheduler):
            problem = "scheduler must be a function that makes a scheduler for an optimizer"
        elif not all(map(is_count, (given,) if single else cast(Sequence[Any], given))):
            problem = f"staleness={given!r} must be integers of at least 0 (updates)"
        elif not self.patience > 0:
            problem = f"patience={self.patience!r} must be above 0 seconds"
        elif self.kind == "queue" and self.mode.name not in list_queue_modes():
            known = " or ".join(list_queue_modes())
            problem = f"weights={self.mode.name!r} does not support queues; use {known}"
        if problem:
            raise _make_error("program.trainer", problem, "")

    def _check_offload(self) -> None:
        """Raise FXP109 for unknown values of ``offload``, and options that exclude activations."""
        where = f"offload={self.offload!r}"
        if self.offload not in OFFLOADS:
            raise _make_error(where, "there is no such option", f"use one of {', '.join(OFFLOADS)}")
        if not offloads_activations(self.offload):
            return
        given = self.recompute.values() if isinstance(self.recompute, Mapping) else [self.recompute]
        if "selective" in given:
            why = "selective recomputation stores results of ops on the device"
            raise _make_error(where, why, 'use recompute="full" or "none"')
        if self.cuda_graphs:
            why = "a recorded graph uses fixed memory for its activations"
            raise _make_error(where, why, 'use cuda_graphs=False, or offload="optimizer"')

    def _check_kind(self) -> None:
        """Raise FXP109 for options that this kind of trainer does not have."""
        defaults = {field.name: field.default for field in fields(self)}
        problems = [
            Problem("FXP109", self.describe_kind(), f"it does not support {limit.what}", limit.fix)
            for name, limit in _LIMITS.items()
            if self.kind not in limit.kinds and getattr(self, name) != defaults[name]
        ]
        if problems:
            raise FxpartError(problems)

    def describe_kind(self) -> str:
        """Return the kind of the trainer for messages."""
        if self.kind == "queue":
            return "routing=queue"
        return "a synchronous trainer" if self.weights is None else f"weights={self.mode.name}"

    def blocks_ahead(self, device: torch.device) -> int:
        """Return for how many blocks parameters are gathered ahead on a device."""
        return int(is_accelerator(device)) if self.gather_ahead is None else self.gather_ahead

    def recomputes(self, stages: int) -> dict[int, Mode]:
        """Return the recompute mode of each stage that does not store all activations."""
        given = self.recompute
        wanted = dict(given) if isinstance(given, Mapping) else dict.fromkeys(range(stages), given)
        for mode in (*wanted.values(), given) if isinstance(given, str) else wanted.values():
            if mode not in get_args(Mode):
                modes = ", ".join(get_args(Mode))
                raise _make_error(
                    f"recompute={mode!r}", "there is no such mode", f"use one of {modes}"
                )
        return {k: cast(Mode, mode) for k, mode in wanted.items() if mode != "none"}

    def describe(self) -> str:
        """Return all options as text for comparison between ranks."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if isinstance(self.schedule, Schedule):
            values["schedule"] = to_text(self.schedule)
        function = getattr(self.scheduler, "func", self.scheduler)
        values["scheduler"] = getattr(function, "__qualname__", type(function).__name__)
        values["weights"] = f"{self.kind} {self.mode}"
        return " ".join(f"{name} {value}" for name, value in values.items())

    @property
    def schedule_name(self) -> str:
        """The name of the schedule."""
        return self.schedule if isinstance(self.schedule, str) else self.schedule.name


def _make_error(where: str, why: str, fix: str) -> Exception:
    return error("FXP109", where=where, why=why, fix=fix)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool)


def is_count(value: object, least: int = 0) -> bool:
    """Return whether a value is an integer of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_program(spec: ProgramSpec, ranks: Ranks, options: TrainerOptions) -> None:
    """Raise FXP109 for programs that this kind of trainer does not support."""
    found: list[Reason] = []
    if options.kind != "synchronous":
        first_ranks = [row[0] for row in ranks]
        if len(set(first_ranks)) < len(first_ranks):
            found.append(("several stages per rank", "use one stage per rank"))
    if options.kind == "queue":
        found += _find_queue_reasons(spec)
    elif options.kind == "asynchronous":
        found += _find_unflushed_reasons(spec, options)
    if found:
        where = options.describe_kind()
        raise FxpartError(
            Problem("FXP109", where, f"it does not support {why}", fix) for why, fix in found
        )


def _find_unflushed_reasons(spec: ProgramSpec, options: TrainerOptions) -> Iterator[Reason]:
    sharding = spec.sharding
    if spec.replicas:
        fix = 'use constraints={"copies": "none"}'
        yield "replicated stages with round-robin routing", fix
    if sharding is not None and sharding.zero:
        yield "a sharded optimizer (ZeRO)", "use zero=0"
    if any(stage.ranks for stage in spec.stages):
        yield "stages of different tensor degrees", "use one tensor degree for all stages"
    if options.compile_stages and options.mode.backward != "forward":
        why = "compiled stages: their backward may recompute activations, with other weights than "
        yield f"{why}those of their forward", 'use compile_stages=False or weight_mode="stash"'
    cut = sharding is not None and any("S(" in s.placements for s in sharding.state.values())
    if cut and (options.clip_norm is not None or options.log_grad_norm):
        yield "gradient norms of sharded parameters", "use clip_value="


def _find_queue_reasons(spec: ProgramSpec) -> Iterator[Reason]:
    if spec.sharding is not None:
        yield "stages on several ranks", 'use constraints={"mesh": "none"}'
    for why in explain_unsupported_ties(spec):
        yield why, 'use routing="turns"'
