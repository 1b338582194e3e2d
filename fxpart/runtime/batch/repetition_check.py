"""Check whether the rows of a batch may be repeated, from the program and the batch itself."""

from __future__ import annotations

from fxpart.runtime.batch.batch_agreement import BatchAgreement, BatchSource
from fxpart.runtime.batch.row_repetition import make_repetition_error
from fxpart.runtime.transport.agreement import agree
from fxpart.runtime.transport.interface import Transport


def check_repetition(transport: Transport, source: BatchSource, read: BatchAgreement) -> None:
    """Raise FXP114 on every rank if rows must be repeated and the results would change."""
    cut, feed = read.cut, source.feed
    if not cut.repeated:
        return
    read.confirm()

    def check() -> tuple[None, str]:
        if not feed.may_repeat(read.value, source.microbatches, max(cut.repeats)):
            raise make_repetition_error(sum(cut.rows), feed.multiple)
        return None, ""

    agree(transport, "a batch whose rows are repeated", check)
