"""An engine: what fxpart writes for it and reads from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fxpart.errors import error
from fxpart.interop.engines.plan_degrees import PlanDegrees
from fxpart.solver.joint.constraints.megatron_layout import format_layout


@dataclass(frozen=True)
class EngineConfiguration:
    """A plan as the configuration of an engine.

    files: text by file name, the first is the main one. launch: the command that runs them. lost:
    what of the plan the engine cannot express, as sentences.
    """

    files: Mapping[str, str]
    launch: str
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineRun:
    """What a configuration of an engine decides, in the planner's terms.

    constraints: of :func:`fxpart.compile`, without the data-parallel degree and microbatches. data:
    the data-parallel degree, None if the engine uses all devices that are left. microbatch_rows:
    rows of a microbatch on a data-parallel rank. microbatches: per step, None if they follow from
    the batch. batch_size: global, None if it follows from the microbatches. lost: what of the
    configuration is not priced, as sentences. divide: returns the layers of each stage of the
    program, virtual ones too, from the model's number of layers; () where the engine refuses it.
    """

    constraints: Mapping[str, int | float | str | bool]
    data: int | None = None
    microbatch_rows: int = 1
    microbatches: int | None = None
    batch_size: int | None = None
    lost: tuple[str, ...] = ()
    divide: Callable[[int], tuple[int, ...]] | None = None

    def with_stages(self, layers: int) -> EngineRun:
        """Return the run with the engine's own division of a model's layers into stages.

        The boundaries of the planner are priced where there is none.
        """
        stages = int(self.constraints["pp"])
        if stages == 1 or "layout" in self.constraints:
            return self
        counts = self.divide(layers) if layers and self.divide is not None else ()
        if not counts or 0 in counts[1:-1]:
            if any("boundaries" in sentence for sentence in self.lost):
                return self
            lost = (*self.lost, "The stage boundaries are not known; the planner's are priced.")
            return replace(self, lost=lost)
        found = {**self.constraints, "layout": format_layout(counts)}
        if len(counts) > stages:
            found["virtual"] = len(counts) // stages
        return replace(self, constraints=found)

    def resolve(self, devices: int) -> EngineRun:
        """Return the run on a number of devices, with the degree and the counts that follow.

        ``constraints`` of the result has them, too. Raises FXP502 for too few devices.
        """
        given = self.constraints
        model = int(given["tp"]) * int(given["pp"]) * int(given.get("cp", 1))
        data = self.data or devices // model
        if not 0 < data * model <= devices:
            raise error(
                "FXP502",
                where=f"{devices} devices",
                why=f"The configuration needs {max(data, 1) * model} devices.",
                fix="Pass its cluster with --cluster.",
            )
        lost = list(self.lost)
        rows = self.microbatch_rows * data
        count = self.microbatches or max(1, (self.batch_size or rows) // rows)
        if self.batch_size not in (None, count * rows):
            lost.append(f"A step of {self.batch_size} rows is priced as one of {count * rows}.")
        return EngineRun(
            {**self.constraints, "dp": data, "microbatches": count},
            data, self.microbatch_rows, count, count * rows, tuple(lost), self.divide,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One engine.

    package: on PyPI. version: whose names of options are used. summary: what is written. write:
    returns the configuration of a plan. read: returns what a configuration text decides, from the
    text and its name for messages; None where fxpart reads none. looks_like: whether ``read`` may
    accept a text.
    """

    name: str
    package: str
    version: str
    summary: str
    write: Callable[[PlanDegrees], EngineConfiguration]
    read: Callable[[str, str], EngineRun] | None = None
    looks_like: Callable[[str], bool] | None = None
