"""Measurements of the processes, and their merge into one timeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from fxpart.schedule.action import parse
from fxpart.schedule.dependence import get_transfer_partner
from fxpart.schedule.measured_timeline import (
    MeasuredMemory,
    MeasuredSpan,
    MeasuredTimeline,
    RankClockOffset,
    Track,
)

_Raw = tuple[int, int, Track, str, int, int]  # Rank, step, track, name, start and end in ns.
_Issued = tuple[int, int, int, str, int, int]  # rank, target, step, action, start and end in ns


class MessageArrival(msgspec.Struct, frozen=True, array_like=True):
    """The arrival time of a message, in nanoseconds.

    kind: of the action that sent it. exact: whether the receiver was waiting when it arrived.
    """

    step: int
    source: int
    target: int
    kind: str
    microbatch: int
    there: int
    exact: bool


@dataclass
class LocalMeasurements:
    """One process's measurements. whole: by rank and step its start and end."""

    spans: list[_Raw] = field(default_factory=list)
    sends: list[_Issued] = field(default_factory=list)
    arrivals: list[MessageArrival] = field(default_factory=list)
    whole: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def add(self, rank: int, step: int, track: Track, name: str, start: int, end: int) -> None:
        """Add a span."""
        self.spans.append((rank, step, track, name, start, end))

    def forget(self, step: int) -> None:
        """Discard the measurements of a step."""
        self.spans = [span for span in self.spans if span[1] != step]
        self.sends = [send for send in self.sends if send[2] != step]
        self.arrivals = [arrival for arrival in self.arrivals if arrival.step != step]

    def send(self, rank: int, target: int, step: int, name: str, start: int, end: int) -> None:
        """Add a send that was issued from start to end."""
        self.sends.append((rank, target, step, name, start, end))


class MeasurementMessage(msgspec.Struct, frozen=True):
    """A process's measurements as sent. offset: its clock minus that of rank 0."""

    offset: int
    within: int
    spans: list[_Raw]
    sends: list[_Issued]
    arrivals: list[MessageArrival]
    memory: list[MeasuredMemory]

    @staticmethod
    def of(
        gathered: LocalMeasurements, offset: int, within: int, memory: list[MeasuredMemory]
    ) -> MeasurementMessage:
        """Build the message. within: the uncertainty of the clock offset, in nanoseconds."""
        whole: list[_Raw] = [
            (rank, step, "whole", "", *times) for (rank, step), times in gathered.whole.items()
        ]
        return MeasurementMessage(
            offset, within, [*gathered.spans, *whole], gathered.sends, gathered.arrivals, memory
        )


def merge_measurements(
    recording: MeasuredTimeline, messages: Sequence[MeasurementMessage]
) -> MeasuredTimeline:
    """Return the recording with the spans of all processes, on one clock.

    recording: complete except for spans, clocks and memory.
    """
    aligned = [_align(message) for message in messages]
    raw = [span for message in aligned for span in message.spans]
    begin = min((span[4] for span in raw if span[2] == "whole"), default=0)
    whole = {(rank, step) for rank, step, track, *_ in raw if track == "whole"}

    def span(
        rank: int, step: int, track: Track, name: str, start: int, end: int, exact: bool = True
    ) -> MeasuredSpan:
        return MeasuredSpan(
            rank, step, track, name, (start - begin) / 1e9, (end - begin) / 1e9, exact
        )

    found = [span(*each) for each in raw if each[:2] in whole]
    for rank, target, step, name, start, end, exact in _find_transfers(aligned):
        if (rank, step) in whole:
            found.append(span(rank, step, "send", name, start, end, exact))
            other = str(get_transfer_partner(parse(name)))
            found.append(span(target, step, "receive", other, start, end, exact))
    clocks = [
        RankClockOffset(rank=memory.rank, offset=message.offset / 1e9, within=message.within / 1e9)
        for message in messages
        for memory in message.memory
    ]
    memory = [memory for message in messages for memory in message.memory]
    return msgspec.structs.replace(
        recording,
        spans=tuple(sorted(found, key=lambda s: (s.rank, s.track, s.start, s.end, s.name))),
        clocks=tuple(sorted(clocks, key=lambda clock: clock.rank)),
        memory=tuple(sorted(memory, key=lambda each: each.rank)),
    )


def _align(message: MeasurementMessage) -> MeasurementMessage:
    """Return the message with times of rank 0's clock."""
    off = message.offset
    if not off:
        return message
    return MeasurementMessage(
        off,
        message.within,
        [(*span[:4], span[4] - off, span[5] - off) for span in message.spans],
        [(*send[:4], send[4] - off, send[5] - off) for send in message.sends],
        [msgspec.structs.replace(a, there=a.there - off) for a in message.arrivals],
        message.memory,
    )


def _find_transfers(
    messages: Sequence[MeasurementMessage],
) -> list[tuple[int, int, int, str, int, int, bool]]:
    """Return each transfer from issue to arrival: sender, receiver, step, send, times, exact.

    A connection carries messages one at a time in order: none arrives after the next one, and none
    starts before the previous one has ended.
    """
    there = {
        (a.step, a.source, a.target, a.kind, a.microbatch): a
        for message in messages
        for a in message.arrivals
    }
    connections: dict[tuple[int, int, int], list[tuple[str, int, int, bool]]] = {}
    for message in messages:
        for rank, target, step, name, start, end in message.sends:
            action = parse(name)
            arrival = there.get((step, rank, target, action.kind.value, action.microbatch))
            done, exact = (end, True) if arrival is None else (arrival.there, arrival.exact)
            connections.setdefault((step, rank, target), []).append((name, start, done, exact))
    found = []
    for (step, rank, target), sends in connections.items():
        for name, start, end, exact in _order_sends(sends):
            found.append((rank, target, step, name, start, end, exact))
    return found


def _order_sends(
    sends: Iterable[tuple[str, int, int, bool]],
) -> list[tuple[str, int, int, bool]]:
    ordered = sorted(sends, key=lambda send: send[1])
    limit: int | None = None
    ends = []
    for _, _, end, exact in reversed(ordered):
        sooner = limit is not None and limit < end
        limit = end if limit is None else min(limit, end)
        ends.append((limit, exact and not sooner))
    found, before = [], 0
    for (name, start, _, _), (end, exact) in zip(ordered, reversed(ends), strict=True):
        start = max(start, before)
        before = max(start, end)
        found.append((name, start, before, exact))
    return found
