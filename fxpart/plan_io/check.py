"""Find every fault of a plan, not the first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from fxpart.errors import Problem
from fxpart.plan import Certificate, Plan, RankPrediction
from fxpart.plan_io.check_sharding import Faults, sharding

MAX_PROBLEMS = 200
_LARGEST = 1 << 63
_FIX = "make the plan again with `fxpart plan`, or correct this place"


def problems(plan: Plan) -> tuple[Problem, ...]:
    """Every FXP303 of the plan, at most MAX_PROBLEMS."""
    found: list[Problem] = []
    for check in _CHECKS:
        for where, why in check(plan):
            found.append(Problem("FXP303", where, why, _FIX))
            if len(found) >= MAX_PROBLEMS:
                return tuple(found)
    certificates = {"certificate": plan.certificate}
    if plan.sharding is not None and plan.sharding.certificate is not None:
        certificates["sharding.certificate"] = plan.sharding.certificate
    for where, given in certificates.items():
        found += [Problem("FXP303", w, y, _FIX) for w, y in _certificate(given, where)]
    return tuple(found)


def _numbers(plan: Plan) -> Faults:
    """No number that arithmetic cannot be trusted with; none below zero except the seed."""
    signed = {"seed", "constraints"}
    for name, value in msgspec.to_builtins(plan).items():
        if name == "cluster":
            continue  # it has its own checks
        for path, number in _leaves(value, name):
            if isinstance(number, float) and not math.isfinite(number):
                yield path, f"{number} is not a finite number"
            elif abs(number) >= _LARGEST and isinstance(number, int):
                yield path, "the number is too large"
            elif number < 0 and name not in signed:
                yield path, f"{number} is negative"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, int | float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{ascii(key)[1:-1]}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value


def _cluster(plan: Plan) -> Faults:
    faults = plan.cluster.problems()
    for problem in faults:
        yield f"cluster, {problem.where}", problem.why
    if not faults and plan.cluster_hash != plan.cluster.hash:
        yield "cluster_hash", "it is not the hash of the cluster that the plan holds"


def _model(plan: Plan) -> Faults:
    model = plan.model
    if model.blocks < 1:
        yield "model.blocks", "there are no blocks"
    if model.nodes < model.blocks:
        yield "model.nodes", f"{model.nodes} nodes cannot form {model.blocks} blocks"
    for name, count in Counter(i.name for i in model.inputs).items():
        if count > 1:
            yield "model.inputs", f"the name {name!a} stands there {count} times"
    for index, item in enumerate(model.inputs):
        if item.batch_dim is not None and item.batch_dim >= len(item.shape):
            yield f"model.inputs[{index}].batch_dim", f"the shape has {len(item.shape)} dims"


def _stages(plan: Plan) -> Faults:
    if not plan.stages:
        yield "stages", "there are none"
        return
    expected = 0
    for position, stage in enumerate(plan.stages):
        where = f"stages[{position}]"
        if stage.index != position:
            yield f"{where}.index", f"it is {stage.index}; stages stand in order from 0"
        if stage.first > expected:
            yield where, f"blocks {expected} to {stage.first - 1} are on no stage before it"
        elif stage.first < expected:
            yield where, f"block {stage.first} is on the stage before it as well"
        if stage.last < stage.first:
            yield where, f"it ends at block {stage.last}, before its first block {stage.first}"
        expected = stage.last + 1
        degree = stage.data_parallel * stage.tensor_parallel
        if min(stage.data_parallel, stage.tensor_parallel) < 1:
            yield where, "a degree of parallelism is below 1"
        elif len(stage.ranks) != degree:
            yield f"{where}.ranks", f"{len(stage.ranks)} ranks, but {degree} replicas and shards"
        for rank in stage.ranks:
            if not 0 <= rank < len(plan.cluster.devices):
                yield f"{where}.ranks", f"the cluster has no device for rank {rank}"
    if expected != plan.model.blocks:
        yield (
            "stages",
            f"they end at block {expected - 1}; the model's last is {plan.model.blocks - 1}",
        )
    for rank, count in Counter(r for s in plan.stages for r in s.ranks).items():
        if count > 1:
            yield "stages", f"rank {rank} stands there {count} times"


def _mesh(plan: Plan) -> Faults:
    size = math.prod(plan.mesh.values())
    ranks = sum(len(s.ranks) for s in plan.stages)
    if any(extent < 1 for extent in plan.mesh.values()):
        yield "mesh", "an axis has no ranks"
    elif size != ranks:
        yield "mesh", f"it has {size} ranks, the stages have {ranks}"


def _edges(plan: Plan) -> Faults:
    count = len(plan.stages)
    seen = set()
    for index, (source, target, _) in enumerate(plan.edges):
        if not 0 <= source < target < count:
            yield f"edges[{index}]", f"{source} to {target}: no later stage of the {count} stages"
        if (source, target) in seen:
            yield f"edges[{index}]", f"{source} to {target} stands there twice"
        seen.add((source, target))


def _ties(plan: Plan) -> Faults:
    for index, tie in enumerate(plan.ties):
        where = f"ties[{index}]"
        if not tie.names:
            yield where, "it names no parameter"
        if tie.owner not in tie.stages:
            yield where, f"the owner, stage {tie.owner}, does not hold it"
        if any(not 0 <= stage < len(plan.stages) for stage in tie.stages):
            yield where, "it names a stage that the plan does not have"
        if len(set(tie.stages)) != len(tie.stages):
            yield where, "a stage stands there twice"
    for name, uses in Counter(n for tie in plan.ties for n in tie.names).items():
        if uses > 1:
            yield "ties", f"the name {name!a} stands there {uses} times"


def _counts(plan: Plan) -> Faults:
    if plan.batch_size < 1:
        yield "batch_size", "it is below 1"
    if not 1 <= plan.microbatches <= max(plan.batch_size, 1):
        yield "microbatches", f"{plan.microbatches} cannot be cut from {plan.batch_size} samples"
    for index, other in enumerate(plan.alternatives):
        if min(other.stages, other.microbatches) < 1:
            yield f"alternatives[{index}]", "stages and microbatches start at 1"


def _prediction(plan: Plan) -> Faults:
    stage_of = {rank: s.index for s in plan.stages for rank in s.ranks}
    if plan.prediction.bubble > 1:
        yield "prediction.bubble", f"{plan.prediction.bubble} is a share above 1"
    for rank, count in Counter(r.rank for r in plan.prediction.ranks).items():
        if count > 1:
            yield "prediction.ranks", f"rank {rank} stands there {count} times"
    for rank in sorted(set(stage_of) - {r.rank for r in plan.prediction.ranks})[:MAX_PROBLEMS]:
        yield "prediction.ranks", f"rank {rank} is missing"
    for index, entry in enumerate(plan.prediction.ranks):
        yield from _rank(plan, entry, stage_of.get(entry.rank), f"prediction.ranks[{index}]")


def _rank(plan: Plan, entry: RankPrediction, stage: int | None, where: str) -> Faults:
    if stage is None:
        yield where, f"no stage runs on rank {entry.rank}"
        return
    if entry.stage != stage:
        yield f"{where}.stage", f"rank {entry.rank} runs stage {stage}, not {entry.stage}"
    if not 1 <= entry.in_flight <= plan.microbatches:
        yield f"{where}.in_flight", f"{entry.in_flight} of {plan.microbatches} microbatches"
    if entry.memory.total > entry.memory_limit:
        yield (
            f"{where}.memory",
            f"{entry.memory.total} bytes, above the {entry.memory_limit} allowed",
        )
    if entry.rank >= len(plan.cluster.devices):
        return  # said already, for the stage
    device = plan.cluster.devices[entry.rank]
    if entry.device != device.name:
        yield f"{where}.device", f"rank {entry.rank} is {device.name!a} in the cluster"
    if entry.memory_limit > device.memory:
        yield f"{where}.memory_limit", f"the device has {device.memory} bytes"


def _certificate(given: Certificate, where: str) -> Faults:
    objective, bound = given.objective, given.lower_bound
    if not all(math.isfinite(x) for x in (objective, bound, given.gap)):
        return  # said already
    if bound > objective * (1 + 1e-9):
        yield f"{where}.lower_bound", f"{bound} is above the objective {objective}"
    gap = (objective - bound) / objective if objective > 0 else 0.0
    if abs(given.gap - max(gap, 0.0)) > 1e-6:
        yield f"{where}.gap", f"it is {given.gap}, the objective and bound give {gap:.6g}"
    if given.status == "optimal" and gap > 1e-6:
        yield f"{where}.status", f"it says optimal with a gap of {gap:.6g}"


_CHECKS = (
    _numbers, _cluster, _model, _stages, _mesh, _edges, _ties, _counts, _prediction, sharding,
)  # fmt: skip
