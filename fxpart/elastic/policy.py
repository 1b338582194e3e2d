"""Policy after lost ranks: wait for them or continue with fewer, whichever ends sooner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, inf


@dataclass(frozen=True)
class RankLossScenario:
    """Situation when ranks were lost.

    steps: remaining updates. full, small: step time in seconds with all ranks and with the
    remaining ones. change: seconds for a change of ranks (start, plan, load). arrivals: return
    times of the lost ranks as (probability, seconds from now); probabilities sum to 1, ``inf``
    means never.
    """

    steps: int
    full: float
    small: float
    change: float
    arrivals: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class WaitDecision:
    """How long to wait before continuing with fewer ranks.

    wait: seconds; 0: continue at once, ``inf``: wait without limit. seconds: expected time until
    the run ends. words: explanation.
    """

    wait: float
    seconds: float
    words: str

    @property
    def smaller(self) -> bool:
        """Whether to continue with fewer ranks at once."""
        return self.wait == 0.0


def compute_small_seconds(scenario: RankLossScenario) -> float:
    """Return the seconds to the end with fewer ranks throughout: ``change + steps * small``."""
    return scenario.change + scenario.steps * scenario.small


def compute_grown_seconds(scenario: RankLossScenario, back: float) -> float:
    """Return the seconds to the end with fewer ranks at first, and all when they return.

    back: seconds from now until they return. With c for ``change``, the small run has done ``(back
    - c) / small`` steps by then, so the end is at ``back + c + (steps - (back - c) / small) *
    full``, or before ``back`` at ``c + steps * small``. Growing is skipped if it does not help.
    """
    stay = compute_small_seconds(scenario)
    if back >= stay:
        return stay
    done = max(0.0, back - scenario.change) / scenario.small
    # Devices that return during a change are used after it has ended.
    return min(
        stay, max(back, scenario.change) + scenario.change + (scenario.steps - done) * scenario.full
    )


def compute_expected_seconds(scenario: RankLossScenario, wait: float) -> float:
    """Return the expected seconds to the end, waiting at most ``wait`` seconds for the lost ranks.

    Sum over the arrivals ``(p, w)`` of ``p`` times: ``w + change + steps * full`` if ``w`` is at
    most ``wait``, else ``wait`` plus :func:`compute_grown_seconds` of ``w - wait``.
    """
    parts = []
    for probability, back in scenario.arrivals:
        if probability <= 0.0:
            continue
        if back <= wait and back < inf:
            parts.append(probability * (back + scenario.change + scenario.steps * scenario.full))
        else:
            parts.append(
                probability * (wait + compute_grown_seconds(scenario, back - wait))
                if wait < inf
                else inf
            )
    return fsum(parts)


def decide(scenario: RankLossScenario) -> WaitDecision:
    """Return the wait with the least expected time; the shortest of equal ones.

    The best wait is 0 or an arrival, as waiting between two arrivals only loses time.
    """
    waits = sorted({0.0, *(w for p, w in scenario.arrivals if p > 0.0 and w < inf)})
    seconds, wait = min((compute_expected_seconds(scenario, wait), wait) for wait in waits)
    other = compute_expected_seconds(scenario, 0.0 if wait else max(waits))
    if wait == 0.0:
        words = f"continuing with fewer ranks: expected end in {_format_time(seconds)}"
        if max(waits) > 0.0:
            words += (
                f", {_format_time(other)} if it waits {_format_time(max(waits))} for the others"
            )
    else:
        words = (
            f"waiting up to {_format_time(wait)}: expected end in {_format_time(seconds)}, "
            f"{_format_time(other)} with fewer"
        )
    return WaitDecision(wait, seconds, words)


def calibrate_step_seconds(predicted: tuple[float, float], seen: float) -> tuple[float, float]:
    """Scale predicted step times (all ranks, fewer ranks) by the measured step time of all.

    Prediction errors are similar on one host, so both are scaled by ``seen`` over the first;
    ``seen`` is 0 if nothing was measured yet.
    """
    full, small = predicted
    factor = seen / full if seen > 0.0 and full > 0.0 else 1.0
    return full * factor, small * factor


def _format_time(seconds: float) -> str:
    if seconds == inf:
        return "never"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
