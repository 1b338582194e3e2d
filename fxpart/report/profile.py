"""A profile, and a run of ``fxpart profile``, as text. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from fxpart.costmodels.profile_store import (
    Calibration,
    ContentionProfile,
    Profile,
    StageMeasurement,
    TimeQuartiles,
    TrialRun,
)
from fxpart.report.table import shortened, table
from fxpart.units import percent, plural, seconds, size

if TYPE_CHECKING:
    from fxpart.profiling.report import ProfilingReport

_SHOWN = 12  # ops and stages
_WIDTH = 60
T = TypeVar("T")


def describe_run(done: ProfilingReport) -> list[str]:
    """Return the run as lines: measurements, prediction errors, best plan."""
    rows = [
        ("distinct ops", str(done.ops), str(done.known_ops)),
        ("stages", str(done.stages), str(done.known_stages)),
        ("trial runs", str(done.trial_runs), str(done.known_trial_runs)),
    ]
    lines = [f"{done.model} on {done.device}, {seconds(done.seconds)}", ""]
    lines += table(("", "measured now", "known before"), "<>>", rows)
    if done.calibration is not None:
        lines += ["", *_calibration(done.calibration)]
        if done.calibration.residuals:
            errors = f"median {percent(done.median_error)}, worst {percent(done.worst_error)}"
            lines.append(f"  error of stages predicted from their ops with these factors: {errors}")
    if done.contention is not None:
        lines += ["", *_format_contention(done.contention)]
    if done.plan:
        lines += ["", f"best plan: {done.plan}, step time {seconds(done.step_seconds)}"]
    if done.left_out:
        lines += ["", f"left out: {'; '.join(done.left_out)}"]
    return lines


def describe_profile(profile: Profile) -> list[str]:
    """Return the file as lines, by setting: slowest ops and stages, factors, CPU contention."""
    lines: list[str] = []
    for setting in profile.settings():
        ops = profile.get("ops", setting, TimeQuartiles)
        stages = profile.get("stages", setting, StageMeasurement)
        lines += [setting.describe(), f"  {plural(len(ops), 'op timing')}"]
        lines += [f"    {line}" for line in _ops(ops)]
        if stages:
            lines += [f"  {plural(len(stages), 'stage timing')}"]
            lines += [f"    {line}" for line in _stages(stages)]
        if plans := profile.get("rehearsals", setting, TrialRun):
            lines += [f"  {plural(len(plans), 'trial run')}"]
            lines += [f"    {line}" for line in _format_trial_runs(plans)]
        for key, calibration in profile.get("calibrations", setting, Calibration).items():
            lines += [f"  of model {key[:12] or 'any'}"]
            lines += [f"    {line}" for line in _calibration(calibration)]
        for key, contention in profile.get("crowding", setting, ContentionProfile).items():
            lines += [f"  of model {key[:12] or 'any'}"]
            lines += [f"    {line}" for line in _format_contention(contention)]
    return lines or ["The profile has no measurements."]


def contents(profile: Profile) -> list[dict[str, object]]:
    """Return everything in the file as data, by setting."""
    return [
        {
            "setting": setting,
            "ops": profile.get("ops", setting, TimeQuartiles),
            "stages": profile.get("stages", setting, StageMeasurement),
            "calibrations": profile.get("calibrations", setting, Calibration),
            "crowding": profile.get("crowding", setting, ContentionProfile),
            "rehearsals": profile.get("rehearsals", setting, TrialRun),
        }
        for setting in profile.settings()
    ]


def _ops(ops: Mapping[str, TimeQuartiles]) -> list[str]:
    rows = [
        (shortened(key, _WIDTH), seconds(t.seconds), _spread(t), str(t.runs))
        for key, t in _longest(ops, lambda t: t.seconds)
    ]
    return table(("op", "median", "quartiles", "runs"), "<>>>", rows) if rows else []


def _stages(stages: Mapping[str, StageMeasurement]) -> list[str]:
    rows = [
        (
            shortened(t.label or key, _WIDTH),
            str(t.rows),
            seconds(t.forward.seconds),
            seconds(t.backward.seconds),
            seconds(t.optimizer.seconds),
        )
        for key, t in _longest(stages, lambda t: t.forward.seconds)
    ]
    return table(("stage", "rows", "forward", "backward", "optimizer"), "<>>>>", rows)


def _format_trial_runs(plans: Mapping[str, TrialRun]) -> list[str]:
    """Return lines about trial runs, the fastest first."""
    ordered = sorted(plans.values(), key=lambda found: found.seconds.seconds)
    rows = [
        (
            r.model[:12],
            r.label,
            seconds(r.predicted),
            seconds(r.seconds.seconds),
            _spread(r.seconds),
        )
        for r in ordered[:_SHOWN]
    ]
    return table(("model", "plan", "predicted", "measured", "quartiles"), "<<>>>", rows)


def _longest(values: Mapping[str, T], took: Callable[[T], float]) -> list[tuple[str, T]]:
    return sorted(values.items(), key=lambda item: (-took(item[1]), item[0]))[:_SHOWN]


def _spread(timing: TimeQuartiles) -> str:
    apart = timing.high - timing.low
    return percent(apart / timing.seconds) if timing.seconds > 0 else "-"


def _calibration(found: Calibration) -> list[str]:
    rows = [(name, f"{factor:.2f}") for name, factor in sorted(found.factors.items())]
    lines = table(("within stages", "factor"), "<>", rows) if rows else []
    lines.append(
        f"runtime overhead: {seconds(found.action)} per action, {seconds(found.step)} per step"
    )
    return lines


def _format_contention(found: ContentionProfile) -> list[str]:
    slow = ", ".join(f"{value:.2f}" for value in found.slowdown)
    lines = []
    if slow:
        lines.append(
            f"CPU contention of 1 to {len(found.slowdown)} computing ranks: {slow} times as long"
        )
    if found.transfer:
        lines.append(
            f"a transfer slows a rank down as much as {found.transfer:.2f} computing ranks"
        )
    if found.uneven:
        lines.append(
            f"{found.uneven.fallen:.2f} of {found.uneven.cores} cores are lost for "
            f"{seconds(found.uneven.seconds)} after more ranks computed, {found.uneven.risen:.2f} "
            "after fewer"
        )
    if found.meet:
        later = ", ".join(seconds(value) for value in found.meet)
        lines.append(f"a collective of 2 to {len(found.meet) + 1} ranks starts {later} later")
    if found.baseline:
        lost = percent(found.overhead)
        lines.append(f"memory of a process: {size(found.baseline)}, and {lost} of its tensors")
    return lines
