"""Steps of plans in time: one simulation, whether asked in planning or from the plan's file."""

from __future__ import annotations

import json
import random
from pathlib import Path

import crowd_oracle
import msgspec
import pytest
import sample_plans
from branch_models import MODELS
from fxpart.costmodels.profile_store import ContentionProfile
from msgspec import UNSET

import fxpart
from fxpart.cli import run
from fxpart.cluster.devices import CpuLoadImbalance, Device, Host, Link
from fxpart.cluster.model import Cluster
from fxpart.plan.contention import (
    complete_host_loads,
    compute_pace,
    find_host_loads,
    has_contention,
    pace,
)
from fxpart.plan.model import HostLoad, Plan
from fxpart.plan.prediction import RankPrediction, idle_share
from fxpart.planner.prediction import step_simulation
from fxpart.planner.prediction.plan_timeline import plan_steps, plan_timeline
from fxpart.planner.prediction.step_simulation import (
    compute_exposed_reduction,
    simulate_plan_steps,
    simulate_step,
)
from fxpart.schedule.action import ActionKind, StageEdge
from fxpart.schedule.make import make


def row(stage: int, rng: random.Random, lanes: int = 1) -> RankPrediction:
    """A stage's prediction."""
    some = [rng.choice((0.0, 1.0, rng.uniform(0.1, 2))) for _ in range(7)]
    entry = sample_plans.plan(1, 1).prediction.ranks[0]
    return msgspec.structs.replace(
        entry, stage=stage, ranks=tuple(range(stage * lanes, (stage + 1) * lanes)),
        forward_seconds=0.1 + some[0], backward_seconds=0.1 + some[1], transfer_seconds=some[2],
        sync_seconds=some[3], tie_seconds=some[4], optimizer_seconds=some[5],
        overhead_seconds=some[6], gather_seconds=rng.choice((0.0, 0.2)),
    )  # fmt: skip


def instance(seed: int) -> tuple[str, int, tuple[StageEdge, ...], list[RankPrediction]]:
    """A random stage graph and what is predicted of its stages."""
    rng = random.Random(seed)
    count = rng.randint(1, 5)
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    chosen = [p for p in pairs if rng.random() < (0.9 if p[1] == p[0] + 1 else 0.3)]
    edges = tuple(StageEdge(a, b, rng.random() < 0.8) for a, b in chosen)
    rows = [row(k, rng) for k in range(count)]
    return rng.choice(("gpipe", "1f1b")), rng.randint(1, 8), edges, rows


@pytest.mark.parametrize("seed", range(60))
def test_the_quick_way_finds_the_same(seed: int) -> None:
    name, m, edges, rows = instance(seed)
    found = simulate_step(name, m, edges, rows, (), 1e9)
    slow = simulate_plan_steps(make(name, range(len(rows)), m, edges), edges, rows).timeline
    assert found.seconds == pytest.approx(slow.step_seconds, rel=1e-12)
    assert (found.method, found.hosts) == ("simulation", ())
    assert found.bubble == idle_share(rows, m, found.seconds)
    gathers = sum(r.gather_seconds for r in rows)
    assert gathers or slow.bubble == pytest.approx(found.bubble, abs=1e-9)


def _talk(row: RankPrediction) -> float:
    """Seconds of a forward, and of a backward, in which a rank talks to the others of its stage."""
    return (row.collective_seconds + row.gather_seconds) / 2


def _apart(seconds: float, talk: float, full: float) -> float:
    """Alone: what is computed was given for a full host, talk takes what it takes."""
    talk = min(talk, seconds)
    return (seconds - talk) / full + talk


def _parts(seconds: float, talk: float, full: float) -> tuple[float, float]:
    """The part of the seconds alone that is talk, and what others see of the rest, in 64ths."""
    talk = min(talk, seconds)
    if not talk:
        return 0.0, 1.0
    return talk / _apart(seconds, talk, full), round(64 * (1 - talk / seconds)) / 64


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_on_shared_cores_as_a_machine_that_runs_the_lists(seed: int) -> None:
    """Passes as the oracle finds them; then all that is done once a step, all ranks at once."""
    name, m, edges, rows = instance(seed)
    rng = random.Random(-seed)
    ranks = tuple(range(len(rows)))
    curve = tuple(sorted(rng.choice((1.0, 1.2, 1.7, 2.5)) for _ in ranks))
    load = HostLoad(ranks=ranks, slowdown=curve, transfer=rng.choice((0.0, 0.5)))
    found = simulate_step(name, m, edges, rows, [load], 1e9)
    full = curve[-1]
    moved = step_simulation.StageTimes.of(rows, edges).transfer
    both = {**moved, **{(b, a): seconds for (a, b), seconds in moved.items()}}
    passes = [
        [r.forward_seconds + r.gather_seconds / 2 for r in rows],
        [r.backward_seconds + r.gather_seconds / 2 for r in rows],
    ]
    case = crowd_oracle.Case(
        make(name, range(len(rows)), m, edges), edges,
        *([_apart(s, _talk(r), full) for s, r in zip(mine, rows, strict=True)] for mine in passes),
        both, [0] * len(rows), [curve], [load.transfer], shared=True,
        talk=[[_parts(s, _talk(r), full) for s, r in zip(mine, rows, strict=True)]
              for mine in passes],
    )  # fmt: skip
    spans = crowd_oracle.Machine(case).run()
    last = max(
        end for action, (_, end) in spans.items() if action.kind in (ActionKind.F, ActionKind.B)
    )
    ties = [r.tie_seconds for r in rows]
    if not has_contention(load):  # else senders copy
        ties = compute_exposed_reduction(ties, passes[1], edges, m)
    sums = [r.sync_seconds + tie for r, tie in zip(rows, ties, strict=True)]
    after = [r.step_only_seconds - r.tie_seconds + t for r, t in zip(rows, ties, strict=True)]
    left = [_apart(a, s, full) for a, s in zip(after, sums, strict=True)]
    parts = [_parts(a, s, full) for a, s in zip(after, sums, strict=True)]
    assert max(end for _, end in spans.values()) == last, "nothing is sent behind the last"
    once = 0.0
    while any(left):
        seen = sum(part[1] for x, part in zip(left, parts, strict=True) if x)
        paces = [
            talk + (1 - talk) * crowd_oracle.curve_at(curve, seen + 1 - mine)
            for talk, mine in parts
        ]
        wait = min(x * pace for x, pace in zip(left, paces, strict=True) if x)
        once += wait
        left = [x - wait / pace for x, pace in zip(left, paces, strict=True)]
        left = [0.0 if x < 1e-12 else x for x in left]
    assert found.seconds == pytest.approx(last + once, rel=1e-9)
    assert found.hosts == ((load,) if has_contention(load) else ())


def test_a_crowded_step_of_many_actions_is_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken as if all ranks were busy all the time, which is no less."""
    rng = random.Random(5)
    rows = [row(k, rng) for k in range(3)]
    edges = (StageEdge(0, 1), StageEdge(1, 2))
    load = HostLoad(ranks=(0, 1, 2), slowdown=(1.0, 1.5, 2.0))
    exact = simulate_step("1f1b", 6, edges, rows, [load], 1e9)
    actions = 2 * 6 * (3 + 4)
    monkeypatch.setattr(step_simulation, "MAX_CONTENDED_ACTIONS", actions - 1)
    rough = simulate_step("1f1b", 6, edges, rows, [load], 1e9)
    assert rough.hosts == () and rough.method == "simulation"
    assert rough == simulate_step("1f1b", 6, edges, rows, (), 1e9)
    assert rough.seconds > exact.seconds and exact.hosts == (load,)
    monkeypatch.setattr(step_simulation, "MAX_ACTIONS", actions - 1)
    for name in ("1f1b", "zb-h1"):
        closed = simulate_step(name, 6, edges, rows, [load], 1e9)
        assert (closed.seconds, closed.method, closed.hosts) == (1e9, "closed form", ())


def cluster(
    count: int, cores: int = 0, slowdown: tuple[float, ...] = (), hosts: int = 1
) -> Cluster:
    """CPU ranks on hosts by turns."""
    devices = tuple(
        Device(
            name=f"{i}", kind="cpu", model="cpu", host=f"h{i % hosts}", memory=8 << 30,
            flops={"float32": 5e10}, bandwidth=1e10, threads=1,
        )
        for i in range(count)
    )  # fmt: skip
    known = tuple(Host(name=f"h{i}", cores=cores, slowdown=slowdown) for i in range(hosts))
    link = Link(source="*", target="*", latency=1e-5, bandwidth=4e9, kind="shm")
    return Cluster(name="c", devices=devices, links=(link,), hosts=known)


def test_what_seconds_are_worth_while_fewer_compute() -> None:
    """By the curve over its value for all; 1 where there is no one curve."""
    load = HostLoad(ranks=(0, 1, 2), slowdown=(1.0, 1.0, 1.5, 2.0), full=4)
    assert [compute_pace([load], busy) for busy in (0.2, 1, 2.5, 3, 4)] == pytest.approx(
        [0.5, 0.5, 0.625, 0.75, 1.0]
    )
    assert compute_pace([], 2) == compute_pace([load, load], 2) == 1.0
    assert compute_pace([msgspec.structs.replace(load, full=0)], 2) == 1.0


def test_hosts_of_a_plan() -> None:
    """What a cluster says: a measured curve, or cores and threads; nothing where nobody waits."""
    assert find_host_loads(cluster(2, cores=2), [0, 1]) == ()
    assert find_host_loads(cluster(4), range(4)) == ()
    assert find_host_loads(msgspec.structs.replace(cluster(4), hosts=UNSET), range(4)) == ()
    curve = (1.0, 1.0, 1.5, 2.0)
    assert find_host_loads(cluster(4, cores=2), range(4)) == (
        HostLoad(ranks=(0, 1, 2, 3), slowdown=curve, full=4),
    )
    # Two of four: their seconds are still those of four, so that alone they take half.
    assert find_host_loads(cluster(4, cores=2), [1, 3]) == (
        HostLoad(ranks=(0, 1), slowdown=curve, full=4),
    )
    assert find_host_loads(cluster(4, slowdown=(1.0, 1.25), hosts=2), [0, 1, 2]) == (
        HostLoad(ranks=(0, 2), slowdown=(1.0, 1.25), full=2),
        HostLoad(ranks=(1,), slowdown=(1.0, 1.25), full=2),
    )
    measured = ContentionProfile(slowdown=(1.0, 1.125), transfer=0.5)
    assert find_host_loads(cluster(2, cores=1), [0, 1], lambda _: measured) == (
        HostLoad(ranks=(0, 1), slowdown=(1.0, 1.125), transfer=0.5, full=2),
    )
    assert find_host_loads(cluster(2, cores=1), [0, 1], lambda _: ContentionProfile()) == ()


def held(*quotas: float) -> Cluster:
    """Devices of one host of two cores under quotas."""
    given = cluster(len(quotas), cores=2)
    devices = (
        msgspec.structs.replace(d, quota=quota)
        for d, quota in zip(given.devices, quotas, strict=True)
    )
    return msgspec.structs.replace(given, devices=tuple(devices))


def test_ranks_under_quotas_see_each_other_as_often_as_they_compute() -> None:
    """And none of them waits for a core: past the cores that quotas want, nothing grows."""
    curve = ContentionProfile(slowdown=(1.0, 1.25, 2.0, 3.0), transfer=0.5, wake=(0.0, 0.001))
    one_core = held(0.5, 0.5)
    assert find_host_loads(one_core, [0, 1]) == ()
    assert find_host_loads(one_core, [0, 1], lambda _: curve) == (), "they want one core together"
    (load,) = find_host_loads(held(0.75, 0.5, 0.25), [0, 2], lambda _: curve)
    flat = (1.0, 1.25, 1.25, 1.25)
    assert load == HostLoad(ranks=(0, 1), slowdown=flat, full=1.5, shares=(0.75, 0.25))
    # Rank 0 is slowed down a quarter of the time by rank 1, and by the third a half if it computes.
    assert pace([load], 0) == pytest.approx((1 + 0.25 * 0.25) / (1 + 0.75 * 0.25))
    assert pace([load], 1) == pytest.approx((1 + 0.75 * 0.25) / 1.25)
    assert compute_pace([load], 1) == pytest.approx(
        1 / 1.25
    )  # of a mean share of 0.5 beside one more


def test_a_plan_that_leaves_devices_under_quotas_idle_is_as_fast_as_without_them() -> None:
    """One rank of two: the other one does not compute, whatever its seconds are for."""
    cluster_of_two, curve = held(0.75, 0.5), ContentionProfile(slowdown=(1.0, 1.5))
    (load,) = find_host_loads(cluster_of_two, [0], lambda _: curve)
    given = row(0, random.Random(0))
    seconds = simulate_step("1f1b", 3, [], [given], [load], 1e9).seconds
    alone = simulate_step("1f1b", 3, [], [given], (), 1e9).seconds
    talk = 3 * 2 * _talk(given) + given.sync_seconds + given.tie_seconds
    assert seconds == pytest.approx((alone - talk) / 1.25 + talk)


def test_hosts_that_do_not_say_what_seconds_are_for() -> None:
    """All of the cluster's devices there."""
    load = HostLoad(ranks=(0, 1), slowdown=(1.0, 1.5))
    (found,) = complete_host_loads([load], cluster(4), [0, 2])
    assert found == HostLoad(ranks=(0, 1), slowdown=(1.0, 1.5), full=4)
    assert (
        complete_host_loads(
            [HostLoad(ranks=(0, 1), slowdown=(1.0, 1.0), full=2)], cluster(2), [0, 1]
        )
        == ()
    )


def compiled(where: Cluster, name: str = "1f1b") -> Plan:
    """A small model with two towers on that cluster."""
    model, batch = next(iter(MODELS.values()))()
    return fxpart.compile(
        model, where, example_kwargs=batch, microbatches=4,
        constraints={"stages": 3, "mesh": "none", "schedule": name},
    ).plan  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_a_plan_is_simulated_as_it_was_when_it_was_made(name: str, tmp_path: Path) -> None:
    crowded, free = compiled(cluster(4, cores=2), name), compiled(cluster(4, cores=4), name)
    for plan in (crowded, free):
        given = plan.prediction
        timeline = plan_timeline(plan)
        assert timeline.step_seconds == pytest.approx(given.simulated_seconds, rel=1e-12)
        assert timeline.bubble == pytest.approx(given.bubble, abs=1e-9)
    assert free.prediction.hosts == () and len(crowded.prediction.hosts) == 1
    assert crowded.prediction.hosts[0].full == 4
    # Of three ranks on two cores, priced as four: never slower than all of them at once.
    assert crowded.prediction.simulated_seconds < free.prediction.simulated_seconds
    path = tmp_path / "plan.json"
    crowded.dump(path)
    assert Plan.load(path) == crowded


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the verb prints."""
    assert run(["simulate", *arguments]) == 0
    return capsys.readouterr().out


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = sample_plans.plan(4, 6)
    load = HostLoad(ranks=(0, 1, 2, 3), slowdown=(1.0, 1.0, 1.5, 2.0), transfer=0.25)
    plan = msgspec.structs.replace(
        base, prediction=msgspec.structs.replace(base.prediction, hosts=(load,))
    )
    path, trace = str(tmp_path / "plan.json"), tmp_path / "trace.json"
    plan.dump(path)
    found = json.loads(shown(capsys, path, "--json", "--trace", str(trace)))
    assert found["simulated_seconds"] == plan_timeline(plan).step_seconds == found["ends"][0]
    updates = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "update"]
    assert len(updates) == len(found["updates"]) == 4
    alone = json.loads(shown(capsys, path, "--no-contention", "--json"))
    assert alone["simulated_seconds"] == plan_steps(plan, contention=False).timeline.step_seconds
    assert alone["simulated_seconds"] < found["simulated_seconds"]
    several = json.loads(shown(capsys, path, "--steps", "3", "--json"))
    assert several["ends"] == pytest.approx([k * found["simulated_seconds"] for k in (1, 2, 3)])
    running = json.loads(shown(capsys, path, "--steps", "3", "--no-flush", "--json"))
    assert running["ends"][-1] < several["ends"][-1]
    assert "with CPU contention on 1 host" in shown(capsys, path)
    assert "for 5 steps" in shown(capsys, path, "--steps", "5", "--no-contention")
    assert run(["simulate", path, "--schedule", "gpipe", "--no-flush"]) == 2
    assert "FXP109" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": (0, 9)}, "no stage runs on rank 9"),
        ({"ranks": ()}, "the list is empty"),
        ({"slowdown": ()}, "the list is empty"),
        ({"slowdown": (1.0, 0.0)}, "0.0 is not between 0"),
        ({"slowdown": (1.0, 1e300)}, "is not between 0"),
        ({"slowdown": (1.0, float("nan"))}, "finite"),
        ({"transfer": 1e300}, "too many"),
        ({"full": 1}, "below the number of ranks"),
        ({"full": -1}, "negative"),
        ({"full": 1e300}, "too many"),
        ({"shares": (0.5,)}, "there are 1 shares for 2 ranks"),
        ({"shares": (0.5, 1.5)}, "1.5 is not a fraction"),
        ({"shares": (0.5, 0.0)}, "0.0 is not a fraction"),
        ({"shares": (0.75, 0.5), "full": 1.0}, "below the number of ranks, 1.25"),
        ({"uneven": CpuLoadImbalance(cores=1, seconds=0.01, fallen=0.5)}, "not 1"),
        ({"uneven": CpuLoadImbalance(cores=2, seconds=-0.01, fallen=0.5)}, "negative"),
        (
            {"uneven": CpuLoadImbalance(cores=2, seconds=1e9, fallen=0.5)},
            "not a valid waiting time",
        ),
        (
            {"uneven": CpuLoadImbalance(cores=2, seconds=0.01, fallen=1.5)},
            "1.5 is not a fraction",
        ),
        (
            {"uneven": CpuLoadImbalance(cores=2, seconds=0.01, fallen=0.5, risen=2.0)},
            "2.0 is not a fraction",
        ),
    ],
)
def test_hosts_in_plans_are_checked(changes: dict[str, object], words: str) -> None:
    base = sample_plans.plan(4)
    uneven = CpuLoadImbalance(cores=2, seconds=0.01, fallen=0.5, risen=0.125)
    good = HostLoad(ranks=(0, 1), slowdown=(1.0, 1.5), transfer=0.5, full=4, uneven=uneven)
    other = msgspec.structs.replace(good, ranks=(2, 3))

    def of(*hosts: HostLoad) -> Plan:
        given = msgspec.structs.replace(base.prediction, hosts=hosts)
        return msgspec.structs.replace(base, prediction=given)

    assert of(good, other).problems() == ()
    assert Plan.loads(of(good, other).dumps()) == of(good, other)
    assert '"ranks": "2-3"' in of(good, other).dumps()
    found = of(msgspec.structs.replace(good, **changes), other).problems()
    assert any(words in p.why for p in found), found
    assert any("2 times" in p.why for p in of(good, good).problems())
