"""What a rank whose microbatches come from queues holds beside what copies that take turns hold.

Bounds of the protocol (:mod:`fxpart.schedule.queues.dispatcher`), for a stage whose gradients may
miss s updates. Its copies begin a minibatch only when at most s before it are not applied, so that
s + 1 minibatches are open at once. Of each a copy keeps its own gradients, and the values and
gradients that it sent, as another copy may be lost and its heir ask for them. Where there are n
copies, each is given the gradients of the others whole and adds all up beside them: n more. Of
parameters that other stages hold too it is given those of all of their copies.
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
    """The plan, of queues, with what its ranks hold for them. See :func:`queued_row`.

    shared: by stage bytes of the parameters that other stages hold too: of the gradients that it is
    given by all of their copies, and of the sums.
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
    """A row of copies that take turns, for queues.

    copies: of the stage. weights: the name of the weight mode. taken: how many microbatches of a
    minibatch the rank is thought to do. alone: there is no other stage; else a copy takes one
    microbatch more than the schedule has in flight where the oldest of all needs it. shared: see
    :func:`with_queues_memory`.
    """
    was, memory = max(row.in_flight, 1), row.memory
    now = was if alone else was + 1
    trained = memory.gradients > 0
    open_, missed = staleness + 1, staleness if trained else 0
    saved = (memory.activations - row.workspace) // was * now
    flowing = memory.transfers // was
    kept = open_ * taken * flowing
    given, summed = shared
    # With copies all is summed beside the parts, and what is shared among it.
    others = given + (copies * memory.gradients if copies > 1 else summed)
    held = msgspec.structs.replace(
        memory,
        gradients=open_ * memory.gradients,
        activations=saved + row.workspace,
        transfers=flowing * now + kept,
        copies=sets_of_weights(weights, missed) * memory.weights,
        # Where no update is missed, all backwards are done by then.
        sums=max(memory.sums, others if missed else 0),
    )
    update = 0
    if row.update:
        between = missed * memory.gradients + held.copies + kept
        between += (saved + flowing * now) if missed else 0
        summing = memory.weights + memory.gradients + memory.optimizer + memory.buffers + others
        total = memory.gradients if copies > 1 else summed  # beside the rank's own part
        update = between + max(row.update + total, summing)
    more = held.total - memory.total
    return msgspec.structs.replace(
        row,
        memory=held,
        staleness=missed,
        update=update,
        peak=row.peak + more if row.peak else 0,
    )


def sets_of_weights(weights: str, staleness: int) -> int:
    """The most sets of weights that a copy holds beside its parameters, by weight mode.

    With n the minibatch of a forward and a the updates made, forwards in flight have a <= n and
    n <= a + s, and read a version v of n - s <= v <= a. A backward that reads the weights of its
    forward needs each v < a, of which there are s. One that reads them as they were looked ahead
    needs each pair (v, n - v): (s + 1) (s + 2) / 2, of which one is the parameters. Where only
    forwards look ahead, the s sets are dropped with the update after them.
    """
    mode = weight_mode(weights)
    if mode.backward == "forward":
        return (staleness + 1) * (staleness + 2) // 2 - 1 if mode.predicts else staleness
    return staleness if mode.predicts else 0


def find_memory_error(plan: Plan) -> FxpartError | None:
    """FXP204 with every rank that a plan of queues is too large for; None where it fits."""
    problems = list(_overfull(plan))
    return FxpartError(problems) if problems else None


def _overfull(plan: Plan) -> Iterator[Problem]:
    for row in plan.prediction.ranks:
        if row.tensors > row.memory_limit:
            held = row.memory
            where = f"stage {row.stage}, staleness={plan.staleness[row.stage]}"
            kept = (
                f"{units.size(held.gradients)} of gradients, {units.size(held.copies)} of weights "
                f"({plan.weights}) and {units.size(held.transfers)} of what was sent"
            )
            why = (
                f"it needs {units.size(row.tensors)} of {units.size(row.memory_limit)}: queues "
                f"keep {kept} until a minibatch is applied everywhere"
            )
            yield Problem("FXP204", where, why, _fix(plan, row))


def _fix(plan: Plan, row: RankPrediction) -> str:
    found = ["a smaller staleness"] if plan.staleness[row.stage] else []
    found += ["weights=naive"] if row.memory.copies else []
    found += ["constraints={'copies': 'none'}"] if plan.replicas else []
    return f"{', '.join([*found, 'more devices'])}, or mode=sync"
