"""Peaks of tensors of rank processes, to the byte: trial runs with a preloaded library that counts.

The library (live_storages.c) counts what torch's allocator has allocated and not freed, in all
threads, with what ops need inside.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from fxpart.profiling import trial_processes, trial_worker
from fxpart.runtime.monitor.memory_footprint import MemoryPeaks

SOURCE = Path(__file__).with_name("live_storages.c")
OPTIONS = "trainer_options.json"
WARM = 2  # Steps before the last: optimizer state exists, asynchronous stages are filled.


class StorageTrials(trial_processes.TrialProcesses):
    """Trial runs whose peaks are bytes of tensors. options: of each program's trainer."""

    options: Mapping[str, Any] = {}

    def _program(self, *arguments: Any) -> dict[str, Any]:
        request = super()._program(*arguments) | {"warm": WARM}
        file = Path(request["program"]).parent / OPTIONS
        file.write_text(json.dumps(dict(self.options)), encoding="utf-8")
        return request


@contextmanager
def counted_ranks(ranks: int, folder: Path) -> Iterator[StorageTrials]:
    """Processes for trial runs, with the library that is compiled into the folder."""
    library = folder / "live_storages.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True, timeout=60)
    with (
        mock.patch.dict(os.environ, LD_PRELOAD=str(library)),
        mock.patch.object(trial_processes, "TARGET", f"{__name__}:serve"),
        StorageTrials(ranks) as found,
    ):
        yield found


def serve(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Run on a process: as trial runs do, with other peaks and the options of trainers."""
    trial_worker.TrialProgram = _CountedProgram  # type: ignore[misc]
    trial_worker.MemoryFootprint = _StorageFootprint  # type: ignore[misc,assignment]
    return trial_worker.serve(rank, world, payload)


class _StorageFootprint:
    """The bytes of tensors above those at the start."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        for name in ("storage_live", "storage_peak"):
            getattr(self._library, name).restype = ctypes.c_size_t
        self._baseline = 0

    def start(self) -> None:
        """What is there now does not count."""
        self._library.storage_reset()
        self._baseline = self._library.storage_live()

    def peaks(self) -> MemoryPeaks:
        """The most bytes since the start."""
        return MemoryPeaks(self._baseline, self._library.storage_peak() - self._baseline)


class _CountedProgram(trial_worker.TrialProgram):
    """A program whose trainer has the options that are written beside it."""

    def __init__(self, program: Path, optimizer: str) -> None:
        options = json.loads((program.parent / OPTIONS).read_text(encoding="utf-8"))
        make = partial(trial_worker.load_trainer, **options)
        with mock.patch.object(trial_worker, "load_trainer", make):
            super().__init__(program, optimizer)
