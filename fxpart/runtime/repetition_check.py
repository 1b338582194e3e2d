"""Whether the rows of a batch may be repeated: measured by forward runs, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from fxpart.runtime.agreement import agree
from fxpart.runtime.batch import Cut
from fxpart.runtime.reading import Reading, Source
from fxpart.runtime.repetition import Results, check_equal
from fxpart.runtime.transport import Transport


def check_repetition(
    transport: Transport, source: Source, read: Reading, run: Callable[[Cut], Results]
) -> None:
    """Check that the results of a batch whose rows are repeated do not depend on how often.

    run: gives the results of a cut. Does nothing for batches whose rows divide, and for numbers of
    rows that were checked before. Raises FXP114 on every rank.
    """
    cut = read.cut
    if not cut.repeated:
        return
    key = (cut.rows, cut.repeats)
    if key in source.repeatable:
        return
    once, twice = run(cut), run(read.repeated_again())

    def compare() -> tuple[None, str]:
        check_equal(once, twice, cut, source.feed.multiple)
        return None, ""

    agree(transport, "a batch whose rows are repeated", compare)
    source.repeatable.add(key)


def with_buffers(modules: Sequence[nn.Module], run: Callable[[], torch.Tensor | None]) -> Results:
    """Return the loss of a forward run and what the buffers are after it; then restore them."""
    buffers = list({id(b): b for module in modules for b in module.buffers()}.values())
    before = [buffer.clone() for buffer in buffers]
    try:
        loss = run()
        after = [buffer.clone() for buffer in buffers]
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
    changed = any(
        old.is_floating_point() and not torch.equal(old, new)
        for old, new in zip(before, after, strict=True)
    )
    return Results([] if loss is None else [loss], after, changed)
