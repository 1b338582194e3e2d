"""Stage assignment for the evaluation graph, with weights on the stages that train them."""

from __future__ import annotations

from torch import fx

from fxpart.codegen.dataflow import format_node, is_op, writes
from fxpart.codegen.stage_assignment import STAGES_KEY, stages_of
from fxpart.compiler import LEVEL_KEY, Level
from fxpart.compiler.graph_edit import annotate, fork
from fxpart.errors import FxpartError, Problem


def assign_like(train: fx.GraphModule, graph: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of ``graph`` (the evaluation mode of the model) with the stages of ``train``.

    An op goes to the first stage that is not before its operands and that stores its parameters and
    the buffers that training writes. Ops that depend only on user inputs go to the stage of their
    first use. Other buffers are read where training stores them if the order of stages allows it,
    and copied from the model otherwise. Raise FXP201 with each op whose parameters are on stages
    before its operands.
    """
    holders, others = _holders(train)
    result = fork(graph)
    stages: dict[fx.Node, int] = {}
    free: set[fx.Node] = set()
    problems: list[Problem] = []
    for node in result.graph.nodes:
        if not is_op(node):
            continue
        used = [a for a in node.all_input_nodes if a in stages]
        names = [str(a.target) for a in node.all_input_nodes if a.op == "get_attr"]
        bound = [holders[name] for name in names if name in holders]
        least = max((stages[a] for a in used), default=0)
        read = [others[name] for name in names if name in others]
        if not bound:
            there = sorted(s for s in set.intersection(*read) if s >= least) if read else []
            stages[node] = there[0] if there else least
            if all(a in free for a in used) and not names:
                free.add(node)
            continue
        common = sorted(s for s in set.intersection(*bound) if s >= least)
        if common:
            stages[node] = common[0]
        else:
            stages[node] = least
            problems.append(_late(node, least, {n: holders[n] for n in names if n in holders}))
    if problems:
        raise FxpartError(problems)
    _sink(result.graph, stages, free)
    for node, stage in stages.items():
        annotate(node, stage=stage)
    result.meta[LEVEL_KEY] = Level.ASSIGNED
    result.meta[STAGES_KEY] = max(stages_of(train.graph).values(), default=0) + 1
    return result


def _holders(train: fx.GraphModule) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """Return the stages that store parameters and written buffers, and those of other buffers."""
    stages = stages_of(train.graph)
    written = writes(train.graph).touching
    parameters = {name for name, _ in train.named_parameters(remove_duplicate=False)}
    holders: dict[str, set[int]] = {}
    others: dict[str, set[int]] = {}
    for node in train.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        used = {stages[user] for user in node.users if user in stages}
        if used:
            kind = holders if name in written or name in parameters else others
            kind.setdefault(name, set()).update(used)
    return holders, others


def _sink(graph: fx.Graph, stages: dict[fx.Node, int], free: set[fx.Node]) -> None:
    """Move ops that need no values of other stages to the first stage that uses them."""
    for node in reversed(graph.nodes):
        if node in free:
            users = [stages[user] for user in node.users if user in stages]
            stages[node] = min(users, default=stages[node])


def _late(node: fx.Node, least: int, holders: dict[str, set[int]]) -> Problem:
    held = "; ".join(f"{n} on {', '.join(map(str, sorted(s)))}" for n, s in holders.items())
    return Problem(
        "FXP201",
        format_node(node),
        f"in evaluation it needs values of stage {least}, but its state is on stages: {held}",
        "put these layers on one stage, or evaluate in the order of training",
    )
