"""Groups of copies and what flows between them, by hand and at random."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from fxpart.schedule.queues.dispatcher import Queues


def queues(
    counts: list[int],
    edges: set[tuple[int, int]],
    frozen: int,
    limits: list[int],
    ties: Iterable[tuple[int, int]] = (),
) -> Queues:
    """Groups of so many copies. edges: who feeds whom; the first ``frozen`` have no backward.

    ties: groups that hold some of the same parameters.
    """
    groups, start = [], 0
    for count in counts:
        groups.append(tuple(range(start, start + count)))
        start += count
    back = {(a, b) for a, b in edges if a >= frozen}
    return Queues(
        tuple(groups),
        tuple(tuple(sorted(a for a, b in edges if b == g)) for g in range(len(counts))),
        tuple(tuple(sorted(b for a, b in back if a == g)) for g in range(len(counts))),
        tuple(g >= frozen for g in range(len(counts))),
        {copy: limits[copy % len(limits)] for group in groups for copy in group},
        tuple(
            tuple(sorted({sum(tie) - g for tie in ties if g in tie})) for g in range(len(counts))
        ),
    )


@st.composite
def shapes(draw: st.DrawFn) -> Queues:
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    chain = {(g, g + 1) for g in range(len(counts) - 1)}
    skips = {(a, b) for a in range(len(counts)) for b in range(a + 2, len(counts))}
    extra = draw(st.sets(st.sampled_from(sorted(skips)))) if skips else set()
    if draw(st.booleans()) and len(counts) > 2:  # two branches that meet
        chain = {(0, g) for g in range(1, len(counts) - 1)}
        chain |= {(g, len(counts) - 1) for g in range(1, len(counts) - 1)}
    frozen = draw(st.integers(0, 1)) if len(counts) > 1 else 0
    limits = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    trained = range(frozen, len(counts))
    pairs = sorted((a, b) for a in trained for b in trained if a < b)
    ties = draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    return queues(counts, chain | extra, frozen, limits, sorted(ties))
