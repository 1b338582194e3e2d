"""Who stopped first, and why: told from the rings and failures that the ranks left."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fxpart.diagnostics.failure_record import FailureRecord, read_failure
from fxpart.diagnostics.flight_recorder import FlightRecorderDump, read, unreadable
from fxpart.diagnostics.rank_event import ALL, NOBODY, RankEvent
from fxpart.diagnostics.rank_traces import RankTraces
from fxpart.diagnostics.wait_cycle import find_longest_silent_rank, find_stopped_rank
from fxpart.errors import FxpartError

_GENERATION = re.compile(r"generation-(\d{1,9})")
_FILE = re.compile(r"rank-(\d{1,9})\.(ring|failure\.json)")
_MOST = 1 << 16  # files of one generation


@dataclass(frozen=True)
class Postmortem:
    """A generation of a run.

    generations: all that left something. ranks: by number. first: who stopped first, one as a rule;
    none where nobody failed. votes: of those, by how many ranks' traces.
    """

    generation: int
    generations: tuple[int, ...]
    ranks: Mapping[int, RankTraces]
    first: tuple[int, ...]
    votes: Mapping[int, int] = field(default_factory=dict)

    @property
    def since(self) -> int:
        """The moment in which the first stopped, in nanoseconds since 1970."""
        times = [self.ranks[rank].time for rank in self.first if rank in self.ranks]
        return min(times or [traces.time for traces in self.ranks.values()], default=0)

    def timeline(self, count: int) -> list[tuple[int, RankEvent]]:
        """The last ``count`` events of each rank with their ranks, by time."""
        found = [
            (rank, event) for rank, traces in self.ranks.items() for event in traces.newest(count)
        ]
        return sorted(found, key=lambda each: (each[1].nanoseconds, each[0], each[1].number))


def examine(run: str | Path, generation: int | None = None) -> Postmortem:
    """What the ranks of a generation left, by default the newest; FXP520 where there is nothing."""
    events = Path(run) / "events"
    try:
        found = [_GENERATION.fullmatch(each.name) for each in events.iterdir()]
        generations = tuple(sorted(int(match[1]) for match in found if match))
        if not generations:
            raise unreadable(events, "no generation of the run has left events")
        chosen = generations[-1] if generation is None else generation
        if chosen not in generations:
            known = ", ".join(map(str, generations[-9:]))
            raise unreadable(events, f"it has no generation {chosen}, but {known}")
        ranks = _traces(events / f"generation-{chosen}")
    except OSError as cause:
        raise unreadable(events, cause.strerror or str(cause)) from cause
    roots = {rank: _root(ranks, rank) for rank in ranks}
    votes = Counter(
        root for rank, root in roots.items() if ranks[rank].how != "left" and root is not None
    )
    return Postmortem(chosen, generations, ranks, _first(ranks, votes), dict(votes))


def _traces(folder: Path) -> dict[int, RankTraces]:
    """By rank; FXP520 where none of the files can be read."""
    rings: dict[int, FlightRecorderDump] = {}
    failures: dict[int, FailureRecord] = {}
    problems: dict[int, list[str]] = {}
    faults: list[FxpartError] = []
    for at, path in enumerate(sorted(folder.iterdir())):
        match = _FILE.fullmatch(path.name)
        if match is None:
            continue
        if at >= _MOST:
            raise unreadable(folder, f"more than {_MOST} files are in it")
        rank = int(match[1])
        try:
            found = read(path) if match[2] == "ring" else read_failure(path)
            if found.rank != rank:
                raise unreadable(path, f"it is of rank {found.rank}")
        except FxpartError as fault:
            faults.append(fault)
            problems.setdefault(rank, []).append(f"{path.name}: {fault.problems[0].why}")
            continue
        if isinstance(found, FlightRecorderDump):
            rings[rank] = found
        else:
            failures[rank] = found
    if not rings and not failures:
        raise faults[0] if faults else unreadable(folder, "no rank has left events")
    return {
        rank: RankTraces(rank, rings.get(rank), failures.get(rank), tuple(problems.get(rank, ())))
        for rank in sorted({*rings, *failures, *problems})
    }


def _root(ranks: Mapping[int, RankTraces], rank: int) -> int | None:
    """Where the chain of blame that begins with a rank ends; None where it comes to one that left.

    A failure leads to whom it is about. A rank that said nothing is the end where it is known to be
    gone; else its last wait leads on. One that left as it should is the end where others missed it.
    """
    seen: list[int] = []
    gone = False
    while rank not in seen:
        seen.append(rank)
        traces = ranks.get(rank)
        if traces is None:
            return rank  # it left nothing at all
        found = traces.blame
        if traces.how == "failed":
            return rank
        following: int | None = None
        if found is not None:
            following, gone = find_longest_silent_rank(ranks, found.ranks), found.gone
        elif traces.how == "left":
            return rank if gone else None
        elif not gone:
            following = _awaited(ranks, traces)
        if following is None:
            return rank
        if following in seen:  # these wait for each other
            return find_stopped_rank(ranks, seen[seen.index(following) :])
        rank = following
    return rank


def _awaited(ranks: Mapping[int, RankTraces], traces: RankTraces) -> int | None:
    """The rank that a silent one waited for; of all, one that had not come so far."""
    if traces.awaited != ALL:
        return None if traces.awaited == NOBODY else traces.awaited
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


def _first(ranks: Mapping[int, RankTraces], votes: Mapping[int, int]) -> tuple[int, ...]:
    """Of the ranks where chains end the ones that failed, were named by a failure, or all.

    The earliest of them; and those that failed alike, as all ranks do upon the same call.
    """
    told = {root for rank in ranks if ranks[rank].blame and (root := _root(ranks, rank)) in votes}
    roots = [rank for rank in votes if rank in told] or list(votes)
    if not roots:
        return ()
    first = min(roots, key=lambda rank: (ranks[rank].time if rank in ranks else 0, rank))
    failure = ranks[first].failure if first in ranks else None
    if failure is None or not failure.problems[0].code:
        return (first,)
    alike = [
        rank
        for rank in roots
        if (other := ranks[rank].failure if rank in ranks else None) is not None
        and other.problems == failure.problems
    ]
    return tuple(sorted({first, *alike}))
