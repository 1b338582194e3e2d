"""Number of weight copies of a stage by weight mode, counted from its order of actions.

Used by the planner for memory, and compared with the runtime's own counts. Source: the table in
section 1 of the notes on weight versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from fxpart.schedule.action import ActionKind
from fxpart.schedule.versions import WeightRead, WeightVersionCounters
from fxpart.schedule.weight_modes import WeightMode

Span = tuple[int, int]  # smallest and largest value

# Key of a copy: ("W", updates) for a version, ("P", updates, ahead) for a prediction from it.
_Copy = tuple[str, int, int]


@dataclass(frozen=True)
class WeightCopies:
    """Number of copies of a stage's weights.

    kept: the most that later computations need, including the weights themselves. transient: those
    that one computation makes for itself (the runtime may reuse one for the next computation if it
    reads the same weights, but never has two). deltas: running means of the updates (PipeMare), or
    the last update (error feedback).
    """

    kept: int
    transient: int = 0
    deltas: int = 0

    @property
    def extra(self) -> int:
        """Return the most copies besides the weights themselves."""
        return self.kept - 1 + self.transient + self.deltas


def count_weight_copies(
    mode: WeightMode, versions: WeightVersionCounters, stage: int
) -> WeightCopies:
    """Return the most simultaneous copies on the stage, over an asynchronous run of any length.

    Weights are alive from their update to the next one, and to their last read. A prediction is
    alive from its first forward to the last computation that reads it. Without prediction nothing
    is copied. Microbatches that predict equally far from equal weights share a copy. Raises FXP109
    if the mode needs more microbatches per update (:meth:`WeightVersionCounters.check`).
    """
    versions.check(mode)
    events = list(_order(mode, versions, stage))
    alive: dict[_Copy, list[int]] = {("W", versions.start, 0): [0, 1]}
    updates, back, transient = versions.start, 0, 0
    for now, (kind, microbatch) in enumerate(events):
        read = versions.read(mode, stage, microbatch)
        for copy in _list_shared_copies(mode, read, kind, first=microbatch % versions.every == 0):
            alive.setdefault(copy, [now, now + 1])[1] = now + 1
        alive["W", updates, 0][1] = now + 1
        transient = max(transient, _count_transient(mode, read, kind))
        if kind is ActionKind.B:
            back += 1
            if back % versions.every == 0:
                updates += 1
                alive["W", updates, 0] = [now + 1, now + 2]
    stale = mode.backward == "corrected" and versions.gap(stage) > 0
    feeds_back = bool(mode.feedback) and max(versions.ahead) > 1
    return WeightCopies(_count_overlap(alive.values()), transient, int(stale or feeds_back))


def _order(
    mode: WeightMode, versions: WeightVersionCounters, stage: int
) -> Iterator[tuple[ActionKind, int]]:
    """Return the stage's computations: until they are periodic, or of one flushed minibatch."""
    ahead, every = versions.ahead[stage], versions.every
    count = every if mode.flush else 2 * max(versions.ahead) + 4 * every
    ahead = min(ahead, count)
    yield from ((ActionKind.F, m) for m in range(ahead))
    for m in range(count):
        yield ActionKind.B, m
        if m + ahead < count:
            yield ActionKind.F, m + ahead


def _list_shared_copies(
    mode: WeightMode, read: WeightRead, kind: ActionKind, *, first: bool
) -> Iterator[_Copy]:
    """Return the copies that a computation reads and shares with other computations.

    first: whether the microbatch is its minibatch's first.
    """
    shared = mode.base == "first microbatch"
    back = kind is ActionKind.B
    if back and mode.backward != "forward":
        return
    if not read.look_forward:
        yield "W", read.version, 0
        return
    if not back and (first or not shared):
        yield "W", read.version, 0
    if shared or mode.backward == "forward":
        yield "P", read.version, read.look_forward


def _count_transient(mode: WeightMode, read: WeightRead, kind: ActionKind) -> int:
    """Return 1 if the computation makes weights that no later computation reads."""
    if kind is ActionKind.F:
        kept = mode.backward == "forward" or mode.base == "first microbatch"
        return int(bool(read.look_forward) and not kept)
    if mode.backward == "corrected":
        return int(read.staleness > 0)
    return int(bool(read.look_backward) and mode.backward == "applied")


def _count_overlap(spans: Iterable[list[int]]) -> int:
    """Return the largest number of half-open spans that overlap at one time."""
    marks = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    most = now = 0
    for _, change in marks:
        now += change
        most = max(most, now)
    return most


@dataclass(frozen=True)
class StageStaleness:
    """Staleness of one stage of a full pipeline, with ranges over the microbatches of an update.

    in_flight: microbatches. staleness: updates between a forward and its backward. behind: updates
    that the version a forward starts from lacks at its backward. look_forward, look_backward: by
    how many updates ahead each predicts the weights. copies: of the stage's weights.
    """

    stage: int
    in_flight: int
    staleness: Span
    behind: Span
    look_forward: Span
    look_backward: Span
    copies: WeightCopies

    def as_dict(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return asdict(self)


def compute_stage_staleness(
    mode: WeightMode, versions: WeightVersionCounters
) -> tuple[StageStaleness, ...]:
    """Return the staleness of each stage; raise FXP109 if the mode needs more microbatches per
    update."""
    found = []
    for stage, ahead in enumerate(versions.ahead):
        reads = [versions.read(mode, stage, m) for m in versions.period()]
        found.append(
            StageStaleness(
                stage,
                min(ahead, versions.every) if mode.flush else ahead,
                _range([read.staleness for read in reads]),
                _range([read.backward - read.version for read in reads]),
                _range([read.look_forward for read in reads]),
                _range([read.look_backward for read in reads]),
                count_weight_copies(mode, versions, stage),
            )
        )
    return tuple(found)


def _range(values: Sequence[int]) -> Span:
    return min(values), max(values)
