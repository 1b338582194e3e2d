"""Random schedules run over a real transport: dummy stages whose every value is known beforehand.

A stage checks each value and gradient that it gets against a number worked out from stage, peer and
microbatch. Schedules without copies of stages are run by the runtime's own executor, with autograd;
those with copies by a small driver over the same routes and inboxes.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from built_schedules import BUILDERS
from torch import nn
from torch.nn import functional as F

from fxpart.program.edges import find_stage_edges as edges_of
from fxpart.program.spec import InputSpec, ProgramSpec, StageSpec, StateSpec, ValueSpec
from fxpart.runtime import InProcess, ProcessGroupTransport
from fxpart.runtime.executor.instruction import StepInput
from fxpart.runtime.executor.rank_program import RankProgram
from fxpart.runtime.executor.routes import MessageRoutes
from fxpart.runtime.executor.step_executor import StepExecutor
from fxpart.runtime.transport.interface import Transport
from fxpart.schedule.action import Action, ActionKind, Schedule, StageEdge
from fxpart.schedule.builders import assign_v_ranks
from fxpart.schedule.dependence import Dependence
from fxpart.schedule.make import make

WORLD = 4
_CPU = torch.device("cpu")
_WINDOW = 4


@dataclass(frozen=True)
class Case:
    """A lowered schedule, the program whose transfers it makes, and what is checked per rank."""

    schedule: Schedule
    spec: ProgramSpec
    elements: int


def number(kind: str, source: int, target: int, microbatch: int) -> float:
    """What a transfer carries, in every element."""
    return float((source * 31 + target * 17 + microbatch * 7 + (kind == "B") * 3) % 97 + 1)


# -- cases -------------------------------------------------------------------------------------


def case(seed: int, elements: int) -> Case:
    """The schedule of that number; large tensors on fewer stages and microbatches."""
    draw = random.Random(seed)
    large = elements > 1 << 16
    ranks = draw.randint(2, WORLD)
    stages = draw.randint(ranks, 5 if large else 10)
    microbatches = draw.randint(1, 4 if large else 10)
    names = sorted(n for n, built in BUILDERS.items() if n != "forward" and built.flushes)
    name = draw.choice([*names, "random", "random"])
    if name == "zb-v":
        stages, ranks = 2 * ranks, ranks
    wish = [*range(ranks), *(draw.randrange(ranks) for _ in range(stages - ranks))]
    draw.shuffle(wish)
    seats = tuple(wish)
    if name == "zb-v":
        seats = assign_v_ranks(stages)
    elif name == "interleaved" or draw.random() < 0.5:
        seats = tuple(stage % ranks for stage in range(stages))
    graph = _graph(draw, stages)
    replicas: tuple[tuple[int, ...], ...] = ()
    if name in ("gpipe", "1f1b") and stages >= 4 and draw.random() < 0.4:
        graph, replicas = _copies(draw, stages)
        seats = tuple(draw.sample(range(stages), stages)) if stages <= WORLD else seats
    spec = program(stages, graph, elements)
    found = edges_of(spec)
    if name == "random":
        built = _any_order(draw, stages, microbatches, seats, found)
        made = make(built, seats, microbatches, found, world=WORLD)
    else:
        made = make(name, seats, microbatches, found, replicas=replicas, world=WORLD)
    return Case(made, spec, elements)


def _graph(draw: random.Random, stages: int) -> tuple[StageEdge, ...]:
    """Mostly a chain with skips; gradients come back only from stages that the loss depends on."""
    chain = draw.random() < 0.8
    found, trained = [], {stages - 1}
    for source in reversed(range(stages - 1)):
        for target in range(source + 1, stages):
            if (chain and target == source + 1) or draw.random() < 0.25:
                back = target in trained and draw.random() < 0.85
                found.append(StageEdge(source, target, back))
                if back:
                    trained.add(source)
    return tuple(found)


def _copies(
    draw: random.Random, stages: int
) -> tuple[tuple[StageEdge, ...], tuple[tuple[int, ...], ...]]:
    """A chain of groups of copies: 2 ranks feeding 3."""
    groups: list[tuple[int, ...]] = []
    at = 0
    while at < stages:
        size = min(draw.randint(1, 3), stages - at)
        groups.append(tuple(range(at, at + size)))
        at += size
    edges = [
        StageEdge(s, t, True) for before, after in pairwise(groups) for s in before for t in after
    ]
    return tuple(edges), tuple(group for group in groups if len(group) > 1)


def _any_order(
    draw: random.Random,
    stages: int,
    microbatches: int,
    seats: Sequence[int],
    edges: Sequence[StageEdge],
) -> Schedule:
    """Any computation that is ready, on any rank, in order of microbatches; backwards split or not.

    Whatever comes out can be run.
    """
    ranks: list[list[Action]] = [[] for _ in range(max(seats) + 1)]
    done: set[tuple[str, int, int]] = set()
    split = {stage for stage in range(stages) if draw.random() < 0.4}
    into = {s: [e.source for e in edges if e.target == s] for s in range(stages)}
    out = {s: [e.target for e in edges if e.source == s and e.backward] for s in range(stages)}
    following = {(kind, stage): 0 for kind in "FBW" for stage in range(stages)}

    def ready(kind: str, stage: int) -> bool:
        m = following[kind, stage]
        if m >= microbatches or (kind == "W" and stage not in split):
            return False
        needs = {
            "F": [("F", s, m) for s in into[stage]],
            "B": [("F", stage, m), *(("B", t, m) for t in out[stage])],
            "W": [("B", stage, m)],
        }[kind]
        return all(need in done for need in needs)

    while choices := [at for at in following if ready(*at)]:
        kind, stage = draw.choice(choices)
        m = following[kind, stage]
        following[kind, stage] += 1
        done.add((kind, stage, m))
        word = {
            "F": ActionKind.F,
            "B": ActionKind.I if stage in split else ActionKind.B,
            "W": ActionKind.W,
        }[kind]
        ranks[seats[stage]].append(Action(stage, word, m))
    lists = tuple(tuple(actions) for actions in ranks)
    return Schedule("found", stages, microbatches, lists, tuple(seats))


def program(stages: int, graph: Sequence[StageEdge], elements: int) -> ProgramSpec:
    """A value for each edge, a weight for each stage, the loss at the end."""
    x = ValueSpec(name="x", dtype="float32", shape=(1,))

    def value(edge: StageEdge) -> ValueSpec:
        return ValueSpec(
            name=f"v{edge.source}_{edge.target}", dtype="float32", shape=(elements,),
            requires_grad=edge.backward,
        )  # fmt: skip

    made = []
    for stage in range(stages):
        into = sorted((e for e in graph if e.target == stage), key=lambda e: e.source)
        out = sorted((e for e in graph if e.source == stage), key=lambda e: e.target)
        outputs, targets = [value(e) for e in out], [(e.target,) for e in out]
        if stage == stages - 1:
            outputs.append(ValueSpec(name="loss", dtype="float32", shape=(), requires_grad=True))
            targets.append(())
        weight = StateSpec(
            attribute="w", name=f"w{stage}", kind="parameter", dtype="float32", shape=(2, 2),
            requires_grad=True, owner=stage,
        )  # fmt: skip
        made.append(
            StageSpec(
                index=stage, inputs=(x, *(value(e) for e in into)),
                sources=(-1, *(e.source for e in into)), outputs=tuple(outputs),
                targets=tuple(targets), state=(weight,),
            )
        )  # fmt: skip
    inputs = (InputSpec(name="x", path=("x",), dtype="float32", shape=(1,)),)
    return ProgramSpec(
        inputs=inputs, constants=(), symbols={}, stages=tuple(made), loss="loss", outputs=(),
        ties={},
    )  # fmt: skip


# -- stages ------------------------------------------------------------------------------------


class Dummy(nn.Module):
    """A stage that checks what comes and makes what goes. checked: transfers by direction."""

    def __init__(self, spec: StageSpec, elements: int, checked: Counter[str]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, 2))
        self.spec, self.elements, self.checked = spec, elements, checked

    def forward(self, key: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for source, given in zip(self.spec.sources, inputs, strict=True):
            if source >= 0:
                self.check("F", source, key, given)
        anchor = F.linear(torch.ones(1, 2), self.w).sum()
        found: tuple[torch.Tensor, ...] = _Known.apply(self, key, anchor, *inputs)
        return found

    def check(self, kind: str, source: int, microbatch: int, given: torch.Tensor) -> None:
        expected = number(kind, source, self.spec.index, microbatch)
        right = given.shape == (self.elements,) and bool((given == expected).all())
        assert right, f"{kind} {source}>{self.spec.index} of microbatch {microbatch}: {given[:3]}"
        self.checked[kind] += 1

    def made(self, kind: str, target: int, microbatch: int) -> torch.Tensor:
        return torch.full((self.elements,), number(kind, self.spec.index, target, microbatch))


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stage: Dummy, key: int, *inputs: torch.Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.stage, ctx.key = stage, key
        found = [stage.made("F", targets[0], key) for targets in stage.spec.targets if targets]
        return (*found, torch.ones(())) if () in stage.spec.targets else tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        stage: Dummy = ctx.stage
        for value, targets, given in zip(
            stage.spec.outputs, stage.spec.targets, gradients, strict=True
        ):
            if targets and value.requires_grad:
                assert given is not None, f"no gradient of {value.name}"
                stage.check("B", targets[0], ctx.key, given)
        back = [
            stage.made("B", source, ctx.key) if value.requires_grad else None
            for value, source in zip(stage.spec.inputs, stage.spec.sources, strict=True)
        ]
        return (None, None, torch.ones(()), *back)


# -- runs --------------------------------------------------------------------------------------


def executed(given: Case, transport: Transport, checked: Counter[str]) -> list[StepExecutor]:
    """The executors of this process's ranks, through one step."""
    spec, schedule = given.spec, given.schedule
    executors, modules = [], {}
    for rank in transport.local:
        mine = {
            stage: Dummy(spec.stages[stage], given.elements, checked)
            for stage, at in enumerate(schedule.stage_rank)
            if at == rank
        }
        if mine:
            executors.append(
                StepExecutor(RankProgram(spec, mine, schedule, rank, transport, _CPU), train=True)
            )
        modules |= mine
    count = schedule.microbatches
    feed = StepInput(
        [{"x": torch.zeros(1)}] * count, [{}] * count, [1.0 / count] * count, list(range(count))
    )
    _turns([each.run(feed, lambda: None) for each in executors])
    for each in executors:
        if each.failure is not None:
            raise AssertionError(f"{each.failure.action}") from each.failure.cause
    # A loss of m microbatches reaches the weight of each stage that it depends on m times.
    for stage, module in modules.items():
        trains = any(v.requires_grad for v in spec.stages[stage].outputs)
        grad = module.w.grad
        assert trains == (grad is not None)
        assert grad is None or bool((grad == count).all()), f"stage {stage}: {grad}"
    return executors


def _turns(runs: list[Iterator[None]]) -> None:
    while runs:
        runs = [run for run in runs if next(run, "over") != "over"]


def driven(given: Case, rank: int, transport: Transport, checked: Counter[str]) -> list[Any]:
    """One rank of any schedule, copies of stages too: messages alone; the handles of sends."""
    schedule, spec = given.schedule, given.spec
    routes = MessageRoutes(RankProgram(spec, {}, schedule, rank, transport, _CPU))
    dependence = Dependence.of(schedule, edges_of(spec))
    stages = [Dummy(stage, given.elements, checked) for stage in spec.stages]
    sending: deque[Any] = deque()
    for inbox in routes.inboxes:
        inbox.begin([{}] * schedule.microbatches)
    for action in schedule.ranks[rank]:
        stage, m = stages[action.stage], action.microbatch
        if action.kind in (ActionKind.SEND_F, ActionKind.SEND_B):
            assert action.peer is not None
            forward = action.kind is ActionKind.SEND_F
            for _ in routes.carried(action):
                if len(sending) >= _WINDOW:
                    transport.wait(sending.popleft())
                tensor = stage.made("F" if forward else "B", action.peer, m)
                target = schedule.stage_rank[action.peer]
                sending.append(transport.send(rank, target, 1 if forward else 2, tensor))
        elif action.kind in (ActionKind.RECV_F, ActionKind.RECV_B):
            (routes.posting(action) or (lambda: None))()
        elif action.kind is not ActionKind.W:
            forward = action.kind is ActionKind.F
            kind, sent = ("F", ActionKind.SEND_F) if forward else ("B", ActionKind.SEND_B)
            peers = dependence.producers if forward else dependence.gradient_consumers
            for peer in peers[action.stage]:
                for inbox, place, _ in routes.arrivals(sent, action.stage, m, [peer]):
                    (tensor,) = inbox.take(place)
                    stage.check(kind, peer, m, tensor)
    return list(sending)


def run(seeds: Sequence[int], elements: int, shared_memory: bool = False) -> dict[str, int]:
    """On every rank: each case over the process group; what was checked here, and how many ran."""
    transport = ProcessGroupTransport(
        timeout=30.0, one_machine=shared_memory, shared_memory=shared_memory
    )
    checked: Counter[str] = Counter()
    try:
        for seed in seeds:
            given = case(seed, elements)
            if given.schedule.replicas:
                for handle in driven(given, transport.local[0], transport, checked):
                    transport.wait(handle)
                checked["driven"] += 1
            else:
                for executor in executed(given, transport, checked):
                    executor.finish()
                checked["executed"] += 1
            checked["transfers"] += sum(
                a.kind in (ActionKind.RECV_F, ActionKind.RECV_B)
                for a in given.schedule.ranks[transport.local[0]]
            )
            transport.exchange([seed])
    finally:
        transport.close()
    return dict(checked)


def here(seed: int, elements: int) -> Counter[str]:
    """The same case in this process, by the executor; nothing if it has copies of stages."""
    given, checked = case(seed, elements), Counter[str]()
    if not given.schedule.replicas:
        executed(given, InProcess(WORLD), checked)
    return checked
