"""Whether the rows of a batch may be repeated: as the program says, and by the batch itself."""

from __future__ import annotations

import torch

from fxpart.program import ProgramSpec
from fxpart.runtime.agreement import agree
from fxpart.runtime.reading import Reading, Source
from fxpart.runtime.repetition import refused
from fxpart.runtime.totals import BatchTotals
from fxpart.runtime.transport import Transport

_ROUNDING = 1e-6  # of a divisor that is kept away from zero by a small number


def check_repetition(
    transport: Transport, spec: ProgramSpec, source: Source, read: Reading
) -> None:
    """FXP114 on every rank where rows have to be repeated and results would depend on that.

    spec: any lane's program.
    """
    cut = read.cut
    if not cut.repeated:
        return
    read.confirm()

    def check() -> tuple[None, str]:
        kind = spec.repeat[source.microbatches > 1]
        if kind == "divisor" and not cut.local and spec.weight is not None:
            weight = BatchTotals(spec.weight, spec.symbols, source.feed.constants)
            fits = _scales(weight, spec, read.value.tensors, max(cut.repeats))
        else:
            fits = kind == "rows"
        if not fits:
            raise refused(sum(cut.rows), source.feed.multiple)
        return None, ""

    agree(transport, "a batch whose rows are repeated", check)


def _scales(
    weight: BatchTotals, spec: ProgramSpec, tensors: dict[str, torch.Tensor], count: int
) -> bool:
    """Whether the divisor of so many times the rows is so many times that of the rows.

    Ranks that do not have what it takes leave it to those that do.
    """
    inputs = spec.inputs if spec.sharding is None else spec.sharding.inputs
    dims = {given.name: given.batch_dim for given in inputs}
    repeated = dict(tensors)
    for name, dim in dims.items():
        if dim is not None and name in tensors:
            repeated[name] = torch.cat([tensors[name]] * count, dim)
    once, again = weight.of(tensors), weight.of(repeated)
    if not once:
        return True
    *_, before = once.values()
    *_, after = again.values()
    return abs(float(after) - count * float(before)) <= _ROUNDING * abs(count * float(before))
