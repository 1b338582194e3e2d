"""The simulator against closed forms and bounds, an independent one, and its trace format."""

from __future__ import annotations

import json

import pytest
from built_schedules import BUILDERS
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import Case, cases

from fxpart.errors import FxpartError
from fxpart.schedule.action import Action, ActionKind, Schedule, StageEdge, parse
from fxpart.schedule.builders import forward_only, gpipe, one_f_one_b
from fxpart.schedule.dependence import Dependence, chain
from fxpart.schedule.lower import lower
from fxpart.schedule.simulate import simulate

seconds = st.integers(0, 20).map(float)


def free(_stage: int, _peer: int, _kind: ActionKind) -> float:
    return 0.0


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "m"), [(1, 1), (1, 6), (2, 2), (3, 8), (4, 3), (6, 12)])
def test_balanced_stages(name: str, stages: int, m: int) -> None:
    """(m + S - 1)(f + b), and the bubble that follows: (S - 1)/(m + S - 1)."""
    f, b = 3.0, 5.0
    schedule = lower(BUILDERS[name](stages, m), chain(stages))
    for sends in ("overlapped", "buffered", "rendezvous"):
        found = simulate(schedule, chain(stages), [f] * stages, [b] * stages, sends=sends)
        assert found.step_seconds == (m + stages - 1) * (f + b)
        assert found.bubble == pytest.approx((stages - 1) / (m + stages - 1))
        assert found.busy == (m * (f + b),) * stages
    alone = simulate(forward_only(stages, m), chain(stages), [f] * stages, [b] * stages)
    assert alone.step_seconds == (m + stages - 1) * f


costs = st.integers(1, 7).flatmap(
    lambda n: st.tuples(
        st.lists(seconds, min_size=n, max_size=n),
        st.lists(seconds, min_size=n, max_size=n),
        st.integers(1, 12),
    )
)


@given(costs)
@settings(max_examples=300, deadline=None)
@pytest.mark.slow
def test_bounds_for_unequal_stages(given_costs: tuple[list[float], list[float], int]) -> None:
    """Solver notes, D: a bottleneck stage's work, and what must come before it, is a lower bound.

    GPipe takes exactly sum t + (m-1)(max f + max b), and 1F1B never more than that.
    """
    f, b, m = given_costs
    stages = len(f)
    t = [x + y for x, y in zip(f, b, strict=True)]
    lower_bound = max(sum(t[:s]) + m * t[s] for s in range(stages))
    upper_bound = sum(t) + (m - 1) * (max(f) + max(b))
    assert simulate(gpipe(stages, m), chain(stages), f, b).step_seconds == upper_bound
    found = simulate(one_f_one_b(stages, m), chain(stages), f, b).step_seconds
    assert lower_bound <= found <= upper_bound


@given(costs, st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]))
@settings(max_examples=300, deadline=None)
@pytest.mark.slow
def test_closed_form_where_backward_is_in_proportion(
    given_costs: tuple[list[float], list[float], int], ratio: float
) -> None:
    """sum t + (m-1) max t is exact for GPipe and an upper bound for 1F1B if b = ratio f."""
    f, _, m = given_costs
    stages = len(f)
    b = [ratio * x for x in f]
    t = [x + y for x, y in zip(f, b, strict=True)]
    closed = sum(t) + (m - 1) * max(t)
    assert simulate(gpipe(stages, m), chain(stages), f, b).step_seconds == closed
    assert simulate(one_f_one_b(stages, m), chain(stages), f, b).step_seconds <= closed


def test_closed_form_is_no_bound_otherwise() -> None:
    """Where forward and backward peak on different stages both schedules take longer."""
    f, b, m = [0.0, 10.0, 1.0, 1.0], [10.0, 0.0, 0.0, 1.0], 3
    closed = sum(f) + sum(b) + (m - 1) * 10
    assert closed == 43
    assert simulate(one_f_one_b(4, m), chain(4), f, b).step_seconds == 60
    assert simulate(gpipe(4, m), chain(4), f, b).step_seconds == 63


def by_small_steps(schedule: Schedule, edges: tuple[StageEdge, ...], f: list[int], b: list[int],
                   tau: int) -> int:  # fmt: skip
    """An oracle that walks the clock: ranks and links do what they can at each whole second.

    Sends overlap, one transfer at a time on each directed pair of ranks, in the order of the list.
    """
    dependence = Dependence.of(schedule, edges)
    at = [0] * len(schedule.ranks)
    until: dict[int, int] = {}
    queue: dict[tuple[int, int], list[Action]] = {}
    link_until: dict[tuple[int, int], int] = {}
    done: set[Action] = set()
    running: list[tuple[int, Action]] = []
    clock = 0
    total = sum(len(actions) for actions in schedule.ranks)
    finished = 0
    while True:
        moved = True
        while moved:
            moved = False
            for item in [r for r in running if r[0] <= clock]:
                running.remove(item)
                done.add(item[1])
                finished += 1
                moved = True
            for rank, actions in enumerate(schedule.ranks):
                while at[rank] < len(actions) and until.get(rank, 0) <= clock:
                    action = actions[at[rank]]
                    if action.kind in (ActionKind.RECV_F, ActionKind.RECV_B):
                        finished += 1
                    elif not action.kind.is_compute:
                        # Counted when it arrives.
                        assert action.peer is not None
                        link = (rank, schedule.stage_rank[action.peer])
                        queue.setdefault(link, []).append(action)
                    elif all(need in done for need in dependence.requires(action)):
                        cost = f[action.stage] if action.kind is ActionKind.F else b[action.stage]
                        cost //= 2 if action.kind in (ActionKind.I, ActionKind.W) else 1
                        until[rank] = clock + cost
                        running.append((clock + cost, action))
                    else:
                        break
                    at[rank] += 1
                    moved = True
            for link, waiting in queue.items():
                if waiting and link_until.get(link, 0) <= clock:
                    send = waiting[0]
                    kinds = (
                        [ActionKind.F]
                        if send.kind is ActionKind.SEND_F
                        else [ActionKind.B, ActionKind.I]
                    )
                    if not any(Action(send.stage, k, send.microbatch) in done for k in kinds):
                        continue
                    waiting.pop(0)
                    link_until[link] = clock + tau
                    receive = (
                        ActionKind.RECV_F if send.kind is ActionKind.SEND_F else ActionKind.RECV_B
                    )
                    assert send.peer is not None
                    twin = Action(send.peer, receive, send.microbatch, send.stage)
                    running.append((clock + tau, twin))
                    moved = True
        if finished == total:
            return clock
        clock += 1


@given(cases(max_stages=4, max_microbatches=4), st.data())
@settings(max_examples=120, deadline=None)
@pytest.mark.slow
def test_against_a_clock(case: Case, data: st.DataObject) -> None:
    stages = case.schedule.stages
    one = st.lists(st.integers(1, 4), min_size=stages, max_size=stages)
    f, b, tau = data.draw(one), data.draw(one), data.draw(st.integers(0, 3))
    b = [2 * x for x in b]  # a split one has two halves
    schedule = lower(case.schedule, case.edges)
    found = simulate(
        schedule, case.edges, [float(x) for x in f], [float(x) for x in b], lambda *_: float(tau)
    )
    assert found.step_seconds == by_small_steps(schedule, case.edges, f, b, tau)


@given(cases(), st.data())
@settings(max_examples=150, deadline=None)
@pytest.mark.slow
def test_order_of_the_models(case: Case, data: st.DataObject) -> None:
    """Less freedom is never faster, and more time for anything never makes the step shorter."""
    stages = case.schedule.stages
    some = st.lists(seconds, min_size=stages, max_size=stages)
    f, b, tau = data.draw(some), data.draw(some), data.draw(seconds)
    schedule = lower(case.schedule, case.edges)

    def step(extra: float, sends: str) -> float:
        timeline = simulate(
            schedule, case.edges, [x + extra for x in f], b, lambda *_: tau + extra, sends=sends
        )
        assert 0 <= timeline.bubble <= 1
        return timeline.step_seconds

    overlapped, buffered, blocking = (
        step(0, sends) for sends in ("overlapped", "buffered", "rendezvous")
    )
    assert overlapped <= buffered <= blocking
    assert overlapped <= step(1, "overlapped")
    assert buffered <= step(1, "buffered")
    assert blocking <= step(1, "rendezvous")
    ideal = simulate(case.schedule, case.edges, f, b, lambda *_: tau).step_seconds
    assert ideal <= overlapped
    assert ideal == simulate(schedule, case.edges, f, b, lambda *_: tau).step_seconds or tau > 0


def test_transfers_overlap_computation_or_do_not() -> None:
    """Two stages, two microbatches, a second each, a second on the link."""
    schedule = lower(forward_only(2, 2), chain(2))

    def step(sends: str) -> float:
        return simulate(
            schedule, chain(2), [1.0, 1.0], [0.0, 0.0], lambda *_: 1.0, sends=sends
        ).step_seconds

    # F0 0-1, link 1-2 while F1 1-2, link 2-3 while the peer's F0 2-3, F1 3-4.
    assert step("overlapped") == 4
    # Here the first rank is held by its first transfer, and its F1 ends at 3.
    assert step("rendezvous") == 5


def test_a_link_carries_one_transfer_at_a_time() -> None:
    """A skip over the same pair of ranks queues behind the neighbour's values."""
    edges = (StageEdge(0, 1), StageEdge(0, 2))
    schedule = Schedule("forward", 3, 1, ((parse("0F0"),), (parse("1F0"), parse("2F0"))), (0, 1, 1))
    lowered = lower(schedule, edges)
    f = [1.0, 1.0, 1.0]
    together = simulate(lowered, edges, f, f, lambda *_: 5.0)
    assert together.step_seconds == 12  # 1, then 5 and 5 on the link, then 2F0
    spans = [(s.track, str(s.action), s.start, s.end) for s in together.spans if s.rank == 0]
    assert spans == [
        ("compute", "0F0", 0, 1),
        ("send", "0SEND_F0", 1, 6),
        ("send", "0SEND_F0>2", 6, 11),
    ]


def test_transfer_costs_are_asked_by_stage_and_direction() -> None:
    edges = (StageEdge(0, 1), StageEdge(1, 2), StageEdge(0, 2, backward=False))
    asked: set[tuple[int, int, ActionKind]] = set()

    def transfer(stage: int, peer: int, kind: ActionKind) -> float:
        asked.add((stage, peer, kind))
        return 1.0

    simulate(lower(gpipe(3, 2), edges), edges, [1.0] * 3, [1.0] * 3, transfer)
    assert asked == {
        (0, 1, ActionKind.SEND_F), (1, 2, ActionKind.SEND_F), (0, 2, ActionKind.SEND_F),
        (1, 0, ActionKind.SEND_B), (2, 1, ActionKind.SEND_B),
    }  # fmt: skip


def test_half_backwards() -> None:
    """W off the critical path makes the step shorter: it needs I alone, and nobody needs it."""
    ranks = (
        "0F0 0F1 0B0 0B1",
        "1F0 1I0 1F1 1I1 1W0 1W1",
    )
    lists = tuple(tuple(parse(word) for word in line.split()) for line in ranks)
    schedule = Schedule("zero-bubble", 2, 2, lists, (0, 1))
    split = simulate(lower(schedule, chain(2)), chain(2), [1.0, 1.0], [2.0, 2.0])
    whole = simulate(lower(one_f_one_b(2, 2), chain(2)), chain(2), [1.0, 1.0], [2.0, 2.0])
    assert (whole.step_seconds, split.step_seconds) == (9, 7)
    assert split.in_flight == (2, 2)
    measured = simulate(
        lower(schedule, chain(2)), chain(2), [1.0] * 2, [2.0] * 2, split=[(1.0, 1.0), (0.5, 3.0)]
    )
    assert [s.end - s.start for s in measured.compute(1)] == [1, 0.5, 1, 0.5, 3, 3]
    assert measured.step_seconds == 1 + 9  # stage 1 has its input at 1, and never waits again
    for bad in ([(1.0, 1.0)], [(1.0, 1.0), (1.0, -1.0)]):
        with pytest.raises(FxpartError, match="FXP109"):
            simulate(schedule, chain(2), [1.0] * 2, [2.0] * 2, split=bad)


def test_wrong_costs() -> None:
    for bad in ([1.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]):
        with pytest.raises(FxpartError, match="FXP109"):
            simulate(gpipe(2, 1), chain(2), bad, [1.0, 1.0])


def test_a_schedule_that_cannot_run() -> None:
    broken = Schedule("gpipe", 1, 1, ((parse("0B0"), parse("0F0")),), (0,))
    for attempt in (lambda: simulate(broken, (), [1.0], [1.0]), lambda: lower(broken, ())):
        with pytest.raises(FxpartError, match="FXP901"):
            attempt()


def test_trace_and_json() -> None:
    schedule = lower(one_f_one_b(3, 4), chain(3))
    timeline = simulate(schedule, chain(3), [1.0] * 3, [2.0] * 3, lambda *_: 0.5)
    data = json.loads(json.dumps(timeline.as_dict()))
    assert data["step_seconds"] == timeline.step_seconds
    assert len(data["spans"]) == sum(len(actions) for actions in schedule.ranks)
    assert data["spans"][0] == {
        "rank": 0, "lane": "compute", "action": "0F0", "stage": 0, "kind": "F",
        "microbatch": 0, "start": 0.0, "end": 1.0,
    }  # fmt: skip
    trace = json.loads(json.dumps(timeline.chrome_trace()))
    events = trace["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "s", "f"}
    whole = [e for e in events if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in whole) == pytest.approx(timeline.step_seconds * 1e6)
    # Every arrow that leaves arrives, once, and not before it left.
    leaving = {(e["cat"], e["id"]): e["ts"] for e in events if e["ph"] == "s"}
    arriving = {(e["cat"], e["id"]): e["ts"] for e in events if e["ph"] == "f"}
    assert leaving.keys() == arriving.keys()
    assert len(leaving) == len([e for e in whole if e["cat"] == "send"])
    assert all(arriving[key] == leaving[key] + 0.5e6 for key in leaving)


def test_free_transfers_are_not_drawn() -> None:
    schedule = lower(gpipe(2, 2), chain(2))
    bare = simulate(schedule, chain(2), [1.0] * 2, [1.0] * 2)
    assert {span.track for span in bare.spans} == {"compute"}
    shown = simulate(schedule, chain(2), [1.0] * 2, [1.0] * 2, free)
    assert {span.track for span in shown.spans} == {"compute", "send", "receive"}
