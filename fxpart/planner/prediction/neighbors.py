"""Choices that differ from a plan's choice in a single decision, for comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from fxpart.solver.joint.objective import Degrees, degrees
from fxpart.solver.joint.problem import JointChoice, JointProblem
from fxpart.solver.schedule_costs import has_pieces

Named = tuple[str, JointChoice]  # description of the difference, and the choice
# Decisions by their names in descriptions, and their places in Degrees.
_PLACE: dict[str, int] = {
    "tensor": 1, "expert": 2, "ZeRO": 3, "recompute": 4, "context": 5, "shard degree": 6,
    "offload": 7,
}  # fmt: skip


class OptionIndex:
    """The options of a problem by pool and degrees."""

    def __init__(self, problem: JointProblem) -> None:
        """Index the options; the first of equal ones is used."""
        self.problem = problem
        self._index: dict[tuple[int, Degrees], int] = {}
        for index, option in enumerate(problem.options):
            self._index.setdefault((option.pool, degrees(problem, index)), index)

    def find(self, pool: int, wanted: Degrees) -> int | None:
        """Return the option with these degrees on a pool."""
        return self._index.get((pool, wanted))

    def with_data(self, option: int, data: int) -> int | None:
        """Return the same option with another number of data replicas."""
        old = degrees(self.problem, option)
        return self.find(self.problem.options[option].pool, _valid(old._replace(data=data)))

    def changed(self, option: int, what: str, value: int | str) -> int | None:
        """Return the same option on as many devices, with another value of one decision."""
        old = degrees(self.problem, option)
        name = Degrees._fields[_PLACE[what]]
        changed: dict[str, Any] = {name: value}
        wanted = old._replace(**changed)
        if name in ("tensor", "context"):
            ranks = old.data * getattr(old, name)
            if ranks % int(value):
                return None
            wanted = wanted._replace(data=ranks // int(value))
        return self.find(self.problem.options[option].pool, _valid(wanted))


def _valid(wanted: Degrees) -> Degrees:
    """Return the degrees without ZeRO where there is one replica, and with a fitting shard degree.

    A shard degree that is no longer a part of the replicas, or without ZeRO, becomes 0.
    """
    zero = wanted.zero if wanted.data > 1 else 0
    shards = wanted.shard_degree
    fits = (
        zero and wanted.expert == 1 and shards < wanted.data and wanted.data % max(1, shards) == 0
    )
    return wanted._replace(zero=zero, shard_degree=shards if fits else 0)


def one_decision(problem: JointProblem, choice: JointChoice) -> Iterator[Named]:
    """Yield the same stages with another microbatch count, schedule, or degree on every stage.

    Counts: the next smaller and larger. Degrees: every value of some option, on as many devices (a
    change of the tensor degree changes the data degree inversely). They may violate memory limits
    and constraints.
    """
    yield from _counts(problem, choice)
    if choice.virtual == 1:
        for schedule in problem.schedules:
            if schedule != choice.schedule and not has_pieces(schedule):
                words = f"{schedule} instead of {choice.schedule}"
                yield words, msgspec.structs.replace(choice, schedule=schedule)
    options = OptionIndex(problem)
    for what in _PLACE:
        yield from _degree(options, choice, what)


def _counts(problem: JointProblem, choice: JointChoice) -> Iterator[Named]:
    now = choice.microbatches
    below = [m for m in problem.microbatches if m < now]
    above = [m for m in problem.microbatches if m > now]
    for other in (*sorted(below)[-1:], *sorted(above)[:1]):
        words = f"{other} microbatches instead of {now}"
        yield words, msgspec.structs.replace(choice, microbatches=other)


def _degree(options: OptionIndex, choice: JointChoice, what: str) -> Iterator[Named]:
    """Yield every value of one decision that all stages can use."""
    problem, place = options.problem, _PLACE[what]
    used = {option: degrees(problem, option)[place] for option in choice.options}
    values = {degrees(problem, option)[place] for option in range(len(problem.options))}
    for value in sorted(values, key=str):
        new = {option: options.changed(option, what, value) for option in used}
        options_by_stage = tuple(new[option] for option in choice.options)
        if options_by_stage == choice.options or any(option is None for option in options_by_stage):
            continue
        was = sorted({str(old) for old in used.values()})
        words = _change(what, value, was)
        yield words, msgspec.structs.replace(choice, options=options_by_stage)


def _change(what: str, value: int | str, was: Sequence[str]) -> str:
    if what in ("recompute", "offload") and value == "none":
        return f"without {what}"
    if what == "ZeRO" and value == 0:
        return "without ZeRO"
    if what == "shard degree" and value == 0:
        return "ZeRO over all replicas"
    if len(was) == 1:
        return f"{what} {value} instead of {was[0]}"
    return f"{what} {value} on every stage"


def other_depth(
    problem: JointProblem, choice: JointChoice, by: Literal[-1, 1], weights: Sequence[float]
) -> Iterator[JointChoice]:
    """Yield choices with one stage fewer (``by`` = -1) or one stage more.

    Fewer: two adjacent stages are merged, on the devices of either or of both. More: a stage is
    split in two, each on its devices or on half of them, near the middle of its ``weights``
    (seconds by block). All other stages are unchanged. Without virtual stages only.
    """
    options, starts, options_by_stage = OptionIndex(problem), choice.starts, choice.options
    count = len(options_by_stage)
    ends = (*starts[1:], len(problem.blocks))
    if choice.virtual > 1:
        return
    if by == -1:
        for k in range(count - 1):
            cut = (*starts[: k + 1], *starts[k + 2 :])
            for option in _joined(options, options_by_stage[k], options_by_stage[k + 1]):
                new = (*options_by_stage[:k], option, *options_by_stage[k + 2 :])
                yield msgspec.structs.replace(choice, starts=cut, options=new)
        return
    for k in range(count):
        for middle in _middles(weights, starts[k], ends[k]):
            cut = (*starts[: k + 1], middle, *starts[k + 1 :])
            for option in _halved(options, options_by_stage[k]):
                new = (*options_by_stage[:k], option, option, *options_by_stage[k + 1 :])
                yield msgspec.structs.replace(choice, starts=cut, options=new)


def _joined(options: OptionIndex, one: int, two: int) -> list[int]:
    """Return options for two stages as one: either's own, and with the replicas of both."""
    data = [degrees(options.problem, option).data for option in (one, two)]
    found = [one, two, *(options.with_data(option, sum(data)) for option in (one, two))]
    return list(dict.fromkeys(option for option in found if option is not None))


def _halved(options: OptionIndex, option: int) -> list[int]:
    """Return options for half a stage: its own, half its replicas, or half its tensor degree."""
    old = degrees(options.problem, option)
    pool = options.problem.options[option].pool
    found = [option]
    if old.data % 2 == 0:
        found.append(options.with_data(option, old.data // 2))  # type: ignore[arg-type]
    if old.tensor % 2 == 0:
        found.append(options.find(pool, old._replace(tensor=old.tensor // 2)))  # type: ignore[arg-type]
    return list(dict.fromkeys(one for one in found if one is not None))


def _middles(weights: Sequence[float], first: int, end: int) -> list[int]:
    """Return up to three first blocks of the second half that split the weights most evenly."""
    whole, before, uneven = sum(weights[first:end]), 0.0, []
    for block in range(first + 1, end):
        before += weights[block - 1]
        uneven.append((abs(whole - 2 * before), block))
    return [block for _, block in sorted(uneven)[:3]]
