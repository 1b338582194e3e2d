"""Costs from a profile: measured on the same devices, and by formula where not measured.

The seconds of an op are those measured alone times the calibration factor of its class and
direction, plus the overhead of a call within a stage, all times the slowdown while all ranks of the
device's host compute. All of these are from the profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

import msgspec

from fxpart.costs import Cost, CostModel, DeviceKnowledge
from fxpart.schedule.host_contention import (
    cap_slowdown_by_quota,
    count_concurrent_ranks,
    count_required_cores,
    interpolate_slowdown,
)

from .alphabeta import machines
from .op_classes import CALL, CALLS, op_class
from .op_keys import op_key
from .op_time_estimator import OpTimeEstimator
from .profile_match import HERE, make_mismatch_error, matching, nearest
from .profile_store import (
    Calibration,
    ContentionProfile,
    MeasurementEnvironment,
    Profile,
    StageMeasurement,
    TimeQuartiles,
    TrialRun,
)
from .quota_scale import longer, ops_pace, scaled, stages_pace

if TYPE_CHECKING:
    from fxpart.cluster.devices import Device, Link
    from fxpart.cluster.model import Cluster
    from fxpart.costs import OpSpec

SOURCE = "measured"
T = TypeVar("T")


@dataclass(frozen=True)
class DeviceMeasurements:
    """The measurements of one setting, by kind and key."""

    ops: Mapping[str, TimeQuartiles]
    stages: Mapping[str, StageMeasurement]
    calibrations: Mapping[str, Calibration]
    contention: Mapping[str, ContentionProfile]
    trial_runs: Mapping[str, TrialRun] = field(default_factory=dict)


@dataclass(frozen=True)
class ProfileCostModel(CostModel):
    """A profile bound to a cluster. base: the model for unmeasured costs, and for links.

    settings: by device model, one for each quota that it was measured under. model: the fingerprint
    of the model whose calibration and contention are used; see :meth:`for_model`. alone: seconds
    are those with all other processors idle, whatever the quota.
    """

    name: ClassVar[str] = SOURCE
    path: str
    cluster: Cluster | None
    base: CostModel
    settings: Mapping[str, tuple[MeasurementEnvironment, ...]]
    measurements: Mapping[MeasurementEnvironment, DeviceMeasurements]
    model: str = ""
    alone: bool = False
    _known: dict[tuple[OpSpec, str, float, float, bool], Cost] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _settings: dict[tuple[str, str, float], list[MeasurementEnvironment]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _meetings: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _stage_tables: dict[tuple[MeasurementEnvironment, ...], Mapping[str, StageMeasurement]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _knowledge: dict[tuple[str, str, str, float], DeviceKnowledge] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _op_paces: dict[tuple[MeasurementEnvironment, MeasurementEnvironment, str], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _estimates: dict[MeasurementEnvironment, OpTimeEstimator] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @staticmethod
    def load(
        path: str | Path, cluster: Cluster | None, base: CostModel, torch: str = ""
    ) -> ProfileCostModel:
        """Return the profile at ``path`` for a cluster; it is read once, completely.

        torch: the version that its measurements must have; "" for any. Raises FXP405 where it
        cannot be read, FXP406 where it has nothing for a device's model, threads, chip (of this
        host's own devices) and torch. Without a cluster it is for every setting's model.
        """
        with Profile(path) as profile:
            chosen = matching(Path(path), profile.settings(), cluster, torch)
            return ProfileCostModel(
                str(path),
                cluster,
                base,
                chosen,
                {
                    setting: _read(profile, setting)
                    for found in chosen.values()
                    for setting in found
                },
            )

    def for_model(self, fingerprint: str) -> ProfileCostModel:
        """Return the same with the calibration and contention of the model."""
        return replace(self, model=fingerprint)

    def for_part(self, cluster: Cluster) -> ProfileCostModel:
        """Return the same for a part of the cluster while all other devices are idle."""
        return replace(self, cluster=cluster)

    def knowledge(self, device: Device) -> DeviceKnowledge:
        """Return the profile's data for the device. Raises FXP406 where there is none."""
        key = (device.name, device.host, device.model, device.share)
        if key not in self._knowledge:
            found = self.calibration_of(self.setting_of(device))
            self._knowledge[key] = DeviceKnowledge(
                factors=found.factors,
                action=found.action,
                step=found.step,
                slowdown=self._slowdown(device),
                contention=self._contention(device.host),
                stages=self._stages(tuple(self._nearest(device))),
                trial_runs=self._trial_runs(),
            )
        return self._knowledge[key]

    def provenance(self) -> dict[str, str]:
        """Return the source of transfers, and where the measurements were made."""
        return {"transfers": self.base.name, "profile": self.origin}

    def setting_of(self, device: Device) -> MeasurementEnvironment:
        """Return where the device's measurements were made. Raises FXP406 where there are none.

        Of several quotas, the one with the closest share of processor time.
        """
        return self._nearest(device)[0]

    def calibration_of(self, setting: MeasurementEnvironment) -> Calibration:
        """Return the calibration of the model, or of any model if there is only one."""
        return _chosen(self.measurements[setting].calibrations, self.model) or Calibration()

    def _contention(self, host: str) -> ContentionProfile:
        """Return the contention of ranks on a host: as measured for the model, or for the host."""
        devices = [d for d in self._devices() if d.host == host]
        for setting in sorted({s for d in devices for s in self._nearest(d)}, key=_whole_first):
            if (found := _chosen(self.measurements[setting].contention, self.model)) is not None:
                return found
        hosts = self.cluster.hosts if self.cluster is not None else ()
        known = () if isinstance(hosts, msgspec.UnsetType) else hosts
        return next(
            (ContentionProfile(slowdown=h.slowdown) for h in known if h.name == host),
            ContentionProfile(),
        )

    def _slowdown(self, device: Device) -> float:
        """Return the device's slowdown while all ranks of its host compute.

        Times are processor times, so that a quota lengthens them; other ranks are slowed down by a
        rank under a quota only while it computes.
        """
        if self.alone:
            return 1.0
        shares = [d.share for d in self._devices() if d.host == device.host]
        curve = cap_slowdown_by_quota(self._contention(device.host).slowdown, shares)
        return (
            interpolate_slowdown(curve, count_concurrent_ranks(sum(shares), device.share))
            / device.share
        )

    def _stages(
        self, settings: tuple[MeasurementEnvironment, ...]
    ) -> Mapping[str, StageMeasurement]:
        """Return the stages that were measured in these settings, the nearest setting first.

        Stages of another setting than the first are scaled by the ratio of stages measured in both.
        """
        if settings not in self._stage_tables:
            first, *others = settings
            mine = self.measurements[first].stages
            found = dict(mine)
            for setting in others:
                table = self.measurements[setting].stages
                pace = stages_pace(mine, table)
                for key in table.keys() - found.keys():
                    found[key] = longer(table[key], pace)
            self._stage_tables[settings] = found
        return self._stage_tables[settings]

    def _trial_runs(self) -> Mapping[str, TrialRun]:
        """Return the trial runs of plans, by plan key.

        Plans run on one host and without quotas, so their times are valid for no other cluster.
        """
        if any(device.host != HERE or device.share != 1 for device in self._devices()):
            return {}
        found: dict[str, TrialRun] = {}
        for table in self.measurements.values():
            found = {**table.trial_runs, **found}
        return found

    @property
    def origin(self) -> str:
        """Describe the source of the measurements, for plans."""
        used = {self.setting_of(device) for device in self._devices()} or set(self._every())
        return "; ".join(setting.describe() for setting in sorted(used))

    def op(self, op: OpSpec, device: Device, backward: bool) -> Cost:
        """Return the op's cost (with numeric shapes) while all ranks of its host compute."""
        # A group of devices has the name of its first and the speed of its slowest device.
        key = (op, device.name, device.share, device.bandwidth, backward)
        if key not in self._known:
            self._known[key] = self._op(op, device, backward)
        return self._known[key]

    def _op(self, op: OpSpec, device: Device, backward: bool) -> Cost:
        formula = self.base.op(op, device, backward)
        if backward and not op.gradients:
            return Cost(0.0, source=SOURCE)
        setting = self.setting_of(device)
        direction = "backward" if backward else "forward"
        factors = self.calibration_of(setting).factors
        calibrated = factors.get(f"{op_class(op)} {direction}", 1.0)
        call = CALL * factors.get(f"{CALLS} {direction}", 0.0)
        full = self._slowdown(device)
        timing = self._timing(f"{op_key(op)} {direction}", device)
        if timing is not None:
            alone, source = timing.seconds, SOURCE
        else:
            estimates = self._estimate(setting)
            found = estimates(op, backward, self.base, device)
            if found is None:
                rate = estimates.rate(op, backward, self.base, device)
                # The formula's rates assume that all ranks compute.
                times = calibrated if rate is None else calibrated * rate * full
                return replace(formula, seconds=formula.seconds * times + call * full)
            alone, source = found
        seconds = (alone * calibrated + call) * full
        return replace(formula, seconds=seconds, source=source)

    def reshard(self, source: str, target: str, size: float, links: tuple[Link, ...]) -> Cost:
        """Return the base's cost by the cluster's links, plus the time for ranks to meet."""
        cost = self.base.reshard(source, target, size, links)
        if not cost.seconds or machines(links) > 1:
            return cost
        return replace(cost, seconds=cost.seconds + self._meeting(len(links)))

    def _meeting(self, ranks: int) -> float:
        """Return the additional seconds until ranks that compute meet in a collective.

        Ranks under quotas have a core each while they compute, so that even more of them than cores
        do not wait for cores.
        """
        if ranks not in self._meetings:
            found = 0.0
            for host in {d.host for d in self._devices()}:
                shares = [d.share for d in self._devices() if d.host == host]
                most = ranks if min(shares) >= 1 else max(2, count_required_cores(shares))
                if meet := self._contention(host).meet:
                    found = max(found, meet[min(ranks, most, len(meet) + 1) - 2])
            self._meetings[ranks] = found
        return self._meetings[ranks]

    def transfer(self, size: float, link: Link) -> Cost:
        """Return the base's cost by the cluster's links."""
        return self.base.transfer(size, link)

    def _timing(self, key: str, device: Device) -> TimeQuartiles | None:
        """Return the timing of an op measured on such a device. key: with its direction."""
        tables = [(s, self.measurements[s].ops) for s in self._nearest(device)]
        (first, mine), *_ = tables
        setting, table = next((pair for pair in tables if key in pair[1]), (first, mine))
        if table is mine:
            return mine.get(key)
        pace_key = first, setting, key.rpartition(" ")[2]
        if pace_key not in self._op_paces:
            self._op_paces[pace_key] = ops_pace(mine, table, pace_key[2])
        return scaled(table[key], self._op_paces[pace_key])

    def _estimate(self, setting: MeasurementEnvironment) -> OpTimeEstimator:
        if setting not in self._estimates:
            self._estimates[setting] = OpTimeEstimator(self.measurements[setting].ops)
        return self._estimates[setting]

    def _nearest(self, device: Device) -> list[MeasurementEnvironment]:
        key = (device.name, device.model, device.share)
        if key not in self._settings:
            self._settings[key] = nearest(self.settings, device)
        if not self._settings[key]:
            raise make_mismatch_error(Path(self.path), device, self._every())
        return self._settings[key]

    def _every(self) -> tuple[MeasurementEnvironment, ...]:
        return tuple(setting for found in self.settings.values() for setting in found)

    def _devices(self) -> tuple[Device, ...]:
        return self.cluster.devices if self.cluster is not None else ()


def _read(profile: Profile, setting: MeasurementEnvironment) -> DeviceMeasurements:
    return DeviceMeasurements(
        profile.get("ops", setting, TimeQuartiles),
        profile.get("stages", setting, StageMeasurement),
        profile.get("calibrations", setting, Calibration),
        profile.get("crowding", setting, ContentionProfile),
        profile.get("rehearsals", setting, TrialRun),
    )


def _whole_first(setting: MeasurementEnvironment) -> tuple[float, MeasurementEnvironment]:
    """Return a sort key: contention is measured best without a quota."""
    return -setting.share, setting


def _chosen(table: Mapping[str, T], model: str) -> T | None:
    """Return the model's own entry, that for any model, or the only one."""
    found = table.get(model) or table.get("")
    return next(iter(table.values())) if found is None and len(table) == 1 else found
