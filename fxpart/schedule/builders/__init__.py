"""Schedule builders: one function per schedule that orders the computations of each stage.

:mod:`fxpart.schedule.spec` has the table of schedules. The diagrams in the docstrings are drawn by
:mod:`fxpart.cli.schedule` for stages that take one column forward and two backward. A test draws
each diagram again and compares.
"""

from __future__ import annotations

from fxpart.schedule.builders.asynchronous import asynchronous
from fxpart.schedule.builders.gpipe_1f1b import forward_only, gpipe, one_f_one_b
from fxpart.schedule.builders.virtual_stages import breadth_first, interleaved
from fxpart.schedule.builders.zero_bubble import assign_v_ranks, zb_h1, zb_v

__all__ = [
    "assign_loop_ranks",
    "assign_v_ranks",
    "asynchronous",
    "breadth_first",
    "forward_only",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "zb_h1",
    "zb_v",
]  # fmt: skip


def assign_loop_ranks(stages: int, ranks: int) -> tuple[int, ...]:
    """Return the ranks of stages assigned to ranks in a loop, for example (0, 1, 0, 1)."""
    return tuple(stage % ranks for stage in range(stages))
