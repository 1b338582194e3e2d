"""Whether the rows of a batch may be repeated: as the program says, and by the batch itself."""

from __future__ import annotations

from fxpart.runtime.batch.batch_agreement import BatchAgreement, BatchSource
from fxpart.runtime.batch.row_repetition import make_repetition_error
from fxpart.runtime.transport.agreement import agree
from fxpart.runtime.transport.interface import Transport


def check_repetition(transport: Transport, source: BatchSource, read: BatchAgreement) -> None:
    """FXP114 on every rank where rows have to be repeated and results would depend on that."""
    cut, feed = read.cut, source.feed
    if not cut.repeated:
        return
    read.confirm()

    def check() -> tuple[None, str]:
        if not feed.may_repeat(read.value, source.microbatches, max(cut.repeats)):
            raise make_repetition_error(sum(cut.rows), feed.multiple)
        return None, ""

    agree(transport, "a batch whose rows are repeated", check)
