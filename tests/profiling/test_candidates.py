"""What of a model is measured whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fxpart.profiling.candidates import add_whole_model, short_enough
from fxpart.solver.problem import PartitionChoice


def problem(*rows: int) -> Any:
    """Only the sizes of microbatches count."""
    return SimpleNamespace(variants=[SimpleNamespace(microbatch_size=size) for size in rows])


@pytest.mark.parametrize(("best", "other"), [(0, 3), (1, 3), (2, 0), (3, 0)])
def test_the_whole_model_at_two_unlike_sizes_first(best: int, other: int) -> None:
    """And last where ops are measured too: at the sizes of the choices, the largest, the least."""
    sizes = dict.fromkeys([best, 1, 0, 3])
    rest = [(size, (0,)) for size in sizes if size not in (best, other)]
    choices = [PartitionChoice(variant=best, schedule="1f1b", starts=(0, 4)),
               PartitionChoice(variant=1, schedule="gpipe", starts=(0, 2, 5))]  # fmt: skip
    found = add_whole_model(problem(8, 4, 2, 1), choices)
    assert [(c.variant, c.starts) for c in found] == [
        (best, (0, 4)), (best, (0,)), (other, (0,)), (1, (0, 2, 5)), *rest,
    ]  # fmt: skip
    few = add_whole_model(problem(8, 4, 2, 1), choices, 3)
    assert few == [one for one in found if one.starts != (0, 2, 5)]


def test_nothing_twice() -> None:
    whole = PartitionChoice(variant=0, schedule="1f1b", starts=(0,))
    assert add_whole_model(problem(8), [whole, whole]) == [whole]


def priced(*rows: int, no_cut_after: tuple[int, ...] = ()) -> Any:
    """Four blocks: a row takes 1, 2, 3 and 4 seconds of forward there, and as much of backward."""
    variants = []
    for size in rows:
        seconds = (tuple(float(size * k) for k in (1, 2, 3, 4)),)
        variants.append(SimpleNamespace(microbatch_size=size, forward=seconds, backward=seconds))
    return SimpleNamespace(
        variants=variants, blocks=range(4), max_stages=2, no_cut_after=no_cut_after
    )


@pytest.mark.parametrize(
    ("seconds", "variant", "starts"),
    [
        (160.0, 0, (0,)),
        (40.0, 1, (0,)),  # fewer rows
        (39.0, 2, (0,)),
        (20.0, 2, (0,)),
        (19.0, 2, (0, 3)),  # fewer blocks
        (6.0, 2, (0, 2)),
        (0.1, 2, (0, 1)),  # the least there is
    ],
)
def test_so_much_of_a_model_as_there_is_time_for(
    seconds: float, variant: int, starts: tuple[int, ...]
) -> None:
    found = short_enough(priced(8, 2, 1), 0, seconds)
    assert (found.variant, found.starts) == (variant, starts)


def test_no_part_ends_where_none_may() -> None:
    assert short_enough(priced(1, no_cut_after=(1, 2)), 0, 19.0).starts == (0, 1)
    assert short_enough(priced(1, no_cut_after=(0, 1, 2)), 0, 0.1).starts == (0,)
    more = short_enough(priced(1, 4, 2), 2, 1e9)  # never more rows than the variant's
    assert (more.variant, more.starts) == (2, (0,))
