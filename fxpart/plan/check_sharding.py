"""Check how a plan shards the work of each stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from fxpart.errors import FxpartError, short
from fxpart.plan.check_stages import Faults
from fxpart.sharding import Mesh, parse_placements
from fxpart.sharding.mesh import parse_axes

if TYPE_CHECKING:
    from fxpart.plan.model import Plan, PlanPlacement, PlanSharding


def sharding(plan: Plan) -> Faults:
    """Check the mesh, the degrees of the stages, the ZeRO axis, and every placement."""
    given = plan.sharding
    if given is None:
        return
    try:
        mesh = Mesh.parse(given.mesh)
    except FxpartError as fault:
        yield "sharding.mesh", fault.problems[0].why
        return
    if mesh.size < 2:
        yield (
            "sharding.mesh",
            f"{short(given.mesh)!a} is one rank, so that there is nothing to shard",
        )
    expected = {"pipeline": len(plan.firsts), **dict(mesh.axes)}
    sizes = {len(stage.ranks) for stage in plan.stages}
    if len(sizes) > 1:
        expected = {"pipeline": len(plan.stages)}
    if plan.mesh != expected:
        yield "mesh", f"the mesh is {plan.mesh}, but stages and sharding.mesh yield {expected}"
    for position, stage in enumerate(plan.stages):
        if stage.zero != given.zero:
            yield (
                f"stages[{position}].zero",
                f"the level is {stage.zero}, but sharding.zero is {given.zero}",
            )
        product = stage.data_parallel * stage.tensor_parallel * stage.context_parallel
        if product == mesh.size:
            continue
        if len(sizes) == 1 or product != stage.data_parallel or mesh.names[-1:] != ("tp",):
            yield (
                f"stages[{position}]",
                f"the product of its degrees is not the mesh size, {mesh.size}",
            )
        elif stage.data_parallel != mesh.size // mesh.shape[-1]:
            yield (
                f"stages[{position}].data_parallel",
                f"the degree is not that of the mesh {short(given.mesh)!a}",
            )
    if not 0 <= given.zero <= 3:
        yield "sharding.zero", f"{given.zero} is not 0, 1, 2 or 3"
    elif given.zero and not 0 < len(parse_axes(given.zero_axis)) <= (1 if given.zero == 3 else 9):
        yield "sharding.zero_axis", f"{short(given.zero_axis)!a} is no axis, or several for ZeRO 3"
    elif given.zero and (other := {*parse_axes(given.zero_axis)} - {*mesh.names}):
        yield "sharding.zero_axis", f"the mesh has no axis {short(min(other))!a}"
    elif given.zero_axis and not given.zero:
        yield "sharding.zero_axis", "an axis is specified, but zero is 0"
    else:
        axes = parse_axes(given.zero_axis)
        yield from _shard_degrees(plan, {mesh.count(*axes), *(mesh.count(axis) for axis in axes)})
    yield from _all_placed(given, mesh, {i.name for i in plan.model.inputs})


def _shard_degrees(plan: Plan, sizes: Collection[int]) -> Faults:
    """Check that stages with hybrid sharding shard over the ZeRO axes. sizes: of these."""
    for position, stage in enumerate(plan.stages):
        if stage.shard_degree not in (0, *sizes):
            ranks = " or ".join(map(str, sorted(sizes)))
            yield (
                f"stages[{position}].shard_degree",
                f"the degree is {stage.shard_degree}, but sharding.zero_axis has {ranks} ranks",
            )


def _all_placed(given: PlanSharding, mesh: Mesh, inputs: set[str]) -> Faults:
    uses: Counter[tuple[str, str]] = Counter()
    for index, entry in enumerate(given.placed):
        where = f"sharding.placed[{index}]"
        uses.update((entry.kind, name) for name in entry.names)
        yield from ((where, why) for why in _placed(entry, mesh))
        if entry.kind == "input":
            unknown = [name for name in entry.names if name not in inputs]
            yield from ((where, f"the model has no input {short(name)!a}") for name in unknown)
    for (kind, name), count in uses.items():
        if count > 1:
            yield "sharding.placed", f"{kind} {short(name)!a} occurs {count} times"


def _placed(entry: PlanPlacement, mesh: Mesh) -> Iterator[str]:
    if not entry.names:
        yield "the list of names is empty"
    if entry.strategy and entry.kind != "op":
        yield "only ops have a strategy"
    for text in entry.placements.split(";") if entry.placements else ():
        try:
            parse_placements(text.strip(), mesh)
        except FxpartError as fault:
            yield fault.problems[0].why
    axes = [part.partition(":")[0].strip() for part in entry.strategy.split(",") if part]
    for axis in {*axes, *entry.origins} - set(mesh.names):
        yield f"the mesh has no axis {short(axis)!a}"
