"""The table of constraints: names, kinds, choices, and prerequisites.

`CONSTRAINTS` has one entry for each key of the ``constraints`` of :func:`fxpart.compile`. Parsing,
checking, the command line and the documents read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from fxpart.plan.offload import AUTO, OFFLOADS
from fxpart.plan.precision import PRECISIONS, TRANSFER_DTYPES
from fxpart.schedule.spec import ASYNC, SCHEDULES, list_schedules
from fxpart.schedule.weight_modes import MODES

ConstraintKind = Literal[
    "choice", "count", "entries", "numbers", "seconds", "staleness", "text", "words"
]

DATA_AXIS = "dp"  # the axis of a mesh that divides the batch
SHARD_AXIS = "dp_shard"  # the minor part of it over which hybrid sharding shards ZeRO's state
DATA_AXES = (DATA_AXIS, SHARD_AXIS)
CONTEXT_AXIS = "cp"  # the axis that divides sequences
QUEUE = "queue"  # the mode in which replicas take microbatches from queues


@dataclass(frozen=True, kw_only=True)
class ConstraintSpec:
    """One constraint.

    summary: what it does, in one line. kind: "choice" is one of ``choices``; "count" a positive
    integer; "seconds" a positive number; "text" and "staleness" are checked where they are used;
    "entries" is a list of entries separated by ";". Decisions of a plan, which can be fixed to one
    value or several ("2,4") and forbidden, are "numbers" of at least ``least``, or "words" of
    ``choices``. choices: the values, or a function that lists them for a table that users extend.
    is_choice: returns whether a value is a choice without listing all. plain: the value that
    remains where a decision is forbidden without a value, "" if there is none. same_as: the
    decision that this is a synonym of. needs: the constraint without which this one has no effect.
    is_degree: whether it is an axis of a mesh.
    """

    name: str
    summary: str
    kind: ConstraintKind
    choices: tuple[str | int, ...] | Callable[[], Sequence[str]] = ()
    is_choice: Callable[[str], bool] | None = None
    least: int = 1
    plain: str = ""
    same_as: str = ""
    needs: str = ""
    is_degree: bool = False

    @property
    def is_decision(self) -> bool:
        """Return whether it is a decision, not a synonym."""
        return self.kind in ("numbers", "words")

    def list_choices(self) -> tuple[str | int, ...]:
        """Return the allowed values; () where they are not enumerated."""
        return tuple(self.choices()) if callable(self.choices) else self.choices

    def accepts(self, value: object) -> bool:
        """Return whether the value is one of the choices."""
        if self.is_choice is not None:
            return isinstance(value, str) and self.is_choice(value)
        return not isinstance(value, bool) and value in self.list_choices()


def _is_training_schedule(name: str) -> bool:
    spec = SCHEDULES.get(name)
    return spec is not None and spec.trains


def _list_training_schedules() -> Sequence[str]:
    return list_schedules(trains=True)


def _number(name: str, summary: str, *, least: int = 1, plain: str = "") -> ConstraintSpec:
    return ConstraintSpec(name=name, summary=summary, kind="numbers", least=least, plain=plain)


def _degree(name: str, summary: str) -> ConstraintSpec:
    return ConstraintSpec(name=name, summary=summary, kind="numbers", plain="1", is_degree=True)


def _synonym(name: str, same_as: str) -> ConstraintSpec:
    return ConstraintSpec(
        name=name, summary=f"Another name of {same_as}.", kind="text", same_as=same_as
    )


_TABLE = (
    ConstraintSpec(name="stages", summary="Number of stages.", kind="count", same_as="pp"),
    ConstraintSpec(
        name="granularity", kind="choice", choices=("block", "op"),
        summary="Where stages may begin: between blocks, or between operators.",
    ),
    ConstraintSpec(
        name="copies", kind="choice", choices=("auto", "none", "always"),
        summary="Whether stages may have replicas with round-robin routing of microbatches.",
    ),
    ConstraintSpec(
        name="solver", kind="choice", choices=("auto", "dp", "cp-sat"),
        summary="Solver of the partition problem.",
    ),
    ConstraintSpec(name="time_limit", kind="seconds", summary="Seconds that solvers may take."),
    ConstraintSpec(
        name="mesh", kind="text",
        summary='Ranks of each stage: axes such as "dp=2,tp=2", "none" for one rank, or "auto".',
    ),
    ConstraintSpec(
        name="annotations", kind="text", needs="mesh",
        summary="File or text that specifies how weights and inputs are sharded.",
    ),
    ConstraintSpec(
        name="placements", kind="choice", choices=("solver", "annotated"), needs="mesh",
        summary="How placements without annotations are selected.",
    ),
    ConstraintSpec(
        name="zero", kind="numbers", choices=(0, 1, 2, 3), least=0, plain="0",
        summary="ZeRO level: shard optimizer state (1), gradients (2), parameters (3).",
    ),
    ConstraintSpec(
        name="zero_axis", kind="text", needs="mesh",
        summary='Axis of the mesh that ZeRO shards; for zero=1 and 2 also several: "dp,cp".',
    ),
    _number(
        "shard_degree",
        "Data-parallel ranks over which ZeRO shards, below dp: hybrid sharding.",
        least=0, plain="0",
    ),
    ConstraintSpec(name="ranks", kind="count", summary="Number of ranks of the plan."),
    ConstraintSpec(
        name="forbid", kind="entries",
        summary='Forbidden decisions: "recompute;zero=3;cut=layers.5".',
    ),
    ConstraintSpec(
        name="stage", kind="entries", summary='Stages of blocks: "layers.0-11=0;lm_head=-1".'
    ),
    ConstraintSpec(
        name="layout", kind="entries", summary='Pipeline layout of Megatron-LM: "Ett|tt|ttL".'
    ),
    ConstraintSpec(
        name="precision", kind="choice", choices=PRECISIONS,
        summary="Precision in which the model computes.",
    ),
    ConstraintSpec(
        name="transfer_dtype", kind="choice", choices=TRANSFER_DTYPES,
        summary="Dtype in which float32 is sent between ranks.",
    ),
    ConstraintSpec(
        name="offload", kind="choice", choices=(*OFFLOADS, AUTO),
        summary="What is in host memory: optimizer state with the update, activations, or both.",
    ),
    ConstraintSpec(
        name="mode", kind="choice", choices=("sync", ASYNC, "auto", QUEUE),
        summary="Execution mode.",
    ),
    ConstraintSpec(
        name="weights", kind="choice", choices=lambda: tuple(MODES), is_choice=MODES.__contains__,
        summary="Weight mode of an asynchronous plan or of queues.",
    ),
    ConstraintSpec(
        name="staleness", kind="staleness", needs="mode=queue",
        summary='Updates that forwards may miss: one number, or one per stage ("2,0").',
    ),
    ConstraintSpec(
        name="staleness_penalty", kind="text", needs="mode=auto",
        summary="File of `fxpart emulate --penalty`: modes are compared by time to its loss.",
    ),
    ConstraintSpec(
        name="batch_coupling", kind="choice", choices=("per-microbatch",),
        summary="Accept batch statistics of each microbatch instead of the batch.",
    ),
    _degree("tp", 'Tensor-parallel degree; "1|2": that of each stage.'),
    _degree(DATA_AXIS, "Data-parallel degree."),
    _degree("ep", "Expert-parallel degree."),
    _degree(CONTEXT_AXIS, "Context-parallel degree."),
    _number("pp", "Number of stages, one or several.", plain="1"),
    _number("microbatches", "Microbatches per step."),
    _number("virtual", "Virtual stages per rank, in schedules that support them."),
    ConstraintSpec(
        name="schedule", kind="words", choices=_list_training_schedules,
        is_choice=_is_training_schedule, summary="Pipeline schedule.",
    ),
    ConstraintSpec(
        name="recompute", kind="words", choices=("none", "selective", "full"),
        plain="none", summary="Activations that the backward recomputes.",
    ),
    _synonym("m", "microbatches"),
    _synonym("tensor", "tp"),
    _synonym("data", "dp"),
    _synonym("expert", "ep"),
    _synonym("context", CONTEXT_AXIS),
)  # fmt: skip

CONSTRAINTS: dict[str, ConstraintSpec] = {spec.name: spec for spec in _TABLE}
DECISIONS = tuple(name for name, spec in CONSTRAINTS.items() if spec.is_decision)
DEGREES = tuple(name for name, spec in CONSTRAINTS.items() if spec.is_degree)


def get_decision(name: str) -> ConstraintSpec | None:
    """Return the decision of this name or synonym; None where there is none."""
    spec = CONSTRAINTS.get(name)
    if spec is not None and spec.same_as:
        spec = CONSTRAINTS[spec.same_as]
    return spec if spec is not None and spec.is_decision else None


def suggest_names(name: str, known: Sequence[str]) -> str:
    """Return a text with the nearest of the known names, and all of them."""
    near = get_close_matches(name, known, n=1)
    listed = f"one of {', '.join(known)}"
    return f"{near[0]!r}, the nearest name, or {listed}" if near else listed


def describe_constraints() -> list[tuple[str, str]]:
    """Return each constraint and its line of help, with its choices."""
    rows = []
    for spec in CONSTRAINTS.values():
        choices = ", ".join(str(choice) for choice in spec.list_choices() if choice != "")
        text = f"{spec.summary[:-1]}: {choices}." if choices else spec.summary
        rows.append((spec.name, f"{text} Needs {spec.needs}." if spec.needs else text))
    return rows
