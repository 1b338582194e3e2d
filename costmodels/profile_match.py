"""Which of a profile's settings hold for a device, and of several the one that is most like it."""

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

HERE = "local"  # the host of devices that are this machine's
_AGAIN = "fxpart profile TARGET -o FILE"
_LEAST = 1e-9  # of a core: shares are compared by their ratio


def matching(
    path: Path, found: tuple[MeasurementEnvironment, ...], cluster: Cluster | None, torch: str
) -> dict[str, tuple[MeasurementEnvironment, ...]]:
    """By device model the settings that fit, of one torch: the newest. One for each quota.

    Raises FXP405 where there are none, FXP406 where none fits a device of the cluster.
    """
    if not found:
        raise error("FXP405", where=str(path), why="it is empty", fix=_AGAIN)
    if cluster is None:
        models = {setting.device for setting in found}
        return {model: _newest(s for s in found if s.device == model) for model in models}
    chosen: dict[str, tuple[MeasurementEnvironment, ...]] = {}
    for device in cluster.devices:
        fitting = [s for s in found if fits(s, device)]
        if not fitting:
            raise make_mismatch_error(path, device, found)
        same = [s for s in fitting if torch in ("", s.torch)]
        if not same:
            why = f"this process has torch {torch}"
            where = f"{path}: {max(fitting, key=_age).words()}"
            raise error("FXP406", where=where, why=why, fix=_AGAIN)
        had = chosen.get(device.model, ())
        chosen[device.model] = tuple(dict.fromkeys((*had, *_newest(same))))
    return chosen


def nearest(
    settings: Mapping[str, tuple[MeasurementEnvironment, ...]], device: Device
) -> list[MeasurementEnvironment]:
    """The settings that fit a device, those first whose quota leaves most nearly as much."""
    here = log(max(_LEAST, device.share))
    fitting = [s for s in settings.get(device.model, ()) if fits(s, device)]
    return sorted(fitting, key=lambda s: (abs(log(max(_LEAST, s.share)) - here), s))


def fits(setting: MeasurementEnvironment, device: Device) -> bool:
    """Same model, same threads where the device says them, and this host's chip if it is here.

    With as many cores, except under a quota: how ranks slow each other down is not measured there,
    and what one of them computes alone does not depend on the cores that it was pinned to.
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
    """FXP406: nothing of what was found holds for the device."""
    threads = device.threads
    with_ = "" if isinstance(threads, msgspec.UnsetType) else f", threads: {threads}"
    on = f" ({chip()}{with_})" if device.host == HERE and device.kind == "cpu" else with_
    return error(
        "FXP406",
        where=f"{path}: {'; '.join(s.words() for s in found) or 'nothing'}",
        why=f"the cluster's device {device.name} is {device.model}{on}",
        fix=f"profile it there, and merge: {_AGAIN}",
    )


def _newest(found: Iterable[MeasurementEnvironment]) -> tuple[MeasurementEnvironment, ...]:
    """Those with the newest torch; of several with the same quota the last."""
    ordered = sorted(found, key=_age)
    same = [s for s in ordered if s.torch == ordered[-1].torch]
    return tuple({s.quota: s for s in same}.values())


def _age(setting: MeasurementEnvironment) -> tuple[list[int], MeasurementEnvironment]:
    numbers = setting.torch.partition("+")[0].split(".")
    return [int(n) for n in numbers if n.isdigit()], setting
