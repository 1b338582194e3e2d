"""Match a profile's settings with devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fxpart.errors import FxpartError, error

from .profile_store import MeasurementEnvironment, chip, processor

if TYPE_CHECKING:
    from fxpart.cluster.devices import Device
    from fxpart.cluster.model import Cluster

HERE = "local"  # host name of this machine's own devices
_PROFILE_COMMAND = "fxpart profile TARGET -o FILE"
_LEAST = 1e-9  # smallest share: shares are compared by their ratio


def matching(
    path: Path, found: tuple[MeasurementEnvironment, ...], cluster: Cluster | None, torch: str
) -> dict[str, tuple[MeasurementEnvironment, ...]]:
    """Return by device model the matching settings of the newest torch, one for each quota.

    Raises FXP405 where there are none, FXP406 where none matches a device of the cluster.
    """
    if not found:
        raise error("FXP405", where=str(path), why="the profile is empty", fix=_PROFILE_COMMAND)
    if cluster is None:
        models = {setting.device for setting in found}
        return {model: _newest(s for s in found if s.device == model) for model in models}
    chosen: dict[str, tuple[MeasurementEnvironment, ...]] = {}
    for device in cluster.devices:
        fitting = [s for s in found if is_match(s, device)]
        if not fitting:
            raise make_mismatch_error(path, device, found)
        same = [s for s in fitting if torch in ("", s.torch)]
        if not same:
            why = (
                f"this process has torch {torch}, but the profile was measured with another version"
            )
            where = f"{path}: {max(fitting, key=_age).describe()}"
            raise error("FXP406", where=where, why=why, fix=_PROFILE_COMMAND)
        had = chosen.get(device.model, ())
        chosen[device.model] = tuple(dict.fromkeys((*had, *_newest(same))))
    return chosen


def nearest(
    settings: Mapping[str, tuple[MeasurementEnvironment, ...]], device: Device
) -> list[MeasurementEnvironment]:
    """Return the settings that match a device, those with the closest quota first."""
    here = log(max(_LEAST, device.share))
    fitting = [s for s in settings.get(device.model, ()) if is_match(s, device)]
    return sorted(fitting, key=lambda s: (abs(log(max(_LEAST, s.share)) - here), s))


def is_match(setting: MeasurementEnvironment, device: Device) -> bool:
    """Return whether a setting matches: model, threads if specified, and this host's chip if local.

    The number of cores must match, except under a quota: contention is not measured there, and the
    time of one rank alone does not depend on the cores that it was pinned to.
    """
    if setting.device != device.model:
        return False
    threads = device.threads
    if setting.threads and not isinstance(threads, msgspec.UnsetType):
        if setting.threads != threads:
            return False
    if device.kind != "cpu" or device.host != HERE:
        return True
    return setting.processor == processor() if setting.quota else setting.chip == chip()


def make_mismatch_error(
    path: Path, device: Device, found: Iterable[MeasurementEnvironment]
) -> FxpartError:
    """Return FXP406 for a device without matching measurements."""
    threads = device.threads
    threads_text = "" if isinstance(threads, msgspec.UnsetType) else f", threads: {threads}"
    on = (
        f" ({chip()}{threads_text})"
        if device.host == HERE and device.kind == "cpu"
        else threads_text
    )
    return error(
        "FXP406",
        where=f"{path}: {'; '.join(s.describe() for s in found) or 'nothing'}",
        why=f"the cluster's device {device.name} is {device.model}{on}",
        fix=f"profile on that device and merge: {_PROFILE_COMMAND}",
    )


def _newest(found: Iterable[MeasurementEnvironment]) -> tuple[MeasurementEnvironment, ...]:
    """Return the settings with the newest torch; the last of several with the same quota."""
    ordered = sorted(found, key=_age)
    same = [s for s in ordered if s.torch == ordered[-1].torch]
    return tuple({s.quota: s for s in same}.values())


def _age(setting: MeasurementEnvironment) -> tuple[list[int], MeasurementEnvironment]:
    numbers = setting.torch.partition("+")[0].split(".")
    return [int(n) for n in numbers if n.isdigit()], setting
