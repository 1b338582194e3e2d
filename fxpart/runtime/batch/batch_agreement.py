"""A step's batch on its way: read here, compared with what the other ranks were given.

A rank may be given only what it needs. Then it tells the others which inputs it has, with their
dtypes and sizes, and hears theirs; which sets of inputs go together is remembered, so that a step
with the sizes of an earlier one costs the ranks nothing more than comparing two numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fxpart.errors import FxpartError
from fxpart.runtime.batch.batch_reader import LocalBatch, MicrobatchSplit, Shape
from fxpart.runtime.batch.mesh_rank_batch import GlobalBatchReader
from fxpart.runtime.transport.agreement import RankAgreement, digest
from fxpart.runtime.transport.float_bits import bits_to_float, float_to_bits
from fxpart.runtime.transport.interface import Transport
from fxpart.runtime.transport.rank_request import RankRequest

_FULL = 1  # the last bit of the second digest: whether the batch has all inputs
Known = dict[tuple[tuple[int, ...], ...], Mapping[str, Shape]]


@dataclass
class BatchSource:
    """What reads the batches of one program.

    known: shapes by the rows that all ranks told.
    """

    feed: GlobalBatchReader
    microbatches: int
    known: Known = field(default_factory=dict)


class BatchAgreement(RankAgreement[LocalBatch]):
    """One batch; :attr:`cut` is there when all ranks are known to fit where it is given in part."""

    def __init__(
        self,
        transport: Transport,
        source: BatchSource,
        batch: Any,
        mode: str,
        *,
        local: bool = False,
        asks: RankRequest | None = None,
        refusal: FxpartError | None = None,
        weighed: bool = False,
    ) -> None:
        """mode: what is done with it, in words, which must be the same on every rank.

        asks: what this process asks of all, sent along, and where theirs is put. refusal: why this
        process cannot take the batch, which is raised on every rank. weighed: whether its
        :attr:`weight` is needed. Raises FXP105 on every rank if any rank's batch does not fit.
        """
        self._source = source
        self._mode = mode
        self._asks = RankRequest(alone=False) if asks is None else asks
        self._cut: MicrobatchSplit | None = None
        self._others: Mapping[str, Shape] = {}
        self._weight: float | None = None
        self._weighed = weighed and source.feed.weighs

        def look() -> tuple[LocalBatch, str]:
            if refusal is not None:
                raise refusal
            seen = source.feed.look(batch, local=local)
            if self._weighed:
                self._weight = source.feed.weight(seen)
            if not seen.absent or len(transport.local) == transport.ranks:
                self._cut = source.feed.cut(seen, source.microbatches)
            return seen, _text(self._mode, seen.shapes)

        super().__init__(transport, "the batches", look)

    @property
    def cut(self) -> MicrobatchSplit:
        """The batch in microbatches; waits for the other ranks if some of it is theirs."""
        if self._cut is None:
            self.confirm()
            # Every rank has all sizes now, and so they find the same faults.
            self._cut = self._source.feed.cut(self.value, self._source.microbatches, self._others)
        return self._cut

    @property
    def weight(self) -> float:
        """What the batch weighs in a mean over batches; waits for ranks that know if this does not.

        Its rows, where the loss is not divided by one number of the batch.
        """
        if not self._weighed:
            return float(sum(self.cut.rows))
        if self._weight is None:
            self.confirm()
        assert self._weight is not None, "the rank of the loss has what it is divided by"
        return self._weight

    @property
    def others(self) -> Mapping[str, Shape]:
        """Of inputs that this process was not given, as others told when all were heard."""
        return self._others

    def _digests(self) -> list[int]:
        if not self._value:
            return [0, 0]
        seen = self.value
        shapes = digest(msgspec.json.encode(seen.shapes).decode())
        return [digest(self._mode), shapes | _FULL if not seen.absent else shapes & ~_FULL]

    def _aside(self) -> list[int]:
        bits = 0 if self._weight is None else float_to_bits(self._weight)
        return [self._asks.mine, bits]

    def _compare(self, rows: list[list[int]]) -> None:
        *others, asks, weights = zip(*rows, strict=True)
        self._asks.hear(asks)
        if self._weighed and self._weight is None:
            self._weight = next((bits_to_float(bits) for bits in weights if bits), 0.0)
        rows = [list(row) for row in zip(*others, strict=True)]
        complete = all(row[2] & _FULL for row in rows)
        if complete or any(row[1] != rows[0][1] for row in rows):
            super()._compare(rows)
            return
        key = tuple((row[2],) for row in rows)
        if key not in self._source.known:
            self._source.known[key] = self._put_together()
        self._others = self._source.known[key]

    def _put_together(self) -> Mapping[str, Shape]:
        """All ranks' inputs; FXP501 where two have different ones of one name."""
        shapes = self.value.shapes
        raws = self._transport.exchange_bytes(msgspec.json.encode(shapes))
        told = [msgspec.json.decode(raw, type=dict[str, Shape]) for raw in raws]
        found: dict[str, Shape] = {}
        for mine in told:
            for name, shape in mine.items():
                if found.setdefault(name, shape) != shape:
                    self._refuse(_text(self._mode, shapes))
        return found


def _text(mode: str, shapes: Mapping[str, tuple[str, Sequence[int]]]) -> str:
    inputs = " ".join(f"{n}:{dtype}{tuple(sizes)}" for n, (dtype, sizes) in shapes.items())
    return f"{mode} {inputs}"
