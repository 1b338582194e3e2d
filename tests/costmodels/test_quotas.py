"""One profile of several quotas: what was measured under the nearest, or under another."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from fxpart.costmodels import ProfileCostModel, find
from fxpart.costmodels.profile_store import (
    Calibration,
    ContentionProfile,
    MeasurementEnvironment,
    Profile,
    StageMeasurement,
    TimeQuartiles,
    processor,
)
from written_profiles import HERE, ahead, cluster, linear

from fxpart.cluster.model import Cluster

changed = msgspec.structs.replace


def of_settings(taken: Mapping[MeasurementEnvironment, float], on: Cluster) -> ProfileCostModel:
    """A model of a profile with one op, one stage and a factor for each setting."""
    with tempfile.TemporaryDirectory() as folder:
        with Profile(Path(folder) / "a.db", create=True) as profile:
            for setting, s in taken.items():
                timing = TimeQuartiles(s, s, s, 3)
                stage = StageMeasurement(forward=timing, backward=timing, optimizer=timing, rows=2)
                profile.put("ops", setting, {ahead(linear(8)): timing})
                profile.put("stages", setting, {"s": stage})
                profile.put("calibrations", setting, {"x": Calibration(action=s)})
        found = find(Path(folder) / "a.db", on)
    assert isinstance(found, ProfileCostModel)
    return found


def test_a_quota_is_priced_by_what_was_measured_under_the_nearest() -> None:
    """Seconds are the processor's: of more of them under a quota, and longer by what it leaves."""
    quotas = (1.0, 0.85, 0.5, 0.3, 0.1)
    devices = tuple(
        changed(d, threads=1, quota=q if q < 1 else msgspec.UNSET)
        for d, q in zip(Cluster.local(5).devices, quotas, strict=True)
    )
    taken = {HERE: 1.0, changed(HERE, quota=0.8): 1.1, changed(HERE, quota=0.4): 1.3}
    found = of_settings(taken, changed(cluster(), devices=devices))
    nearest = (1.0, 1.1, 1.3, 1.3, 1.3)  # 0.85 is as 0.8, not as 1; 0.5, 0.3 and 0.1 are as 0.4
    for device, quota, seconds in zip(devices, quotas, nearest, strict=True):
        known = found.knowledge(device)
        assert known.stages["s"].forward.seconds == known.action == seconds
        cost = found.op(linear(8), device, False)
        assert cost.seconds == pytest.approx(seconds / quota)
    assert "limited to 0.4 cores" in found.origin and "limited to 0.8 cores" in found.origin
    whole = changed(cluster(), devices=devices[:1])
    assert "held" not in of_settings(taken, whole).origin


def test_a_process_that_was_pinned_under_a_quota_had_the_same_chip() -> None:
    """With fewer cores; without a quota they say how ranks slow each other down, and have to be."""
    on = changed(cluster(), devices=(changed(Cluster.local(1).devices[0], threads=1, quota=0.5),))
    pinned = changed(HERE, chip=f"{processor()} x 0", quota=0.5)
    for setting, found in (
        (pinned, pinned),
        (changed(pinned, quota=0.0), HERE),
        (changed(pinned, chip="another x 0"), HERE),
    ):
        known = of_settings({HERE: 1.0, setting: 1.3}, on)
        assert known.setting_of(on.devices[0]) == found


def test_what_was_not_measured_under_a_quota_is_taken_from_beside() -> None:
    """Ops, stages, and how ranks slow each other down."""
    device = changed(cluster().devices[0], quota=0.5)
    under = changed(HERE, quota=0.5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.db"
        with Profile(path, create=True) as profile:
            profile.put("ops", HERE, {ahead(linear(8)): TimeQuartiles(1.0, 1.0, 1.0, 3)})
            profile.put("crowding", HERE, {"x": ContentionProfile(slowdown=(1.0, 1.5), baseline=1)})
            profile.put("ops", under, {ahead(linear(4)): TimeQuartiles(2.0, 2.0, 2.0, 3)})
            profile.put("crowding", under, {"x": ContentionProfile(baseline=2)})
        found = find(path, changed(cluster(), devices=(device,)))
    assert isinstance(found, ProfileCostModel) and found.setting_of(device) == under
    times = [found.op(linear(rows), device, False).seconds for rows in (8, 4)]
    assert times == pytest.approx([2.0, 4.0])
    assert found.knowledge(device).contention == ContentionProfile(slowdown=(1.0, 1.5), baseline=1)


@pytest.mark.parametrize("common", [1, 3, 4])
def test_what_another_quota_took_is_lengthened_as_what_both_took(common: int) -> None:
    """By the median ratio of three entries that both have, or more; each direction by its own."""
    device = changed(cluster().devices[0], quota=0.5)
    under, slow = changed(HERE, quota=0.5), (1.1, 1.3, 2.0)

    def stage(*seconds: float) -> StageMeasurement:
        made = (TimeQuartiles(s, s, s, 3) for s in seconds)
        names = ("forward", "backward", "optimizer")
        return StageMeasurement(**dict(zip(names, made, strict=True)),
                           rows=2)  # fmt: skip

    def ops(rows: list[int], times: float) -> dict[str, TimeQuartiles]:
        return {ahead(linear(n)): TimeQuartiles(n * times, n * times, n * times, 3) for n in rows}

    both = list(range(1, common + 1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.db"
        with Profile(path, create=True) as profile:
            profile.put("ops", HERE, ops([*both, 8], 1.0))
            profile.put("ops", under, ops(both, 1.2))
            known = {str(n): stage(n, n, n) for n in both}
            profile.put("stages", HERE, known | {"s": stage(5.0, 6.0, 7.0)})
            profile.put("stages", under, {
                key: stage(*(int(key) * t * (9.0 if key == "3" else 1.0) for t in slow))
                for key in known
            })  # fmt: skip
            profile.put("crowding", HERE, {"x": ContentionProfile()})
        found = find(path, changed(cluster(), devices=(device,)))
    assert isinstance(found, ProfileCostModel) and found.setting_of(device) == under
    taken = found.knowledge(device).stages["s"]
    wanted = zip((5.0, 6.0, 7.0), slow if common > 1 else (1.0,) * 3, strict=True)
    parts = (taken.forward.seconds, taken.backward.seconds, taken.optimizer.seconds)
    assert parts == pytest.approx(tuple(s * times for s, times in wanted))
    cost = found.op(linear(8), device, False)
    assert cost.seconds == pytest.approx(8 * (1.2 if common > 1 else 1.0) / 0.5)


def test_stages_of_one_kind_say_nothing_of_another() -> None:
    one, other = (changed(cluster().devices[k], model=m) for k, m in enumerate(("a", "b")))
    on = changed(cluster(), devices=(one, other))
    found = of_settings({changed(HERE, device="a"): 1.0, changed(HERE, device="b"): 7.0}, on)
    assert [found.knowledge(d).stages["s"].forward.seconds for d in (one, other)] == [1.0, 7.0]
