"""Compare a partitioned run with single-process training: train both and compare everything.

There are two references. The first is the captured graph, run unpartitioned on the same
microbatches; it must be equal bit for bit, except where a gradient is a sum over stages. The second
is the user's own module, equal within rounding. Both use the program's autocast. If values are sent
in a lower precision, the unpartitioned graph rounds them at the same places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from fxpart.capture.flat_batch import flatten_batch
from fxpart.capture.live_state import live_parameters
from fxpart.codegen.stage_assignment import stages_of
from fxpart.compat.optimizer_choice import choose
from fxpart.program.edges import find_value_edges, is_gradient_order_exact
from fxpart.rng import seeded
from fxpart.runtime.batch.batch_totals import BatchTotals
from fxpart.runtime.batch.mesh_rank_batch import get_row_multiple
from fxpart.runtime.dtypes import torch_dtype
from fxpart.runtime.gradients.tied_parameters import is_tied_gradient_order_exact
from fxpart.runtime.optimizer.user_optimizer import UserOptimizer
from fxpart.verification.rounding_error import Convert, RoundingBounds, measure_rounding
from fxpart.verification.single_process import (
    SingleProcessTrainer,
    TransferConversion,
    TransferPrecision,
)
from fxpart.verification.user_module_run import (
    UserModuleComparison,
    compare_written,
    run_written,
)
from fxpart.verification.verification_result import (
    TOLERANCE,
    DifferenceTable,
    ParameterDifference,
    Verification,
    has_equal_bits,
    relative,
)

if TYPE_CHECKING:
    from fxpart.api import Program


def verify(
    program: Program, *, steps: int = 3, batch: Any = None, optimizer: Any = None
) -> Verification:
    """Train ``steps`` steps on ``batch`` (default: the example) both ways and compare.

    Under torchrun every process trains its stage; rank 0 runs the reference and sends the result.
    optimizer: as for Program.trainer. A model without a loss is compared by the mean square of its
    floating-point outputs.
    """
    captured = program.captured
    if batch is None:
        assert captured.example is not None
        batch = captured.example()
    given = program.optimizer if optimizer is None else optimizer
    if isinstance(given, torch.optim.Optimizer):
        given = UserOptimizer(given, live_parameters(captured), followed=False)
    trainer = program.trainer(given, need_loss=False, routing="turns")
    try:
        seen = PartitionedRun([], [], {})
        for _ in range(steps):
            seen.losses.append(trainer.backward(batch))
            seen.gradients.append(trainer.gradients())
            trainer.update()
        seen.state.update(trainer.state_dict())
        text = b""
        if trainer.rank == 0:
            factory = given if isinstance(given, UserOptimizer) else choose(given).make
            text = msgspec.msgpack.encode(compare(program, factory, batch, seen))
        text = trainer.transport.exchange_bytes(text)[0]
    finally:
        trainer.close()
    return msgspec.msgpack.decode(text, type=Verification)  # JSON has no inf and no NaN


@dataclass(frozen=True)
class PartitionedRun:
    """Results of the partitioned run: loss and gradients per step, and the final state."""

    losses: list[torch.Tensor]
    gradients: list[Mapping[str, torch.Tensor]]
    state: dict[str, torch.Tensor]


def compare(program: Program, factory: Any, batch: Any, seen: PartitionedRun) -> Verification:
    """Repeat the run in a single process on the unpartitioned graph, and compare."""
    captured = program.captured
    device = seen.losses[0].device
    one = _one_process(program, factory, device=device)
    table = DifferenceTable.of(captured.parameters)
    for loss, found in zip(seen.losses, seen.gradients, strict=True):
        wanted = one.backward(list(flatten_batch(batch).tensors))
        table.add(loss, wanted, found, one.gradients())
        one.update()
    rows = tuple(
        ParameterDifference(
            name=name,
            gradient=table.gradient[name],
            parameter=relative(seen.state[name], one.state[name]),
            equal=table.equal[name] and has_equal_bits(seen.state[name], one.state[name]),
            noise=table.noise[name],
        )
        for name in captured.parameters
    )
    buffers = {
        name: relative(seen.state[name], one.state[name])
        for name in sorted(captured.persistent)
        if name in one.state and name not in captured.parameters
    }
    bits = table.loss == 0.0 and not any(buffers.values()) and all(row.equal for row in rows)
    alone = program.spec.sharding is None
    exact = (
        alone
        and device.type == "cpu"
        and is_gradient_order_exact(program.spec)
        and is_tied_gradient_order_exact(program.spec)
    )
    worst = _worst(table.loss, buffers, rows)
    if not exact and worst > TOLERANCE:
        rows, worst = _against_rounding(program, factory, batch, table, buffers, rows, device)
    eager = _against_module(program, factory, batch, seen)
    return Verification(
        ranks=program.plan.world,
        stages=len(program.plan.stages),
        steps=len(table.losses),
        microbatches=program.plan.microbatches,
        losses=tuple(table.losses),
        differences=rows,
        buffers_equal=not any(buffers.values()),
        exact=exact,
        equal=bits,
        largest=worst,
        tolerance=0.0 if exact else TOLERANCE,
        eager_loss=None if eager is None else eager.loss,
        eager_gradient=None if eager is None else eager.gradient,
        eager_differences=() if eager is None else eager.differences,
        passed=(bits if exact else worst <= TOLERANCE) and (eager is None or not eager.differences),
    )


def _against_module(
    program: Program, factory: Any, batch: Any, seen: PartitionedRun
) -> UserModuleComparison | None:
    """Compare the run with the user's module; return None if the module cannot run.

    The module runs microbatch by microbatch, since random numbers are drawn per microbatch. A loss
    divided by several numbers of the batch must run on the whole batch; it is not compared if it
    draws random numbers.
    """
    spec, microbatches = program.spec, program.plan.microbatches
    weight = None if spec.weight is None else BatchTotals(spec.weight, spec.symbols)
    if spec.totals is not None and weight is None:
        microbatches = 1
        if _draws(program):
            return None
    written = run_written(
        program.captured, program.graph, factory, batch, len(seen.losses),
        microbatches=microbatches, seed=program.plan.seed, multiple=get_row_multiple(spec),
        weight=weight, device=seen.losses[0].device,
    )  # fmt: skip
    if written is None:
        return None
    found = compare_written(written, seen.losses, seen.gradients, seen.state)
    lossy = bool(program.spec.transfer_dtype) or program.captured.precision != "fp32"
    if found.differences and not lossy:
        for known in measure_rounding(
            lambda convert: _one_process(program, factory, convert, seen.losses[0].device),
            lambda: list(flatten_batch(batch).tensors),
            len(seen.losses),
            relative,
        ):
            found = compare_written(written, seen.losses, seen.gradients, seen.state, known)
            if not found.differences:
                break
    promise = program.plan.equivalence
    whole = microbatches > 1 and promise is not None
    if whole and promise is not None and promise.promise != "per microbatch":
        found = _against_whole_batch(program, factory, batch, seen, found)
    return replace(found, differences=()) if lossy else found


def _against_whole_batch(
    program: Program, factory: Any, batch: Any, seen: PartitionedRun, found: UserModuleComparison
) -> UserModuleComparison:
    """Also compare with the module on the whole batch if no random numbers are drawn."""
    if _draws(program):
        return found
    written = run_written(
        program.captured, program.graph, factory, batch, 1, microbatches=1,
        seed=program.plan.seed, multiple=1, device=seen.losses[0].device,
    )  # fmt: skip
    if written is None:
        return found
    whole = compare_written(written, seen.losses[:1], seen.gradients[:1], {})
    more = tuple(f"{each} (module on the whole batch)" for each in whole.differences)
    return replace(found, differences=(*found.differences, *more))


def _draws(program: Program) -> bool:
    """Return whether training draws random numbers."""
    return any(node.target is seeded for node in program.graph.graph.nodes)


def _against_rounding(
    program: Program,
    factory: Any,
    batch: Any,
    table: DifferenceTable,
    buffers: Mapping[str, float],
    rows: tuple[ParameterDifference, ...],
    device: torch.device,
) -> tuple[tuple[ParameterDifference, ...], float]:
    """Return rows and largest difference without those that rounding alone explains.

    The rounding measures are taken one after another until nothing exceeds the tolerance.
    """
    given, worst = rows, _worst(table.loss, buffers, rows)
    for known in measure_rounding(
        lambda convert: _one_process(program, factory, convert, device),
        lambda: list(flatten_batch(batch).tensors),
        len(table.losses),
        relative,
    ):
        rows = tuple(_judged(row, known) for row in given)
        loss = 0.0 if table.loss <= known.loss else table.loss
        held = {n: d for n, d in buffers.items() if d > known.state.get(n, 0.0)}
        worst = _worst(loss, held, rows)
        if worst <= TOLERANCE:
            break
    return rows, worst


def _one_process(
    program: Program,
    factory: Any,
    convert: Convert | None = None,
    device: torch.device | None = None,
) -> SingleProcessTrainer:
    """Return a single-process trainer at the start of the run, with the same microbatches.

    convert: applied to each state tensor. device: where it trains, as the first rank does.
    """
    return SingleProcessTrainer(
        program.captured,
        program.graph,
        factory,
        microbatches=program.plan.microbatches,
        seed=program.plan.seed,
        multiple=get_row_multiple(program.spec),
        convert=convert,
        sending=sending_of(program),
        device=device,
    )


def sending_of(program: Program) -> TransferPrecision | None:
    """Return the conversions of the program's transfers; None without any."""
    if not program.spec.transfer_dtype:
        return None
    homes = [program.plan.stages[index].ranks for _, _, index in program.plan.program_stages]
    sent = {}
    for link in find_value_edges(program.spec):
        wire = None if link.sent == link.dtype else torch_dtype(link.sent)
        before = None if link.back in (-1, link.source) else link.back
        home = link.source if before is None else before
        sent[link.name, link.target] = TransferConversion(
            before=before,
            ahead=wire if homes[link.source] != homes[link.target] else None,
            back=wire if homes[home] != homes[link.target] else None,
        )
    return TransferPrecision(stages_of(program.graph.graph), sent)


def _worst(loss: float, buffers: Mapping[str, float], rows: Iterable[ParameterDifference]) -> float:
    """Return the largest difference that is not noise."""
    return max(
        [loss, *buffers.values(), *(max(r.gradient, r.parameter) for r in rows if not r.noise)]
    )


def _judged(row: ParameterDifference, known: RoundingBounds) -> ParameterDifference:
    """Return the row, marked as noise if rounding changes a single process as much."""
    if row.noise or max(row.gradient, row.parameter) <= TOLERANCE:
        return row
    covered = known.covers(row.name, row.gradient, row.parameter, TOLERANCE)
    return msgspec.structs.replace(row, noise=covered)
