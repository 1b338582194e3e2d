"""Memory of a rank with queues, beyond that of round-robin replicas.

Bounds of the protocol (:mod:`fxpart.schedule.queues.dispatcher`), for a stage whose gradients may
miss s updates. Its replicas begin a minibatch only when at most s earlier ones are not applied, so
that s + 1 minibatches are open at once. For each open minibatch a replica stores its own gradients,
and the values and gradients that it sent, because another replica may fail and its successor
request them. With n replicas, each receives the gradients of the others whole and adds all up: n
more sets. For tied parameters it receives the gradients of all their replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from fxpart import units
from fxpart.errors import FxpartError, Problem
from fxpart.plan.model import Plan
from fxpart.plan.prediction import RankPrediction
from fxpart.schedule.action import list_group_stages
from fxpart.schedule.weight_modes import weight_mode


def with_queues_memory(plan: Plan, shared: Mapping[int, tuple[int, int]] | None = None) -> Plan:
    """Return the plan with the memory that its ranks need for queues. See :func:`queued_row`.

    shared: by stage the bytes of gradients of tied parameters that it receives from all of their
    replicas, and of their sums.
    """
    each = {
        copy: len(list_group_stages(group))
        for group in plan.replicas
        for copy in list_group_stages(group)
    }
    alone = len(plan.firsts) == 1
    rows = tuple(
        queued_row(
            row, plan.staleness[row.stage], each.get(row.stage, 1), plan.weights,
            taken=row.taken(plan.microbatches), alone=alone,
            shared=(shared or {}).get(row.stage, (0, 0)),
        )
        for row in plan.prediction.ranks
    )  # fmt: skip
    return msgspec.structs.replace(
        plan, prediction=msgspec.structs.replace(plan.prediction, ranks=rows)
    )


def queued_row(
    row: RankPrediction,
    staleness: int,
    copies: int,
    weights: str,
    *,
    taken: int,
    alone: bool,
    shared: tuple[int, int] = (0, 0),
) -> RankPrediction:
    """Return the prediction of a round-robin replica with queues.

    copies: number of replicas of the stage. weights: name of the weight mode. taken: expected
    number of microbatches of a minibatch on this rank. alone: there is no other stage; otherwise a
    replica accepts one microbatch beyond the schedule's, if it is the oldest of all. shared: see
    :func:`with_queues_memory`.
    """
    was, memory = max(row.in_flight, 1), row.memory
    now = was if alone else was + 1
    trained = memory.gradients > 0
    open_minibatches, missed = staleness + 1, staleness if trained else 0
    saved = (memory.activations - row.workspace) // was * now
    flowing = memory.transfers // was
    kept = open_minibatches * taken * flowing
    given, summed = shared
    # With replicas, all gradients are summed into a further buffer, including tied ones.
    others = given + (copies * memory.gradients if copies > 1 else summed)
    needed = msgspec.structs.replace(
        memory,
        gradients=open_minibatches * memory.gradients,
        activations=saved + row.workspace,
        transfers=flowing * now + kept,
        copies=sets_of_weights(weights, missed) * memory.weights,
        # Without staleness, all backward passes are done by then.
        sums=max(memory.sums, others if missed else 0),
    )
    update = 0
    if row.update:
        between = missed * memory.gradients + needed.copies + kept
        between += (saved + flowing * now) if missed else 0
        summing = memory.weights + memory.gradients + memory.optimizer + memory.buffers + others
        total = memory.gradients if copies > 1 else summed  # besides the rank's own part
        update = between + max(row.update + total, summing)
    more = needed.total - memory.total
    return msgspec.structs.replace(
        row,
        memory=needed,
        staleness=missed,
        update=update,
        peak=row.peak + more if row.peak else 0,
    )


def sets_of_weights(weights: str, staleness: int) -> int:
    """Return the most sets of weights that a replica stores besides its parameters.

    With n the minibatch of a forward pass and a the number of applied updates, forwards in flight
    satisfy a <= n and n <= a + s, and read a version v with n - s <= v <= a. A backward that reads
    the weights of its forward needs each v < a, of which there are s. One that reads them as they
    were predicted needs each pair (v, n - v): (s + 1) (s + 2) / 2, of which one is the parameters.
    Where only forwards use predicted weights, the s sets are dropped with the next update.
    """
    mode = weight_mode(weights)
    if mode.backward == "forward":
        return (staleness + 1) * (staleness + 2) // 2 - 1 if mode.predicts else staleness
    return staleness if mode.predicts else 0


def find_memory_error(plan: Plan) -> FxpartError | None:
    """Return FXP204 with every rank that lacks memory for queues; None where the plan fits."""
    problems = list(_overfull(plan))
    return FxpartError(problems) if problems else None


def _overfull(plan: Plan) -> Iterator[Problem]:
    for row in plan.prediction.ranks:
        if row.tensors > row.memory_limit:
            needed = row.memory
            where = f"stage {row.stage}, staleness={plan.staleness[row.stage]}"
            kept = (
                f"{units.size(needed.gradients)} of gradients, {units.size(needed.copies)} of "
                f"weights ({plan.weights}) and {units.size(needed.transfers)} of sent values"
            )
            why = (
                f"the stage needs {units.size(row.tensors)} of {units.size(row.memory_limit)}: "
                f"queues store {kept} until a minibatch is applied on all stages"
            )
            yield Problem("FXP204", where, why, _fix(plan, row))


def _fix(plan: Plan, row: RankPrediction) -> str:
    found = ["a smaller staleness"] if plan.staleness[row.stage] else []
    found += ["weights=naive"] if row.memory.copies else []
    found += ["constraints={'copies': 'none'}"] if plan.replicas else []
    return f"use {', '.join([*found, 'more devices'])}, or mode=sync"
