"""Time short calls: choice of clock, number of repetitions, removal of outliers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fxpart.accelerator import get_device_module, is_accelerator
from fxpart.costmodels.profile_store import TimeQuartiles
from fxpart.profiling.outliers import timing

_WARM = 2
_LEAST, _MOST = 5, 60  # Numbers of samples.
_LONG = 3e-4  # Seconds of a sample, to make the cost of the clock negligible.
_CLOSE = 0.03  # Relative distance of quartiles that suffices.
_EACH = 5  # Samples between checks of the quartiles.


@dataclass(frozen=True)
class Sampler:
    """Times calls on a device.

    On a GPU, it uses CUDA events. On a CPU with one thread, it uses the thread's CPU time, which
    does not depend on other processes; with several threads, the wall clock.
    """

    device: torch.device

    def time(self, run: Callable[[int], object], seconds: float) -> TimeQuartiles:
        """Time ``run(i)`` for i = 0, 1, ..., for about ``seconds``.

        Stop early if the quartiles are within 3 %. Take at least two samples after a warm-up.
        """
        count = 0
        begun = time.perf_counter()
        for _ in range(_WARM):
            once = self._sample(run, count, 1)
            count += 1
            if time.perf_counter() - begun > seconds:
                break
        repeats = max(1, min(1000, round(_LONG / max(once, 1e-7))))
        samples: list[float] = []
        while len(samples) < _MOST:
            samples.append(self._sample(run, count, repeats))
            count += repeats
            late = time.perf_counter() - begun > seconds
            if late and len(samples) >= 2:
                break
            if len(samples) >= _LEAST and len(samples) % _EACH == 0 and _settled(samples):
                break
        return timing(samples)

    def _sample(self, run: Callable[[int], object], start: int, repeats: int) -> float:
        if is_accelerator(self.device):
            return self._events(run, start, repeats)
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        before = clock()
        for number in range(start, start + repeats):
            run(number)
        return (clock() - before) / repeats

    def _events(self, run: Callable[[int], object], start: int, repeats: int) -> float:
        event = get_device_module(self.device).Event
        first, last = (event(enable_timing=True) for _ in range(2))
        first.record()
        for number in range(start, start + repeats):
            run(number)
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / repeats


def _settled(samples: list[float]) -> bool:
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return high - low <= _CLOSE * middle
