"""``fxpart profile``: measure what plans of a model would be made of, until the budget is used.

In turn: every distinct op at the sizes that plans would use; the stages of the best few plans,
whole; factors fitted to these; how ranks of this host slow each other down on the model; the stages
of the plan that is best by all this, or of given ones; where all devices are this host's
processors, the plans that may be the best, run by real ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fxpart.cluster import Cluster
from fxpart.errors import FxpartError
from fxpart.front import Asked, Front, make_front
from fxpart.measuring.group import likes
from fxpart.measuring.phases import Phases
from fxpart.measuring.planned import check_places
from fxpart.measuring.profiled import Profiled
from fxpart.measuring.run import Progress
from fxpart.measuring.setting import on_device, setting
from fxpart.plan import Plan
from fxpart.profile import Profile
from fxpart.requests import Request, make_request

if TYPE_CHECKING:
    from fxpart.target import Workload

_CAPTURING = 0.1  # of the budget, at most
_GRAPH = ("granularity", "precision")  # constraints that say what the ops and blocks are


def profile(
    workload: Workload,
    cluster: Cluster | str | Path,
    path: str | Path,
    *,
    budget: float = 60.0,
    batch_size: int | None = None,
    microbatches: int | None = None,
    optimizer: Any = None,
    constraints: Mapping[str, int | float | str | bool] | None = None,
    seed: int = 0,
    batch_dims: Mapping[str, int | None] | None = None,
    date: str = "",
    progress: Progress | None = None,
    rehearse: bool = True,
    plans: Sequence[Plan] = (),
) -> Profiled:
    """Measure the workload's ops, stages, crowding and best plans into the profile at ``path``.

    The profile is made where there is none; what it holds for this device is not measured again.
    budget: seconds for measurements, and for capturing the model as far as that is short. rehearse:
    run the plans that may be the best, where all devices of the cluster are this host's processors.
    plans: measure the stages that they put on devices like the cluster's first, before all else and
    in half of the budget at most. date: YYYY-MM-DD, kept with them. progress: told what is
    measured. The other arguments are those of :func:`fxpart.compile`, and so are errors; FXP602
    where the cluster's first device is not of this machine's kind; of plans FXP304 (of another
    model), FXP105 (for another batch size) and FXP305 (no device of this kind).
    """
    asked = Asked(batch_size, microbatches, optimizer, "roofline", constraints or {}, seed)
    made = Profiling.of(
        workload, cluster, asked, batch_dims=batch_dims, date=date, progress=progress,
        rehearse=rehearse, plans=tuple(plans),
    )  # fmt: skip
    check_places(plans, made.front.request.cluster.devices[:1])
    return made.run(path, budget)


@dataclass(frozen=True)
class Profiling:
    """What is profiled, captured once, and how; see :func:`profile`.

    front: for the whole cluster. captured: how many seconds that took.
    """

    front: Front
    captured: float
    microbatches: int | None
    date: str
    progress: Progress
    rehearse: bool
    plans: tuple[Plan, ...]

    @classmethod
    def of(
        cls,
        workload: Workload,
        cluster: Cluster | str | Path,
        asked: Asked,
        *,
        batch_dims: Mapping[str, int | None] | None = None,
        date: str = "",
        progress: Progress | None = None,
        rehearse: bool = True,
        plans: tuple[Plan, ...] = (),
    ) -> Profiling:
        """Capture the workload; what ``asked`` leaves open is the workload's own."""
        start = time.monotonic()
        optimizer = asked.optimizer if asked.optimizer is not None else workload.optimizer
        batch_size = asked.batch_size or workload.batch_size
        front = make_front(
            workload.model,
            cluster,
            None,
            (workload.example, workload.example_kwargs),
            replace(asked, batch_size=batch_size, optimizer=optimizer),
            {"loss": workload.loss, "batch_dims": batch_dims},
        )
        took = time.monotonic() - start
        return cls(front, took, asked.microbatches, date, progress or _silent, rehearse, plans)

    def run(self, path: str | Path, budget: float, *, place: int = 0) -> Profiled:
        """Measure on this device, which is the cluster's device number ``place``."""
        device = self.front.request.cluster.devices[place]
        start = time.monotonic()
        with on_device(device) as here, Profile(path, create=True) as held:
            found = Phases(
                front=_of_one_kind(self.front, place),
                whole=self.front,
                profile=held,
                device=here,
                setting=setting(device.model, here),
                microbatches=self.microbatches,
                start=start - min(self.captured, _CAPTURING * budget),
                budget=budget,
                date=self.date,
                progress=self.progress,
                rehearse=self.rehearse,
                plans=self.plans,
            ).run()
        took = time.monotonic() - start
        return msgspec.structs.replace(found, capture_seconds=self.captured, seconds=took)


def _of_one_kind(front: Front, place: int) -> Front:
    """For the devices of this one's kind alone: what others take is not measured here.

    Wishes for the whole cluster that these alone cannot keep are left out.
    """
    asked = front.request
    part = likes(asked.cluster, asked.cluster.devices[place])
    if part == asked.cluster:
        return front

    def request(constraints: Mapping[str, int | float | str | bool]) -> Request:
        return make_request(part, asked.optimizer, asked.cost_model, constraints, asked.seed)

    try:
        return replace(front, request=request(asked.constraints))
    except FxpartError:
        kept = {name: value for name, value in asked.constraints.items() if name in _GRAPH}
        return replace(front, request=request(kept))


def _silent(what: str, done: int, of: int) -> None:
    """Nobody listens."""
