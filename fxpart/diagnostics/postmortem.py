"""Analysis of which rank stopped first and why, from flight recorder and failure files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fxpart.diagnostics.failure_record import FailureRecord, read_failure
from fxpart.diagnostics.flight_recorder import FlightRecorderDump, read, unreadable
from fxpart.diagnostics.rank_event import ALL, NO_RANK, RankEvent
from fxpart.diagnostics.rank_traces import RankTraces
from fxpart.errors import FxpartError

_GENERATION = re.compile(r"generation-(\d{1,9})")
_FILE = re.compile(r"rank-(\d{1,9})\.(ring|failure\.json)")
_MOST = 1 << 16  # files of one generation


@dataclass(frozen=True)
class Postmortem:
    """Analysis of a generation of a run.

    generations: all with files. ranks: traces by rank. first: ranks that stopped first, usually
    one; empty if no rank failed. votes: number of ranks whose traces lead to each rank.
    """

    generation: int
    generations: tuple[int, ...]
    ranks: Mapping[int, RankTraces]
    first: tuple[int, ...]
    votes: Mapping[int, int] = field(default_factory=dict)

    @property
    def since(self) -> int:
        """Time when the first rank stopped, in nanoseconds since 1970."""
        times = [self.ranks[rank].time for rank in self.first if rank in self.ranks]
        return min(times or [traces.time for traces in self.ranks.values()], default=0)

    def timeline(self, count: int) -> list[tuple[int, RankEvent]]:
        """Return the last ``count`` events of each rank with their ranks, by time."""
        found = [
            (rank, event) for rank, traces in self.ranks.items() for event in traces.newest(count)
        ]
        return sorted(found, key=lambda each: (each[1].nanoseconds, each[0], each[1].number))


def examine(run: str | Path, generation: int | None = None) -> Postmortem:
    """Analyze a generation, the newest by default; FXP520 if there are no files."""
    events = Path(run) / "events"
    try:
        found = [_GENERATION.fullmatch(each.name) for each in events.iterdir()]
        generations = tuple(sorted(int(match[1]) for match in found if match))
        if not generations:
            raise unreadable(events, "the run has no recorded events")
        chosen = generations[-1] if generation is None else generation
        if chosen not in generations:
            known = ", ".join(map(str, generations[-9:]))
            raise unreadable(
                events, f"generation {chosen} does not exist; existing generations: {known}"
            )
        ranks = _traces(events / f"generation-{chosen}")
    except OSError as cause:
        raise unreadable(events, cause.strerror or str(cause)) from cause
    roots = {rank: _find_root(ranks, rank) for rank in ranks}
    votes = Counter(
        root for rank, root in roots.items() if ranks[rank].how != "left" and root is not None
    )
    return Postmortem(chosen, generations, ranks, _find_first(ranks, votes), dict(votes))


def _traces(folder: Path) -> dict[int, RankTraces]:
    """Return the traces by rank; FXP520 if no file can be read."""
    rings: dict[int, FlightRecorderDump] = {}
    failures: dict[int, FailureRecord] = {}
    problems: dict[int, list[str]] = {}
    faults: list[FxpartError] = []
    for at, path in enumerate(sorted(folder.iterdir())):
        match = _FILE.fullmatch(path.name)
        if match is None:
            continue
        if at >= _MOST:
            raise unreadable(folder, f"it contains more than {_MOST} files")
        rank = int(match[1])
        try:
            found = read(path) if match[2] == "ring" else read_failure(path)
            if found.rank != rank:
                raise unreadable(path, f"it belongs to rank {found.rank}")
        except FxpartError as fault:
            faults.append(fault)
            problems.setdefault(rank, []).append(f"{path.name}: {fault.problems[0].why}")
            continue
        if isinstance(found, FlightRecorderDump):
            rings[rank] = found
        else:
            failures[rank] = found
    if not rings and not failures:
        raise faults[0] if faults else unreadable(folder, "no rank has recorded events")
    return {
        rank: RankTraces(rank, rings.get(rank), failures.get(rank), tuple(problems.get(rank, ())))
        for rank in sorted({*rings, *failures, *problems})
    }


def _find_root(ranks: Mapping[int, RankTraces], rank: int) -> int | None:
    """Follow the chain of failures from a rank to its root; None if it ends at a normal exit.

    A failure leads to its attributed rank. A silent rank is the root if it is known to have ended;
    otherwise its last wait leads on. A rank that ended normally is the root if others missed it.
    """
    seen: list[int] = []
    known_to_have_ended = False
    while rank not in seen:
        seen.append(rank)
        traces = ranks.get(rank)
        if traces is None:
            return rank  # the rank has no files
        found = traces.blame
        if traces.how == "failed":
            return rank
        following: int | None = None
        if found is not None:
            following, known_to_have_ended = (
                find_longest_silent_rank(ranks, found.ranks),
                found.gone,
            )
        elif traces.how == "left":
            return rank if known_to_have_ended else None
        elif not known_to_have_ended:
            following = _find_awaited_rank(ranks, traces)
        if following is None:
            return rank
        if following in seen:  # these ranks wait for each other
            return find_stopped_rank(ranks, seen[seen.index(following) :])
        rank = following
    return rank


def _find_awaited_rank(ranks: Mapping[int, RankTraces], traces: RankTraces) -> int | None:
    """Return the rank that a silent rank waited for; of all, one that is behind it."""
    if traces.awaited != ALL:
        return None if traces.awaited == NO_RANK else traces.awaited
    last = traces.last
    assert last is not None, "it waited for all"
    behind = [
        other
        for rank, other in ranks.items()
        if rank != traces.rank
        and other.how != "left"
        and (other.last is None or (other.awaited != ALL and other.last.step <= last.step))
    ]
    return min(behind, key=lambda other: other.time).rank if behind else None


def _find_first(ranks: Mapping[int, RankTraces], votes: Mapping[int, int]) -> tuple[int, ...]:
    """Return the root ranks that failed or that a failure names, or else all roots.

    Of these, the earliest, and those with the same failure, as all ranks have in the same call.
    """
    named_roots = {
        root for rank in ranks if ranks[rank].blame and (root := _find_root(ranks, rank)) in votes
    }
    roots = [rank for rank in votes if rank in named_roots] or list(votes)
    if not roots:
        return ()
    first = min(roots, key=lambda rank: (ranks[rank].time if rank in ranks else 0, rank))
    failure = ranks[first].failure if first in ranks else None
    if failure is None or not failure.problems[0].code:
        return (first,)
    same_failure = [
        rank
        for rank in roots
        if (other := ranks[rank].failure if rank in ranks else None) is not None
        and other.problems == failure.problems
    ]
    return tuple(sorted({first, *same_failure}))


_ACTION = re.compile(r"(\d{1,9})(SEND_F|SEND_B|F|B|I|W)(\d{1,9})(?:>(\d{1,9}))?(?:@\d{1,9})?")
_STAGE_OFFSETS = {"SEND_F": 1, "SEND_B": -1}


def find_stopped_rank(ranks: Mapping[int, RankTraces], cycle: Sequence[int]) -> int:
    """Return the rank that stopped, of ranks that wait for each other.

    cycle: each waits for the next, the last for the first. A running rank processes what was sent
    to it and then waits for another rank, so running ranks cannot wait in a cycle. The result is a
    rank to which all that it waits for was sent, or any of them; of several the one with the oldest
    last event.
    """
    pairs = zip(cycle, [*cycle[1:], *cycle[:1]], strict=True)
    satisfied = [rank for rank, other in pairs if _was_sent(ranks.get(rank), ranks.get(other))]
    return find_longest_silent_rank(ranks, satisfied or cycle)


def find_longest_silent_rank(ranks: Mapping[int, RankTraces], candidates: Sequence[int]) -> int:
    """Return the rank with the oldest last event; a rank without files is older than all."""
    return min(candidates, key=lambda rank: ranks[rank].time if rank in ranks else 0)


def _was_sent(waits: RankTraces | None, other: RankTraces | None) -> bool:
    """Return whether the message that a rank waits for was sent, by the other's events."""
    if waits is None or other is None or other.ring is None:
        return False
    wait = waits.last
    if wait is None or wait.phase != "wait":
        return False
    awaited = _parse_action(wait)
    if awaited is None:
        return False
    stage, kind, microbatch, _ = awaited
    sends = [
        _parse_action(event)
        for event in other.ring.events
        if event.phase == "send" and event.step == wait.step and event.peer == waits.rank
    ]
    kind_sent = "SEND_F" if kind == "F" else "SEND_B"
    return any(
        sent is not None
        and sent[1:3] == (kind_sent, microbatch)
        and (sent[3] if sent[3] >= 0 else sent[0] + _STAGE_OFFSETS[kind_sent]) == stage
        for sent in sends
    )


def _parse_action(event: RankEvent) -> tuple[int, str, int, int] | None:
    """Return stage, kind, microbatch and target stage (-1 if it names none) of an action event."""
    found = _ACTION.fullmatch(event.what)
    if found is None:
        return None
    return int(found[1]), found[2], int(found[3]), int(found[4] or -1)
