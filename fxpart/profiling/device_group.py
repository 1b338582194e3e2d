"""Profiling on a group of devices: each kind by its first rank, one file for all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fxpart.cluster.devices import Device
from fxpart.cluster.model import Cluster
from fxpart.costmodels.profile_store import Profile
from fxpart.environment import Launch, hide_launcher_variables
from fxpart.errors import FxpartError, Problem, error
from fxpart.profiling.report import ProfilingReport
from fxpart.runtime.transport.interface import Transport
from fxpart.runtime.transport.process_group import connect

# Of the cluster's device number so many, into a file, for a share of the budget.
Measure = Callable[[int, Path, float], ProfilingReport]
_FIRST = 0.75  # of the budget for each kind alone, where there are several; the rest for plans


class _RankReport(msgspec.Struct, frozen=True):
    """What a rank has: nothing, a profile's bytes and what was done, or the problems it met."""

    found: ProfilingReport | None = None
    profile: bytes = b""
    problems: tuple[Problem, ...] = ()


def profile_group(
    started: Launch, cluster: Cluster, path: Path, measure: Measure, timeout: float
) -> list[ProfilingReport]:
    """What was measured, by kind of device in the order of first ranks; the same on all ranks.

    Each kind is measured by itself; then, by what is known of all of them, the stages that the plan
    for the whole cluster puts on each. cluster: a device for each rank. measure: profiles one kind.
    Rank 0 merges the files of the others into the one at ``path``. timeout: seconds that ranks wait
    for each other. Raises FXP502 where ranks and devices differ in number, and on every rank what
    stopped one.
    """
    if len(cluster.devices) != started.world:
        raise error(
            "FXP502",
            where=f"{cluster.name}, {len(cluster.devices)} devices",
            why=f"{started.world} processes were started",
            fix=f"torchrun --nproc-per-node {len(cluster.devices)} in all, one for each device",
        )
    kinds = [kind(device) for device in cluster.devices]
    several = len(set(kinds)) > 1
    with tempfile.TemporaryDirectory() as folder:
        group = _Group(started.rank, kinds, path, Path(folder), measure)
        # Before ranks know of each other: the first may take long, and crowds have processes.
        own = group.measured(path, _FIRST if several else 1.0)
        transport = connect(started.world, timeout=timeout)
        try:
            found = group.merged(transport, own)
            if several:
                found = _added(found, group.merged(transport, group.again(transport)))
        finally:
            transport.close()
    return found


@dataclass(frozen=True)
class _Group:
    """What one rank does. kinds: by rank, what its device is like."""

    rank: int
    kinds: list[tuple[object, ...]]
    path: Path
    folder: Path
    measure: Measure

    def measured(self, before: Path, share: float) -> _RankReport:
        """This rank's measurements, where it is the first of its kind; nothing otherwise."""
        if self.kinds.index(self.kinds[self.rank]) != self.rank:
            return _RankReport()
        own = self.folder / "own.profile"
        try:
            if before.is_file():
                shutil.copyfile(before, own)  # what it holds is not measured again
            with hide_launcher_variables():
                found = self.measure(self.rank, own, share)
            return _RankReport(found, own.read_bytes())
        except FxpartError as fault:
            return _RankReport(problems=fault.problems)

    def again(self, transport: Transport) -> _RankReport:
        """The same for the rest of the budget, with what all others have measured."""
        whole = self.path.read_bytes() if self.rank == 0 else b""
        before = self.folder / "whole.profile"
        before.write_bytes(transport.exchange_bytes(whole)[0])
        return self.measured(before, 1 - _FIRST)

    def merged(self, transport: Transport, own: _RankReport) -> list[ProfilingReport]:
        """What all ranks did; rank 0 has their measurements in its file."""
        messages = [
            msgspec.msgpack.decode(message, type=_RankReport)
            for message in transport.exchange_bytes(msgspec.msgpack.encode(own))
        ]
        faults = [p for message in messages for p in message.problems]
        if faults:
            raise FxpartError(faults)
        if self.rank == 0:
            _merge(messages, self.path, self.folder)
        transport.exchange([0])  # nobody reads the file before it is whole
        return [message.found for message in messages if message.found is not None]


def _added(first: list[ProfilingReport], then: list[ProfilingReport]) -> list[ProfilingReport]:
    """What both passes did together."""
    return [
        msgspec.structs.replace(
            two,
            seconds=one.seconds + two.seconds,
            ops=one.ops + two.ops,
            known_ops=one.known_ops,
            stages=one.stages + two.stages,
            known_stages=one.known_stages,
        )
        for one, two in zip(first, then, strict=True)
    ]


def keep_same_devices(cluster: Cluster, device: Device) -> Cluster:
    """The cluster without the devices of other kinds, and what names them."""
    mine = kind(device)
    return cluster.part(k for k, other in enumerate(cluster.devices) if kind(other) == mine)


def kind(device: Device) -> tuple[object, ...]:
    """What devices have in common of which one is measured for all: model, threads, quota."""
    return device.model, device.threads, device.share


def _merge(messages: list[_RankReport], path: Path, folder: Path) -> None:
    with Profile(path, create=True) as whole:
        for number, message in enumerate(messages):
            if message.profile:
                part = folder / f"{number}.profile"
                part.write_bytes(message.profile)
                with Profile(part) as other:
                    whole.merge(other)
