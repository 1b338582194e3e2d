"""Cost models of profiles that tests write: one op at sizes of their own, seconds as they say."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec
from fxpart.costmodels import ProfileCostModel, find
from fxpart.costmodels.op_keys import op_key
from fxpart.costmodels.profile_store import (
    Calibration,
    ContentionProfile,
    MeasurementEnvironment,
    Profile,
    TimeQuartiles,
    chip,
)

from fxpart.cluster.model import Cluster
from fxpart.costs import OpSpec, TensorSpec

HERE = MeasurementEnvironment(device="cpu", chip=chip(), threads=1, torch="2.11.0")


def linear(rows: int, width: int = 64) -> OpSpec:
    """x [rows, 64] times w [width, 64]."""
    x, w, y = ((rows, 64), (width, 64), (rows, width))
    tensors_ = [TensorSpec(shape, "float32") for shape in (x, w, y)]
    return OpSpec("aten.linear.default", (tensors_[0], tensors_[1]), (tensors_[2],), (), 2, (0, 1))


@cache
def local(ranks: int) -> Cluster:
    return Cluster.local(ranks)


def cluster(ranks: int = 2, **changes: object) -> Cluster:
    devices = tuple(msgspec.structs.replace(d, threads=1) for d in local(ranks).devices)
    return msgspec.structs.replace(local(ranks), devices=devices, **changes)


def measured(
    ops_: Mapping[str, float],
    on: Cluster | None = None,
    calibrations: Mapping[str, Calibration] | None = None,
    contention: Mapping[str, ContentionProfile] | None = None,
) -> ProfileCostModel:
    """A model of a profile with these seconds by key and direction."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.profile"
        with Profile(path, create=True) as profile:
            profile.put("ops", HERE, {k: TimeQuartiles(s, s, s, 5) for k, s in ops_.items()})
            profile.put("calibrations", HERE, calibrations or {})
            profile.put(
                "crowding", HERE, contention or {"": ContentionProfile(slowdown=(1.0, 1.5))}
            )
        found = find(path, on or cluster())
    assert isinstance(found, ProfileCostModel)
    return found


def ahead(op: OpSpec) -> str:
    return f"{op_key(op)} forward"
