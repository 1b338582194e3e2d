"""How long a rank waits for another: by the steps that were predicted and then measured.

Two limits. A rank that answers, but is not ready, may compile, load data or swap: it is waited for
at least five minutes. One that says nothing at all (:mod:`fxpart.runtime.heartbeat`) is given up
after thirty seconds. Both grow with the longest of the last steps. A number given by the user is
both.
"""

from __future__ import annotations

import math
import time

_WAIT, _SILENCE, _EARLY = 300.0, 30.0, 120.0  # seconds at least; early: silence in the first steps
_TIMES = 30  # the longest step that was measured
_PREDICTED_TIMES = 100
_WARM = 6  # laps until what is measured counts; a step has two
_LAPS = 128  # of a window: the longest of this one and the one before counts
_CHANGE = 1.25  # a limit that changes by less is left


class Deadline:
    """The limits of this process.

    seconds: that a wait may take. silence: that a rank may say nothing while this one waits.
    """

    def __init__(self, given: float | None, predicted: float = 0.0) -> None:
        """given: by the user, for good. predicted: seconds of a step, 0 if unknown."""
        self.given = given
        predicted = predicted if math.isfinite(predicted) else 0.0
        self._before = 0.0
        self._laps = 0
        self._longest = self._earlier = 0.0
        self.seconds = max(_WAIT, _PREDICTED_TIMES * predicted) if given is None else given
        self.silence = max(_EARLY, _TIMES * predicted) if given is None else given

    def lap(self) -> bool:
        """The ranks tell each other something, as they do twice a step; whether limits changed."""
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
