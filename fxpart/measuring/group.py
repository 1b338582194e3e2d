"""Profiling on a group of unlike devices: each kind by its first rank, one file for all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from fxpart.cluster import Cluster, Device
from fxpart.environment import Launch, alone
from fxpart.errors import FxpartError, Problem, error
from fxpart.measuring.profiled import Profiled
from fxpart.profile import Profile
from fxpart.runtime.connect import connect

Measure = Callable[[Cluster, Path], Profiled]


class _Message(msgspec.Struct, frozen=True):
    """What a rank has: nothing, a profile's bytes and what was done, or the problems it met."""

    found: Profiled | None = None
    profile: bytes = b""
    problems: tuple[Problem, ...] = ()


def profile_group(
    started: Launch, cluster: Cluster, path: Path, measure: Measure, timeout: float
) -> list[Profiled]:
    """What was measured, by kind of device in the order of first ranks; the same on all ranks.

    cluster: a device for each rank. measure: profiles a cluster of like devices into a file. Rank 0
    merges the files of the others into the one at ``path``. timeout: seconds that ranks wait for
    each other. Raises FXP502 where ranks and devices differ in number, and on every rank what
    stopped one.
    """
    if len(cluster.devices) != started.world:
        raise error(
            "FXP502",
            where=f"{cluster.name}, {len(cluster.devices)} devices",
            why=f"{started.world} processes were started",
            fix=f"torchrun --nproc-per-node {len(cluster.devices)} in all, one for each device",
        )
    with tempfile.TemporaryDirectory() as folder:
        mine = _measured(started.rank, cluster, path, Path(folder) / "own.profile", measure)
        transport = connect(started.world, timeout=timeout)
        try:
            messages = [
                msgspec.msgpack.decode(message, type=_Message)
                for message in transport.exchange_bytes(msgspec.msgpack.encode(mine))
            ]
            faults = [p for message in messages for p in message.problems]
            if faults:
                raise FxpartError(faults)
            if started.rank == 0:
                _merge(messages, path, Path(folder))
            transport.exchange([0])  # nobody reads the file before it is whole
        finally:
            transport.close()
    return [message.found for message in messages if message.found is not None]


def likes(cluster: Cluster, device: Device) -> Cluster:
    """The cluster without the devices of other kinds, and what names them."""
    mine = kind(device)
    return cluster.part(k for k, other in enumerate(cluster.devices) if kind(other) == mine)


def kind(device: Device) -> tuple[object, ...]:
    """What devices have in common of which one is measured for all: model, threads, quota."""
    return device.model, device.threads, device.share


def _measured(rank: int, cluster: Cluster, path: Path, own: Path, measure: Measure) -> _Message:
    """This rank's measurements, where it is the first of its kind; nothing otherwise."""
    kinds = [kind(device) for device in cluster.devices]
    if kinds.index(kinds[rank]) != rank:
        return _Message()
    try:
        if path.is_file():
            shutil.copyfile(path, own)  # what it holds is not measured again
        with alone():
            found = measure(likes(cluster, cluster.devices[rank]), own)
        return _Message(found, own.read_bytes())
    except FxpartError as fault:
        return _Message(problems=fault.problems)


def _merge(messages: list[_Message], path: Path, folder: Path) -> None:
    with Profile(path, create=True) as whole:
        for number, message in enumerate(messages):
            if message.profile:
                part = folder / f"{number}.profile"
                part.write_bytes(message.profile)
                with Profile(part) as other:
                    whole.merge(other)
