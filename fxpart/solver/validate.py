"""Validation of problems: reports every error, not just the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias, TypeVar

from fxpart.errors import FxpartError, Problem
from fxpart.schedule.spec import list_schedules
from fxpart.solver.problem import BlockValue, PartitionProblem

LARGEST = 2**60  # bytes and seconds: larger sums would not be exact
MOST_BLOCKS = 4096  # tables have an entry for each pair of blocks
MOST = 2**31  # microbatches, devices, rows
Fault: TypeAlias = tuple[str, str]  # where, and why
P = TypeVar("P")


def check_problem(problem: PartitionProblem) -> None:
    """Raise FXP206 with every error in ``problem``."""
    raise_faults(problem, (_shape, _values, _weights, _costs, _sizes))


def raise_faults(problem: P, checks: Sequence[Callable[[P], Iterator[Fault]]]) -> None:
    """Raise FXP206 with everything that the checks find."""
    faults = [
        Problem("FXP206", where, why, "Make the problem again from its model and cluster.")
        for check in checks
        for where, why in check(problem)
    ]
    if faults:
        raise FxpartError(faults)


def check_block_count(count: int) -> Iterator[Fault]:
    """Yield a fault if there are more blocks than tables have room for."""
    if count > MOST_BLOCKS:
        yield "blocks", f"There are {count} blocks; at most {MOST_BLOCKS} are supported."


def check_flow(where: str, value: BlockValue, count: int) -> Iterator[Fault]:
    """Yield a fault unless the producer and the consumers of a value are ascending blocks."""
    order = (value.producer, *value.consumers)
    if not value.consumers or not is_ascending(order, count):
        yield where, f"Producer and consumers {order} are not ascending block indices."


def check_row(where: str, row: Sequence[float], length: int) -> Iterator[Fault]:
    """Yield a fault unless the row has so many numbers, each exact in sums."""
    if len(row) != length:
        yield where, f"There are {len(row)} entries; {length} are needed."
    elif not all(map(is_exact, row)):
        yield where, "An entry is not a number from 0 to 2**60."


def is_exact(x: float) -> bool:
    """Return whether sums of such numbers are exact."""
    return 0 <= x <= LARGEST


def is_ascending(order: Sequence[int], count: int) -> bool:
    """Return whether these are indices below ``count``, each larger than the one before."""
    return 0 <= order[0] and order[-1] < count and all(a < b for a, b in pairwise(order))


def _shape(problem: PartitionProblem) -> Iterator[Fault]:
    n = len(problem.blocks)
    for name in ("blocks", "devices", "variants", "schedules", "step", "recompute"):
        if not getattr(problem, name):
            yield name, "The list is empty."
    known = list_schedules(chooses_cuts=True)
    if wrong := [name for name in problem.schedules if name not in known]:
        yield (
            "schedules",
            f"Cuts cannot be chosen for {wrong[0]!r}. Supported schedules: {', '.join(known)}.",
        )
    yield from check_block_count(n)
    if problem.min_stages < 1 or not 1 <= problem.max_stages <= len(problem.devices):
        # min_stages > max_stages is an unsatisfiable request, not an invalid problem
        yield (
            "min_stages, max_stages",
            f"{problem.min_stages} and {problem.max_stages} are not within 1 and "
            f"{len(problem.devices)} devices.",
        )
    for name in ("once", "action"):
        if not is_exact(getattr(problem, name)):
            yield name, "It is not a number from 0 to 2**60."
    if any(not 0 <= b < n for b in problem.no_cut_after):
        yield "no_cut_after", f"A block is not one of 0 to {n - 1}."
    for index, device in enumerate(problem.devices):
        if not 0 <= device.type < len(problem.step):
            yield f"devices[{index}].type", f"The type {device.type} has no row of costs."
        for name in ("memory", "latency", "inverse_bandwidth"):
            if not is_exact(getattr(device, name)):
                yield f"devices[{index}].{name}", "It is not a number from 0 to 2**60."


def _values(problem: PartitionProblem) -> Iterator[Fault]:
    for index, value in enumerate(problem.values):
        yield from check_flow(f"values[{index}]", value, len(problem.blocks))


def _weights(problem: PartitionProblem) -> Iterator[Fault]:
    for index, weight in enumerate(problem.weights):
        where = f"weights[{index}] ({weight.name})"
        if not weight.blocks or not is_ascending(weight.blocks, len(problem.blocks)):
            yield where, f"The blocks {weight.blocks} are not ascending block indices."
        if not all(
            map(is_exact, (weight.weight, weight.gradient, weight.optimizer, weight.temporary))
        ):
            yield where, "A size is not from 0 to 2**60 bytes."


def _costs(problem: PartitionProblem) -> Iterator[Fault]:
    n, types = len(problem.blocks), len(problem.step)
    tables: list[tuple[str, Sequence[Sequence[float]]]] = [("step", problem.step)]
    rows: list[tuple[str, Sequence[float], int]] = []
    for index, one in enumerate(problem.variants):
        where = f"variants[{index}]"
        if not 1 <= one.microbatches <= MOST or one.microbatch_size < 1:
            yield where, "Microbatches (at most 2**31) and their size must be at least 1."
        tables += [(f"{where}.forward", one.forward), (f"{where}.backward", one.backward)]
        if one.split is not None:
            tables.append((f"{where}.split.seconds", one.split.seconds))
            rows.append((f"{where}.split.kept", one.split.kept, n))
        rows += [
            (f"{where}.activation", one.activation, n),
            (f"{where}.workspace", one.workspace, n),
        ]
        rows.append((f"{where}.value_bytes", one.value_bytes, len(problem.values)))
        for mode in one.recompute:
            at = f"{where}.recompute, {mode.mode}"
            tables.append((f"{at}, seconds", mode.seconds))
            rows += [
                (f"{at}, activation", mode.activation, n),
                (f"{at}, workspace", mode.workspace, n),
            ]
        lacking = set(problem.recompute) - {"none", *(mode.mode for mode in one.recompute)}
        if lacking:
            yield where, f"Costs of recompute {', '.join(sorted(lacking))} are missing."
    for where, table in tables:
        if len(table) != types:
            yield where, f"There are {len(table)} rows for {types} device types."
        rows += [(f"{where}[{kind}]", row, n) for kind, row in enumerate(table)]
    for where, row, length in rows:
        yield from check_row(where, row, length)


def _sizes(problem: PartitionProblem) -> Iterator[Fault]:
    state = sum(w.weight + w.gradient + w.optimizer + w.temporary for w in problem.weights)
    widest = max((value.widened for value in problem.values), default=1)
    flying = max(
        (
            v.microbatches
            * (sum(map(sum, (v.activation, v.workspace))) + widest * sum(v.value_bytes))
            + v.microbatches * sum(sum(r.activation) + sum(r.workspace) for r in v.recompute)
            for v in problem.variants
        ),
        default=0,
    )
    if state + flying > LARGEST or any(d.memory > LARGEST for d in problem.devices):
        yield "bytes", "The sizes add up to more than 2**60 bytes."
