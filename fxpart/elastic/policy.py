"""Wait for what was lost, or go on with fewer ranks: what is expected to be done sooner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, inf


@dataclass(frozen=True)
class RankLossScenario:
    """What is known when ranks were lost.

    steps: updates that are left. full, small: seconds of a step with all ranks and with those that
    are left. change: seconds that a change of ranks takes: start, re-plan, load. arrivals: when the
    lost ranks may be back, as (probability, seconds from now); the probabilities sum to 1, and
    ``inf`` is for never.
    """

    steps: int
    full: float
    small: float
    change: float
    arrivals: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class WaitDecision:
    """How long to wait before going on with fewer, and what is expected.

    wait: seconds; 0 to go on with fewer at once, ``inf`` to wait however long it takes. seconds:
    until the run is expected to be done. words: for a person.
    """

    wait: float
    seconds: float
    words: str

    @property
    def smaller(self) -> bool:
        """Whether to go on with fewer ranks at once."""
        return self.wait == 0.0


def alone(it: RankLossScenario) -> float:
    """Seconds to the end with fewer ranks that stay fewer: ``change + steps * small``."""
    return it.change + it.steps * it.small


def grown(it: RankLossScenario, back: float) -> float:
    """Seconds to the end that go on with fewer at once, and with all when they are back.

    back: seconds from now. With c for ``change``, the small run has done ``(back - c) / small``
    steps by then, so that the end comes at ``back + c + (steps - (back - c) / small) * full``,
    or before ``back`` at ``c + steps * small``. Growing is left out where it does not pay.
    """
    stay = alone(it)
    if back >= stay:
        return stay
    done = max(0.0, back - it.change) / it.small
    # Devices that are back while the change is under way are taken up when it has ended.
    return min(stay, max(back, it.change) + it.change + (it.steps - done) * it.full)


def expected(it: RankLossScenario, wait: float) -> float:
    """Expected seconds to the end, waiting at most ``wait`` seconds before going on with fewer.

    Over the arrivals ``(p, w)`` the sum of ``p`` times ``w + change + steps * full`` where ``w`` is
    not above ``wait``, else ``wait`` plus :func:`grown` of what is left of ``w``.
    """
    parts = []
    for share, back in it.arrivals:
        if share <= 0.0:
            continue
        if back <= wait and back < inf:
            parts.append(share * (back + it.change + it.steps * it.full))
        else:
            parts.append(share * (wait + grown(it, back - wait)) if wait < inf else inf)
    return fsum(parts)


def decide(it: RankLossScenario) -> WaitDecision:
    """The wait with the least expected time; of equal ones the shortest.

    Waiting pays off at an arrival only, so that the best wait is 0 or one of them: between two
    arrivals every second of waiting is lost.
    """
    waits = sorted({0.0, *(w for p, w in it.arrivals if p > 0.0 and w < inf)})
    seconds, wait = min((expected(it, wait), wait) for wait in waits)
    other = expected(it, 0.0 if wait else max(waits))
    if wait == 0.0:
        words = f"going on with fewer ranks: done in {_time(seconds)}"
        if max(waits) > 0.0:
            words += f", {_time(other)} if waited {_time(max(waits))} for the lost"
    else:
        words = f"waiting up to {_time(wait)}: done in {_time(seconds)}, {_time(other)} with fewer"
    return WaitDecision(wait, seconds, words)


def calibrate_step_seconds(predicted: tuple[float, float], seen: float) -> tuple[float, float]:
    """Step seconds with all and with fewer ranks, predicted, corrected by what was ``seen`` of all.

    Predictions err alike on one machine, so that both are scaled by ``seen`` over the first; 0 for
    nothing seen yet.
    """
    full, small = predicted
    factor = seen / full if seen > 0.0 and full > 0.0 else 1.0
    return full * factor, small * factor


def _time(seconds: float) -> str:
    if seconds == inf:
        return "never"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
