"""Profile a group of devices: the first rank of each kind measures, into one file."""

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

# Arguments: index of the cluster's device, file, fraction of the budget.
Measure = Callable[[int, Path, float], ProfilingReport]
_FIRST = 0.75  # Fraction of the budget for each kind alone if there are several; then for plans.


class _RankReport(msgspec.Struct, frozen=True):
    """Outcome of a rank: nothing, a profile's bytes and a report, or problems."""

    found: ProfilingReport | None = None
    profile: bytes = b""
    problems: tuple[Problem, ...] = ()


def profile_group(
    started: Launch, cluster: Cluster, path: Path, measure: Measure, timeout: float
) -> list[ProfilingReport]:
    """Profile all kinds of devices; return their reports in the order of first ranks, on all ranks.

    Each kind is measured alone first. With the merged results, each then measures its stages in the
    plan for the whole cluster. Rank 0 merges all files into the one at ``path``. cluster: a device
    for each rank. measure: profiles one kind. timeout: seconds that ranks wait for each other.
    Raises FXP502 if the numbers of ranks and devices differ, and on all ranks the error of any
    rank.
    """
    if len(cluster.devices) != started.world:
        raise error(
            "FXP502",
            where=f"{cluster.name}, {len(cluster.devices)} devices",
            why=f"{started.world} processes were started",
            fix=f"start {len(cluster.devices)} processes with torchrun, one for each device",
        )
    kinds = [kind(device) for device in cluster.devices]
    several = len(set(kinds)) > 1
    with tempfile.TemporaryDirectory() as folder:
        group = _Group(started.rank, kinds, path, Path(folder), measure)
        # Before the group is made, as this may take long and starts processes of its own.
        own = group.measure_own(path, _FIRST if several else 1.0)
        transport = connect(started.world, timeout=timeout)
        try:
            found = group.merge_reports(transport, own)
            if several:
                found = _add_reports(
                    found, group.merge_reports(transport, group.measure_again(transport))
                )
        finally:
            transport.close()
    return found


@dataclass(frozen=True)
class _Group:
    """The work of one rank. kinds: the kind of device of each rank."""

    rank: int
    kinds: list[tuple[object, ...]]
    path: Path
    folder: Path
    measure: Measure

    def measure_own(self, before: Path, share: float) -> _RankReport:
        """Measure on this rank if it is the first of its kind."""
        if self.kinds.index(self.kinds[self.rank]) != self.rank:
            return _RankReport()
        own = self.folder / "own.profile"
        try:
            if before.is_file():
                shutil.copyfile(before, own)  # Known measurements are not repeated.
            with hide_launcher_variables():
                found = self.measure(self.rank, own, share)
            return _RankReport(found, own.read_bytes())
        except FxpartError as fault:
            return _RankReport(problems=fault.problems)

    def measure_again(self, transport: Transport) -> _RankReport:
        """Measure with the other part of the budget, given all ranks' results."""
        whole = self.path.read_bytes() if self.rank == 0 else b""
        before = self.folder / "merged.profile"
        before.write_bytes(transport.exchange_bytes(whole)[0])
        return self.measure_own(before, 1 - _FIRST)

    def merge_reports(self, transport: Transport, own: _RankReport) -> list[ProfilingReport]:
        """Return the reports of all ranks; rank 0 merges their measurements into its file."""
        messages = [
            msgspec.msgpack.decode(message, type=_RankReport)
            for message in transport.exchange_bytes(msgspec.msgpack.encode(own))
        ]
        faults = [p for message in messages for p in message.problems]
        if faults:
            raise FxpartError(faults)
        if self.rank == 0:
            _merge(messages, self.path, self.folder)
        transport.exchange([0])  # No rank reads the file before it is complete.
        return [message.found for message in messages if message.found is not None]


def _add_reports(
    first: list[ProfilingReport], then: list[ProfilingReport]
) -> list[ProfilingReport]:
    """Return the reports of both passes, added up."""
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
    """Return the cluster without devices of other kinds, their links and hosts."""
    mine = kind(device)
    return cluster.part(k for k, other in enumerate(cluster.devices) if kind(other) == mine)


def kind(device: Device) -> tuple[object, ...]:
    """Return the properties of which one device is measured for all: model, threads, quota."""
    return device.model, device.threads, device.share


def _merge(messages: list[_RankReport], path: Path, folder: Path) -> None:
    with Profile(path, create=True) as whole:
        for number, message in enumerate(messages):
            if message.profile:
                part = folder / f"{number}.profile"
                part.write_bytes(message.profile)
                with Profile(part) as other:
                    whole.merge(other)
