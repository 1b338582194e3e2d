"""Random schedules: any stage graph, copies of stages, virtual stages, split backwards, any order.

Not a builder's orders but random ones: a linear extension of what depends on what, drawn one
computation after another, with transfers at random moments. Each draw is right; :func:`broken`
damages it. Plain :mod:`random`, because ten thousand are wanted in a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from schedule_oracle import does

from fxpart.schedule.action import FORWARD, Action, ActionKind, Schedule, StageEdge

OTHER = {
    ActionKind.SEND_F: ActionKind.RECV_F, ActionKind.RECV_F: ActionKind.SEND_F,
    ActionKind.SEND_B: ActionKind.RECV_B, ActionKind.RECV_B: ActionKind.SEND_B,
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A right schedule: computations alone, and with transfers; stash: with weight versions."""

    bare: Schedule
    lowered: Schedule
    edges: tuple[StageEdge, ...]
    stash: bool


def drawn(source: Random, most: int = 60) -> Drawn:
    """A schedule of 2 to 16 stages and 1 to 64 microbatches, about ``most`` pairs at most."""
    stages = source.choice([2, 3, 3, 4, 4, 5, 6, 8, source.randint(2, 16)])
    units = _units(source, stages)
    microbatches = source.randint(1, max(1, min(64, most // max(2, len(units)))))
    edges = _edges(source, units)
    stage_rank = _ranks(source, stages)
    name = FORWARD if source.random() < 0.1 else "drawn"
    empty = Schedule(
        name, stages, microbatches, ((),) * (max(stage_rank) + 1), stage_rank,
        tuple(_round(source, unit) for unit in units if len(unit) > 1),
    )  # fmt: skip
    order = list(_order(source, empty, edges))
    stash = source.random() < 0.1
    if stash:
        read = {(a.stage, a.microbatch): source.randint(0, 2) for a in order}
        order = [replace(a, version=read[a.stage, a.microbatch]) for a in order]
    bare = _listed(empty, [(action,) for action in order])
    return Drawn(bare, _listed(empty, _events(source, empty, edges, order)), edges, stash)


def _units(source: Random, stages: int) -> list[tuple[int, ...]]:
    """The stages in groups of copies; most stand alone, and some draws have 2 that feed 3."""
    units: list[tuple[int, ...]] = []
    first, copies = 0, source.random() < 0.4
    while first < stages:
        size = source.choice([1, 1, 2, 3]) if copies else 1
        size = min(size, stages - first)
        units.append(tuple(range(first, first + size)))
        first += size
    return units


def _round(source: Random, unit: tuple[int, ...]) -> tuple[int, ...]:
    """The order in which copies take microbatches: each once, or some more often."""
    if source.random() < 0.5:
        return unit
    turns = [*unit, *source.choices(unit, k=source.randint(1, 3))]
    source.shuffle(turns)
    return tuple(turns)


def _edges(source: Random, units: list[tuple[int, ...]]) -> tuple[StageEdge, ...]:
    """Edges between groups, in full: a chain with skips, branches, or any acyclic graph."""
    how = source.choice(["chain", "skips", "branches", "any"])
    found: list[StageEdge] = []
    for j, targets in enumerate(units):
        before = {
            "chain": [j - 1],
            "skips": [j - 1, *(source.sample(range(j), 1) if j and source.random() < 0.4 else [])],
            "branches": [source.randint(max(0, j - 3), j - 1)] if j else [],
            "any": [i for i in range(j) if source.random() < 1.5 / (j + 1)],
        }[how]
        for i in {i for i in before if i >= 0}:
            back = source.random() < 0.85
            found += [StageEdge(s, t, back) for s in units[i] for t in targets]
    return tuple(found)


def _ranks(source: Random, stages: int) -> tuple[int, ...]:
    """The rank of each stage: one each, in turn, there and back (V), or anyhow; none is empty."""
    ranks = source.randint(1, stages)
    how = source.choice(["own", "own", "turn", "v", "any"])
    if how == "own":
        placed = list(range(stages))
        source.shuffle(placed)
    elif how == "turn":
        placed = [stage % ranks for stage in range(stages)]
    elif how == "v":
        round_trip = [*range(ranks), *reversed(range(ranks))]
        placed = [round_trip[stage % len(round_trip)] for stage in range(stages)]
    else:
        placed = [*range(ranks), *(source.randrange(ranks) for _ in range(stages - ranks))]
        source.shuffle(placed)
    return tuple(placed)


def _order(source: Random, schedule: Schedule, edges: tuple[StageEdge, ...]) -> Iterator[Action]:
    """All computations, one after another, each when what it needs is done: drawn at random."""
    pairs = [
        [m for m in range(schedule.microbatches) if does(schedule, k, m)]
        for k in range(schedule.stages)
    ]
    chance = source.choice([0.0, 0.0, 0.5, 1.0])
    split = {(k, m) for k, some in enumerate(pairs) for m in some if source.random() < chance}
    left = [
        {kind: list(some) for kind in ("F", "B", "W") if kind == "F" or schedule.trains}
        for some in pairs
    ]
    into: list[list[int]] = [[e.source for e in edges if e.target == k] for k in range(len(pairs))]
    back: list[list[int]] = [
        [e.target for e in edges if e.source == k and e.backward] for k in range(len(pairs))
    ]
    # How much a forward is wanted before a backward, and that before a late sum.
    eager = {"F": source.choice([0.2, 1, 5]), "B": 1.0, "W": source.choice([0.1, 1])}
    open_ = [(k, kind) for k, some in enumerate(left) for kind, rest in some.items() if rest]
    while open_:
        k, kind = source.choices(open_, [eager[kind] for _, kind in open_])[0]
        m = left[k][kind][0]
        whole = kind == "B" and (k, m) not in split
        needs = {"F": [(i, "F") for i in into[k]], "B": [(k, "F"), *((i, "B") for i in back[k])]}
        missing = any(
            m in left[i][what] for i, what in needs.get(kind, [(k, "B")]) if does(schedule, i, m)
        )
        if missing or (whole and left[k]["W"][0] != m):
            continue
        for done in ("B", "W") if whole else (kind,):
            left[k][done].pop(0)
            if not left[k][done]:
                open_.remove((k, done))
        letter = {
            "F": ActionKind.F,
            "B": ActionKind.B if whole else ActionKind.I,
            "W": ActionKind.W,
        }[kind]
        yield Action(k, letter, m)


def _events(
    source: Random, schedule: Schedule, edges: tuple[StageEdge, ...], order: list[Action]
) -> list[tuple[Action, ...]]:
    """The order with transfers: each anywhere between what makes a value and what reads it."""
    place = {(a.stage, a.kind, a.microbatch): at for at, a in enumerate(order)}
    how = source.choice(["any", "any", "early", "late"])
    found: list[tuple[float, float, tuple[Action, ...]]] = [
        (at, 0, (a,)) for at, a in enumerate(order)
    ]
    for (stage, kind, m), made in place.items():
        if kind is ActionKind.W:
            continue
        send = ActionKind.SEND_F if kind is ActionKind.F else ActionKind.SEND_B
        if kind is ActionKind.F:
            targets = [e.target for e in edges if e.source == stage]
        else:
            targets = [e.source for e in edges if e.target == stage and e.backward]
        for k in targets:
            if not does(schedule, k, m) or schedule.stage_rank[k] == schedule.stage_rank[stage]:
                continue
            kinds = (ActionKind.F,) if kind is ActionKind.F else (ActionKind.B, ActionKind.I)
            need = next(place[k, other, m] for other in kinds if (k, other, m) in place)
            at = {"any": source.uniform(made, need), "early": made, "late": need - 1}[how]
            pair = (Action(stage, send, m, k), Action(k, OTHER[send], m, stage))
            found.append((max(made, int(at)), source.uniform(0.1, 0.9), pair))
    return [actions for *_, actions in sorted(found, key=lambda each: each[:2])]


def _listed(empty: Schedule, events: list[tuple[Action, ...]]) -> Schedule:
    """Each rank's part of a global order."""
    ranks: list[list[Action]] = [[] for _ in empty.ranks]
    for event in events:
        for action in event:
            ranks[empty.stage_rank[action.stage]].append(action)
    return replace(empty, ranks=tuple(tuple(actions) for actions in ranks))


BREAKS = (
    "drop", "double", "swap", "neighbours", "peer", "version", "rank", "copy", "transfers",
    "microbatch", "kind", "halve",
)  # fmt: skip


def broken(source: Random, schedule: Schedule, how: str) -> Schedule | None:
    """The schedule damaged in one way; it may be right all the same. None where it cannot be."""
    ranks = [list(actions) for actions in schedule.ranks]
    fits = {
        "peer": lambda a: a.peer is not None and schedule.stages > 2,
        "copy": lambda a: any(a.stage in group for group in schedule.replicas),
        "kind": lambda a: a.kind in (ActionKind.B, ActionKind.I, ActionKind.W),
        "halve": lambda a: a.kind is ActionKind.B,
        "transfers": lambda a: a.peer is not None,
    }.get(how, lambda a: True)
    spots = [(r, i) for r, actions in enumerate(ranks) for i, a in enumerate(actions) if fits(a)]
    if not spots:
        return None
    rank, at = source.choice(spots)
    actions = ranks[rank]
    action = actions[at]
    if how in ("drop", "halve", "rank", "copy"):
        del actions[at]
    if how == "double":
        actions.insert(source.randint(0, len(actions)), action)
    elif how in ("swap", "neighbours", "transfers"):
        near = [at + 1] if how == "neighbours" and at + 1 < len(actions) else range(len(actions))
        same = [i for i in near if fits(actions[i])]
        other = source.choice(same)
        actions[at], actions[other] = actions[other], action
    elif how == "rank":
        source.choice(ranks).insert(at, action)
    elif how == "copy":
        group = next(group for group in schedule.replicas if action.stage in group)
        moved = source.choice(group)
        if moved != action.peer:
            ranks[schedule.stage_rank[moved]].insert(at, replace(action, stage=moved))
    elif how == "halve":
        later = source.randint(at, len(actions))
        actions.insert(later, replace(action, kind=ActionKind.W))
        actions.insert(at, replace(action, kind=ActionKind.I))
    elif how not in ("drop",):
        actions[at] = _changed(source, schedule, action, how)
    return replace(schedule, ranks=tuple(tuple(each) for each in ranks))


def _changed(source: Random, schedule: Schedule, action: Action, how: str) -> Action:
    if how == "peer":
        others = [k for k in range(schedule.stages + 1) if k not in (action.stage, action.peer)]
        return replace(action, peer=source.choice(others))
    if how == "version":
        return replace(action, version=source.choice([None, 0, 1, 2, 3]))
    if how == "microbatch":
        return replace(action, microbatch=source.randint(0, schedule.microbatches))
    kinds = [kind for kind in (ActionKind.B, ActionKind.I, ActionKind.W) if kind is not action.kind]
    return replace(action, kind=source.choice(kinds))
