"""Read one step's batch and compare it with the batches of the other ranks.

A rank may be given only the inputs that it needs. The ranks then exchange the dtypes and sizes of
their inputs. The combined result is cached by the digests of all ranks, so a step with sizes seen
before costs only the comparison of two numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fxpart.errors import FxpartError
from fxpart.runtime.batch.batch_reader import LocalBatch, MicrobatchSplit, Shape
from fxpart.runtime.batch.mesh_rank_batch import GlobalBatchReader
from fxpart.runtime.batch.row_repetition import make_repetition_error
from fxpart.runtime.transport.agreement import RankAgreement, agree, digest
from fxpart.runtime.transport.interface import Transport, bits_to_float, float_to_bits
from fxpart.runtime.transport.rank_request import RankRequest

_FULL = 1  # Lowest bit of the second digest: the batch has all inputs.
Known = dict[tuple[tuple[int, ...], ...], Mapping[str, Shape]]


@dataclass
class BatchSource:
    """Reader of the batches of one program.

    known: combined shapes of all ranks, by the digests that the ranks exchanged.
    """

    feed: GlobalBatchReader
    microbatches: int
    known: Known = field(default_factory=dict)


class BatchAgreement(RankAgreement[LocalBatch]):
    """Agreement of all ranks on one batch.

    Where ranks have only a part of the batch, :attr:`cut` waits until all ranks have agreed.
    """

    def __init__(
        self,
        transport: Transport,
        source: BatchSource,
        batch: Any,
        mode: str,
        *,
        local: bool = False,
        request: RankRequest | None = None,
        refusal: FxpartError | None = None,
        weighed: bool = False,
        adapt: Callable[[LocalBatch], tuple[LocalBatch, str]] = lambda seen: (seen, ""),
    ) -> None:
        """Read the batch and start the comparison with the other ranks.

        mode: description of what the batch is used for; it must be the same on every rank. request:
        this process's request to all ranks, sent with the comparison; the requests of all ranks are
        stored in it. refusal: why this process cannot take the batch; raised on every rank.
        weighed: whether :attr:`weight` is needed. adapt: returns the batch to use, and text that is
        added to ``mode``. Raises FXP105 on every rank if the batch of any rank is invalid.
        """
        self._source = source
        self._mode = mode
        self._request = RankRequest(alone=False) if request is None else request
        self._cut: MicrobatchSplit | None = None
        self._others: Mapping[str, Shape] = {}
        self._weight: float | None = None
        self._weighed = weighed and source.feed.has_batch_weight

        def read_local() -> tuple[LocalBatch, str]:
            if refusal is not None:
                raise refusal
            seen = source.feed.look(batch, local=local)
            seen, text = adapt(seen)
            self._mode += text
            if self._weighed:
                self._weight = source.feed.weight(seen)
            if not seen.absent or len(transport.local) == transport.ranks:
                self._cut = source.feed.cut(seen, source.microbatches)
            return seen, _text(self._mode, seen.shapes)

        super().__init__(transport, "the batches", read_local)

    @property
    def cut(self) -> MicrobatchSplit:
        """Return the batch in microbatches; wait for the other ranks if inputs are missing here."""
        if self._cut is None:
            self.confirm()
            # Every rank has all sizes now, so every rank finds the same problems.
            self._cut = self._source.feed.cut(self.value, self._source.microbatches, self._others)
        return self._cut

    @property
    def weight(self) -> float:
        """Return the weight of this batch in a mean over batches.

        The weight is the divisor of the loss, or the number of rows if the loss has no divisor.
        Waits for the other ranks if this one cannot compute it.
        """
        if not self._weighed:
            return float(sum(self.cut.rows))
        if self._weight is None:
            self.confirm()
        assert self._weight is not None, "the rank that computes the loss knows its divisor"
        return self._weight

    @property
    def others(self) -> Mapping[str, Shape]:
        """Dtypes and sizes of inputs that only other processes have, after the agreement."""
        return self._others

    def _digests(self) -> list[int]:
        if not self._value:
            return [0, 0]
        seen = self.value
        shapes = digest(msgspec.json.encode(seen.shapes).decode())
        return [digest(self._mode), shapes | _FULL if not seen.absent else shapes & ~_FULL]

    def _make_extra_integers(self) -> list[int]:
        bits = 0 if self._weight is None else float_to_bits(self._weight)
        return [self._request.mine, bits]

    def _compare(self, rows: list[list[int]]) -> None:
        *others, request, weights = zip(*rows, strict=True)
        self._request.store(request)
        if self._weighed and self._weight is None:
            self._weight = next((bits_to_float(bits) for bits in weights if bits), 0.0)
        rows = [list(row) for row in zip(*others, strict=True)]
        complete = all(row[2] & _FULL for row in rows)
        if complete or any(row[1] != rows[0][1] for row in rows):
            super()._compare(rows)
            return
        key = tuple((row[2],) for row in rows)
        if key not in self._source.known:
            self._source.known[key] = self._combine_inputs()
        self._others = self._source.known[key]

    def _combine_inputs(self) -> Mapping[str, Shape]:
        """Combine the inputs of all ranks; FXP501 if two ranks differ in one input."""
        shapes = self.value.shapes
        raws = self._transport.exchange_bytes(msgspec.json.encode(shapes))
        reports = [msgspec.json.decode(raw, type=dict[str, Shape]) for raw in raws]
        found: dict[str, Shape] = {}
        for mine in reports:
            for name, shape in mine.items():
                if found.setdefault(name, shape) != shape:
                    self._raise_difference(_text(self._mode, shapes))
        return found


def _text(mode: str, shapes: Mapping[str, tuple[str, Sequence[int]]]) -> str:
    inputs = " ".join(f"{n}:{dtype}{tuple(sizes)}" for n, (dtype, sizes) in shapes.items())
    return f"{mode} {inputs}"


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
