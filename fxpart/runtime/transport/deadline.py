"""Timeouts of waits between ranks, from predicted and then measured step times.

There are two limits. A rank that responds but is not ready may compile, load data or swap: others
wait at least five minutes. A rank that does not respond at all (:mod:`fxpart.runtime.heartbeat`) is
considered lost after thirty seconds. Both limits grow with the longest recent step. A timeout given
by the user replaces both.
"""

from __future__ import annotations

import math
import time

_WAIT, _SILENCE, _EARLY = 300.0, 30.0, 120.0  # Minimum seconds; early: silence in the first steps.
_TIMES = 30  # Multiple of the longest measured step.
_PREDICTED_TIMES = 100
_WARM = 6  # Laps until measurements count; a step has two.
_LAPS = 128  # Laps per window; the longest of this and the previous window counts.
_CHANGE = 1.25  # Smaller changes of a limit are ignored.


class Deadline:
    """The limits of this process.

    seconds: maximum duration of a wait. silence: maximum time without a sign of life of a rank that
    this process waits for.
    """

    def __init__(self, given: float | None, predicted: float = 0.0) -> None:
        """given: by the user, fixed. predicted: seconds of a step, 0 if unknown."""
        self.given = given
        predicted = predicted if math.isfinite(predicted) else 0.0
        self._before = 0.0
        self._laps = 0
        self._longest = self._earlier = 0.0
        self.seconds = max(_WAIT, _PREDICTED_TIMES * predicted) if given is None else given
        self.silence = max(_EARLY, _TIMES * predicted) if given is None else given

    def lap(self) -> bool:
        """Record an exchange between ranks (two per step); return whether the limits changed."""
        if self.given is not None:
            return False
        now = time.monotonic()
        took, self._before = now - self._before, now
        self._laps += 1
        if self._laps > 1 and took > self._longest:
            self._longest = took
        if self._laps % _LAPS == 0:
            self._earlier, self._longest = self._longest, 0.0
        if self._laps < _WARM:
            return False
        return self._set(max(self._longest, self._earlier))

    def _set(self, step: float) -> bool:
        seconds, silence = max(_WAIT, _TIMES * step), max(_SILENCE, _TIMES * step)
        if max(seconds, self.seconds) < _CHANGE * min(seconds, self.seconds) and (
            max(silence, self.silence) < _CHANGE * min(silence, self.silence)
        ):
            return False
        self.seconds, self.silence = seconds, silence
        return True
