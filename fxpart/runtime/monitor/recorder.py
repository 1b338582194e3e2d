"""Recorder of training steps: computation, waits, sends, reductions and updates of each rank.

The executor's instructions and the trainer's phases are prepared once. While a recorder is
attached, its wrapped calls replace them. Training without a recorder runs no line of this file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import torch

from fxpart.accelerator import is_accelerator, synchronize
from fxpart.collectives.communicator import CollectiveHandle, Start
from fxpart.errors import error
from fxpart.runtime.executor.instruction import Arrival, Instruction
from fxpart.runtime.executor.receive_queue import ReceiveQueue
from fxpart.runtime.mesh.mesh_ranks import Ranks
from fxpart.runtime.monitor.measurements import (
    LocalMeasurements,
    MeasurementMessage,
    MessageArrival,
    merge_measurements,
)
from fxpart.runtime.monitor.memory_footprint import MemoryFootprint
from fxpart.runtime.transport.agreement import agree, convert_transport_errors
from fxpart.runtime.transport.interface import BACKWARD, FORWARD, Transport
from fxpart.schedule.action import Action, ActionKind
from fxpart.schedule.measured_timeline import READ, MeasuredMemory, MeasuredTimeline, Track

_ROUNDS = 24

T = TypeVar("T")
_KINDS = {FORWARD: ActionKind.SEND_F.value, BACKWARD: ActionKind.SEND_B.value}
# A longer wait has observed the arrival of the message.
_ARRIVED_MEANWHILE = 20_000  # Nanoseconds.


class Recorder:
    """Measures the ranks of one process; :attr:`recording` has the steps of all ranks.

    CPU: the processor's monotonic clock. GPU: the same clock after a device synchronization, so the
    host does not run ahead while a GPU is recorded, and a step takes slightly longer.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Ranks,
        devices: Mapping[int, torch.device],
        *,
        schedule: str,
        microbatches: int,
        baseline: int | None = None,
    ) -> None:
        """ranks: of each stage and mesh rank. devices: of the local ranks.

        baseline: bytes of this process before it loaded the model; None: when recording began. On a
        GPU, whose allocator counts tensors only, it is 0.
        """
        self._transport = transport
        self._ranks = ranks
        self._schedule = schedule
        self._microbatches = microbatches
        self._rank_recorders = {
            rank: RankRecorder(self, rank, devices[rank]) for rank in transport.local
        }
        self._footprint = MemoryFootprint(devices[transport.local[0]])
        self._baseline = 0 if is_accelerator(devices[transport.local[0]]) else baseline
        self._merged: MeasuredTimeline | None = None
        self._waits_for_messages = len(transport.local) != transport.ranks
        self.gathered = LocalMeasurements()
        self.step = -1

    @property
    def recording(self) -> MeasuredTimeline:
        """The steps of all ranks; FXP109 before the recording has ended."""
        if self._merged is None:
            raise error(
                "FXP109",
                where="recorder.recording",
                why="the recording has not ended, or a step failed during it",
                fix="read it after the with block",
            )
        return self._merged

    def get_rank_recorder(self, rank: int) -> RankRecorder:
        """Return the recorder of a local rank."""
        return self._rank_recorders[rank]

    @contextmanager
    def during(self, attach: Callable[[Recorder | None], None]) -> Iterator[Recorder]:
        """Measure while the context lasts, then gather the measurements unless it raised.

        attach: installs the recorder's calls; with None, restores the prepared ones.
        """
        attach(self)
        self._footprint.start()
        try:
            yield self
        finally:
            attach(None)
        agree(self._transport, "the end of a recording", lambda: (True, f"step {self.step}"))
        with convert_transport_errors(self._transport, "gathering recordings"):
            self._finish()

    def begin(self, step: int) -> None:
        """Start a step, before its batch is read."""
        if any((rank, step) not in self.gathered.whole for rank in self._rank_recorders):
            self.gathered.forget(step)  # A failed step had the same number.
        self.step = step
        for rank_recorder in self._rank_recorders.values():
            rank_recorder.begin()

    def end(self) -> None:
        """End the step; called again after its update."""
        for rank, rank_recorder in self._rank_recorders.items():
            self.gathered.whole[rank, self.step] = rank_recorder.begun, rank_recorder.now()

    def record_batch_read(self) -> None:
        """Record that the batch has been read and split."""
        for rank_recorder in self._rank_recorders.values():
            rank_recorder.phase(READ, rank_recorder.begun)

    def timed(
        self, name: str, call: Callable[..., T], ranks: Sequence[int] | None = None
    ) -> Callable[..., T]:
        """Return the call, measured as a phase of these local ranks (None: of all)."""
        rank_recorders = [
            self._rank_recorders[rank]
            for rank in (self._transport.local if ranks is None else ranks)
        ]

        def run(*arguments: Any) -> T:
            starts = [rank_recorder.now() for rank_recorder in rank_recorders]
            result = call(*arguments)
            for rank_recorder, start in zip(rank_recorders, starts, strict=True):
                rank_recorder.phase(name, start)
            return result

        return run

    def _finish(self) -> None:
        """Gather the measurements; every rank calls it at the same point."""
        memory = self._memory()
        own = (
            measure_clock_offset(self._transport) if self._waits_for_messages else ClockOffset(0, 0)
        )
        message = MeasurementMessage.of(self.gathered, own.nanoseconds, own.within, memory)
        parts = self._transport.exchange_bytes(msgspec.json.encode(message))
        messages = [msgspec.json.decode(part, type=MeasurementMessage) for part in parts]
        recording = MeasuredTimeline(
            schedule=self._schedule,
            microbatches=self._microbatches,
            stage_ranks=tuple(tuple(dict.fromkeys(row)) for row in self._ranks),
            spans=(),
            setting=self._setting(len(parts)),
        )
        self._merged = merge_measurements(recording, messages)

    def _memory(self) -> list[MeasuredMemory]:
        found, local = self._footprint.peaks(), self._transport.local
        # Memory that was resident before the model may have been freed since.
        given = found.baseline if self._baseline is None else self._baseline
        return [
            MeasuredMemory(
                rank=rank,
                baseline=min(given, found.peak),
                peak=found.peak,
                live=found.live,
                exact=found.exact,
                shared=len(local),
            )
            for rank in local
        ]

    def _setting(self, processes: int) -> dict[str, str]:
        return {
            "processes": str(processes),
            "threads": str(torch.get_num_threads()),
            "torch": str(torch.__version__),
            "devices": ", ".join(
                dict.fromkeys(
                    rank_recorder.device.type for rank_recorder in self._rank_recorders.values()
                )
            ),
        }


class RankRecorder:
    """Records one rank's activities. last: end of the last activity, in nanoseconds."""

    def __init__(self, recorder: Recorder, rank: int, device: torch.device) -> None:
        """device: of the rank."""
        self._recorder = recorder
        self._rank = rank
        self.device = device
        self.begun = self.last = 0
        # Whether collectives are recorded now: within a computation, outermost only.
        self._in_computation = False

    def now(self) -> int:
        """Return the time after synchronizing the device."""
        synchronize(self.device)
        return time.perf_counter_ns()

    def begin(self) -> None:
        """Start a step."""
        self.begun = self.last = self.now()

    def phase(self, name: str, start: int) -> None:
        """Record that a phase of the step ends now."""
        self.last = self.now()
        self._write("step", name, start)

    def measure(self, instruction: Instruction, target: Callable[[int], int]) -> Instruction:
        """Return the instruction, measured. target: the rank of another stage, same mesh rank."""
        if instruction.action.kind.is_compute:
            return replace(instruction, do=self._measure_computation(instruction))
        if instruction.action.peer is not None and _is_send(instruction.action):
            peer = target(instruction.action.peer)
            return replace(instruction, do=self._measure_send(instruction, peer))
        return instruction  # A receive is only posted.

    def _measure_computation(self, instruction: Instruction) -> Callable[[], None]:
        inner, awaits, name = instruction.do, instruction.awaits, str(instruction.action)
        microbatch = instruction.action.microbatch

        def do() -> None:
            if self._recorder._waits_for_messages:
                self._wait_for_messages(awaits, microbatch)
            start = self.now()
            if awaits:
                self._recorder.gathered.add(
                    self._rank, self._recorder.step, "wait", name, self.last, start
                )
            self._in_computation = True
            try:
                inner()
            finally:
                self._in_computation = False
            self.last = self.now()
            self._write("compute", name, start)

        return do

    def measure_collective(self, kind: str, start: Start) -> Start:
        """Return the start of a collective, measured if its rank computes nothing else."""

        def begin(*arguments: Any) -> CollectiveHandle:
            if not self._in_computation:  # Gradient reductions are phases of their own.
                return start(*arguments)
            before, self._in_computation = self.now(), False
            try:
                handle = start(*arguments)
            finally:
                self._in_computation = True
            self.record_collective(kind, before)
            return CollectiveWait(handle, kind, self)

        return begin

    @property
    def in_computation(self) -> bool:
        """Whether a collective is part of a computation now."""
        return self._in_computation

    def record_collective(self, kind: str, before: int) -> None:
        """Record that the rank was in a collective until now."""
        gathered, step = self._recorder.gathered, self._recorder.step
        gathered.add(self._rank, step, "collective", kind, before, self.now())

    def _wait_for_messages(self, awaits: Sequence[Arrival], microbatch: int) -> None:
        """Wait for the messages as taking them would, and record each arrival."""
        for inbox, index, _ in awaits:
            assert isinstance(inbox, ReceiveQueue), "only steps are recorded"
            before = self.now()
            inbox.settle(index)
            there = self.now()
            if inbox.channel in _KINDS:
                key = (inbox.source, self._rank, _KINDS[inbox.channel], microbatch)
                exact = there - before > _ARRIVED_MEANWHILE
                arrival = MessageArrival(self._recorder.step, *key, there, exact)
                self._recorder.gathered.arrivals.append(arrival)

    def _measure_send(self, instruction: Instruction, peer: int) -> Callable[[], None]:
        inner, name = instruction.do, str(instruction.action)

        def do() -> None:
            start = self.now()
            inner()
            self.last = self.now()
            self._recorder.gathered.send(
                self._rank, peer, self._recorder.step, name, start, self.last
            )

        return do

    def _write(self, track: Track, name: str, start: int) -> None:
        self._recorder.gathered.add(self._rank, self._recorder.step, track, name, start, self.last)


@dataclass(frozen=True, slots=True)
class CollectiveWait:
    """A collective in flight whose wait is measured."""

    inner: CollectiveHandle
    kind: str
    rank_recorder: RankRecorder

    def wait(self) -> torch.Tensor:
        """Wait, and return the collective's result."""
        if not self.rank_recorder.in_computation:
            return self.inner.wait()
        before = self.rank_recorder.now()
        result = self.inner.wait()
        self.rank_recorder.record_collective(self.kind, before)
        return result


def _is_send(action: Action) -> bool:
    return action.kind in (ActionKind.SEND_F, ActionKind.SEND_B)


@dataclass(frozen=True)
class ClockOffset:
    """This process's clock minus the first one's, in nanoseconds, plus or minus ``within``."""

    nanoseconds: int
    within: int


def measure_clock_offset(
    transport: Transport, *, clock: Callable[[], int] = time.perf_counter_ns, rounds: int = _ROUNDS
) -> ClockOffset:
    """Compare clocks over several rounds of messages; every process must call it at one point.

    A message arrives after it was sent. A message from the first process bounds the offset from
    above, and one to it bounds the offset from below. Over at least two rounds, the fastest message
    in each direction decides (Marzullo, "Maintaining the time in a distributed system", 1983). If
    the bounds include 0, it is used: clocks of one host are the same.
    """
    low, high = None, None
    sent = received = 0
    for index in range(rounds):
        before, sent = sent, clock()
        rows = transport.exchange([sent, received])
        received = clock()
        first_sent, first_received = rows[0]
        high = received - first_sent if high is None else min(high, received - first_sent)
        if index:  # Only now the first process reports when the previous message arrived.
            low = before - first_received if low is None else max(low, before - first_received)
    if low is None or high is None or transport.local[0] == 0:
        return ClockOffset(0, 0)
    if low <= 0 <= high:
        return ClockOffset(0, max(-low, high))
    return ClockOffset((low + high) // 2, abs(high - low) // 2)
