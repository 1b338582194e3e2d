"""``fxpart profile``: measure what plans of a model would be made of, until the budget is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fxpart.profile import Calibration, Crowding

if TYPE_CHECKING:
    from fxpart.cluster import Cluster
    from fxpart.target import Workload

# What is being measured ("ops", "stages", "runtime", "crowding"), how many of how many are done.
Progress = Callable[[str, int, int], None]


class Profiled(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of ``fxpart profile`` did.

    ops, stages: measured now; known_ops, known_stages: found in the profile. calibration,
    crowding: of this model here, None where there was no time for them. median_error, worst_error:
    of stages predicted from ops with these factors, relative. plan: the best plan in words;
    step_seconds: what it is predicted to take. left_out: in words, what the budget did not reach.
    """

    path: str
    model: str
    device: str
    seconds: float
    ops: int = 0
    known_ops: int = 0
    stages: int = 0
    known_stages: int = 0
    calibration: Calibration | None = None
    crowding: Crowding | None = None
    median_error: float = 0.0
    worst_error: float = 0.0
    plan: str = ""
    step_seconds: float = 0.0
    left_out: tuple[str, ...] = ()


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
) -> Profiled:
    """Measure the workload's ops, best stages and crowding into the profile at ``path``.

    The profile is made where there is none; what it holds for this device is not measured again.
    budget: seconds for measurements. date: YYYY-MM-DD, kept with them. progress: told what is
    measured. The other arguments are those of :func:`fxpart.compile`, and so are errors.
    """
    raise NotImplementedError
