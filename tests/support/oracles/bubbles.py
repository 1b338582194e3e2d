"""How much of its time a pipeline of equal stages is idle, with a flush and without: closed forms.

Sources: Huang et al., GPipe, NeurIPS 2019; Narayanan et al., PipeDream, SOSP 2019; section 1 of the
notes on weight versions. For a stage graph ``stages`` is the number on its longest path.
"""

from __future__ import annotations


def flush_bubble(stages: int, microbatches: int) -> float:
    """Share of each synchronous step that a rank is idle: (K - 1) / (M + K - 1), GPipe and 1F1B."""
    return (stages - 1) / (microbatches + stages - 1)


def async_bubble(stages: int, microbatches: int) -> float:
    """Share of a whole asynchronous run that a rank is idle: (K - 1) / (T + K - 1).

    microbatches: of all its steps together; only the fill and the drain are idle.
    """
    return flush_bubble(stages, microbatches)


def async_speedup(stages: int, microbatches: int, steps: int | None = None) -> float:
    """Asynchronous over synchronous throughput, at M microbatches to an update.

    Without ``steps`` the bound that a long run tends to, (M + K - 1) / M; with it that of a run of
    so many updates, n (M + K - 1) / (n M + K - 1).
    """
    flushed = microbatches + stages - 1
    if steps is None:
        return flushed / microbatches
    return steps * flushed / (steps * microbatches + stages - 1)
