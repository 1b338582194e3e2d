"""Laws of planning, each checked on one random case: a law returns the violations that it finds."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from itertools import product
from unittest import mock

import msgspec
from fxpart.costmodels import Roofline
from msgspec.structs import replace
from planning_cases import Constraints, PlanningCase, captured, mean_loss, with_devices
from planning_outcomes import EXACT, NothingToCheckError, Outcome, attempt, different, slower
from planning_report_laws import printed_numbers, what_if

import fxpart
from fxpart import Device, FxpartError, Link, Plan
from fxpart.costs import Cost, OpSpec
from fxpart.pricing import split_costs


def more_bandwidth(case: PlanningCase, base: Outcome, rng: random.Random) -> Iterator[str]:
    """More bandwidth of one link or of all is never slower."""
    links = list(case.cluster.links)
    factor = rng.choice((1.3, 2.0, 10.0))
    chosen = range(len(links)) if rng.random() < 0.5 else [rng.randrange(len(links))]
    for place in chosen:
        links[place] = replace(links[place], bandwidth=links[place].bandwidth * factor)
    made = replace(case.cluster, links=tuple(links))
    yield from slower(f"bandwidth x{factor} of {len(chosen)}", attempt(case, made), base)


def more_memory(case: PlanningCase, base: Outcome, rng: random.Random) -> Iterator[str]:
    """More memory of one device or of all is never slower."""
    devices = list(case.cluster.devices)
    factor = rng.choice((1.1, 1.5, 4.0))
    chosen = range(len(devices)) if rng.random() < 0.7 else [rng.randrange(len(devices))]
    for place in chosen:
        devices[place] = replace(devices[place], memory=int(devices[place].memory * factor))
    made = with_devices(case.cluster, tuple(devices))
    yield from slower(f"memory x{factor} of {list(chosen)}", attempt(case, made), base)


def more_devices(case: PlanningCase, base: Outcome, rng: random.Random) -> Iterator[str]:
    """A device more, like one that there is, is never slower."""
    place = rng.randrange(len(case.cluster.devices))
    like = case.cluster.devices[place]
    new = replace(like, name="new")
    links = list(case.cluster.links)
    for link in case.cluster.links:
        if like.name == link.source:
            links.append(replace(link, source="new"))
        if like.name == link.target:
            links.append(replace(link, target="new"))
    peer = next((link for link in links if link.source == like.name), None)
    if peer is not None:
        links += [replace(peer, source=like.name, target="new"),
                  replace(peer, source="new", target=like.name)]  # fmt: skip
    made = replace(case.cluster, devices=(*case.cluster.devices, new), links=tuple(links))
    yield from slower(f"one more like {like.name}", attempt(case, made), base)


def faster_device(case: PlanningCase, base: Outcome, rng: random.Random) -> Iterator[str]:
    """A faster device, or all faster, is never slower."""
    devices = list(case.cluster.devices)
    factor = rng.choice((1.2, 2.0, 8.0))
    chosen = range(len(devices)) if rng.random() < 0.3 else [rng.randrange(len(devices))]
    for place in chosen:
        one = devices[place]
        devices[place] = replace(
            one, flops={k: v * factor for k, v in one.flops.items()},
            bandwidth=one.bandwidth * factor,
            model=one.model + " faster" if rng.random() < 0.5 else one.model,
        )  # fmt: skip
    made = with_devices(case.cluster, tuple(devices))
    yield from slower(f"rate x{factor} of {list(chosen)}", attempt(case, made), base)


def permuted_devices(case: PlanningCase, base: Outcome, rng: random.Random) -> Iterator[str]:
    """The order in which a cluster lists its devices changes nothing."""
    devices = list(case.cluster.devices)
    rng.shuffle(devices)
    if devices == list(case.cluster.devices):
        raise NothingToCheckError
    made = with_devices(case.cluster, tuple(devices))
    order = [d.name for d in devices]
    yield from different(f"order {order}", base, attempt(case, made))


def renamed_hosts(case: PlanningCase, base: Outcome, rng: random.Random) -> Iterator[str]:
    """New names of hosts and devices change nothing."""
    hosts = sorted({d.host for d in case.cluster.devices})
    names = [f"machine{i}" for i in range(len(hosts))]
    rng.shuffle(names)
    new = dict(zip(hosts, names, strict=True)) | {"*": "*"}
    new |= {d.name: f"z{rng.randrange(10**9)}" for d in case.cluster.devices}
    devices = tuple(replace(d, name=new[d.name], host=new[d.host]) for d in case.cluster.devices)
    links = tuple(
        replace(link, source=new[link.source], target=new[link.target])
        for link in case.cluster.links
    )
    made = replace(case.cluster, devices=devices, links=links)
    yield from different(f"renamed {new}", base, attempt(case, made))


def equal_links(case: PlanningCase, base: Outcome, rng: random.Random) -> Iterator[str]:
    """Where all links are equal, it does not matter which devices share a host."""
    link = case.cluster.links[0]
    links = (replace(link, source="*", target="*", shared=msgspec.UNSET),)
    one = replace(case.cluster, links=links)
    many = with_devices(one, tuple(replace(d, host=f"h{rng.randrange(3)}") for d in one.devices))
    yield from different("other hosts", attempt(case, one), attempt(case, many))


class ScaledRoofline(Roofline):
    """The roofline model of devices and links ``factor`` times as fast, in as much more time."""

    name = "scaled-roofline"

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def op(self, op: OpSpec, device: Device, backward: bool) -> Cost:
        return self._longer(super().op(op, scale_device(device, 1 / self.factor), backward))

    def reshard(self, source: str, target: str, size: float, links: tuple[Link, ...]) -> Cost:
        ring = tuple(scale_link(link, 1 / self.factor) for link in links)
        return self._longer(super().reshard(source, target, size, ring))

    def transfer(self, size: float, link: Link) -> Cost:
        return self._longer(super().transfer(size, scale_link(link, 1 / self.factor)))

    def _longer(self, cost: Cost) -> Cost:
        return dataclasses.replace(cost, seconds=cost.seconds * self.factor)


def scale_device(device: Device, factor: float) -> Device:
    """Return the device on which everything takes ``factor`` times as long."""
    return replace(
        device,
        flops={name: rate / factor for name, rate in device.flops.items()},
        bandwidth=device.bandwidth / factor,
        launch=device.launch * factor,
    )


def scale_link(link: Link, factor: float) -> Link:
    """Return the link over which everything takes ``factor`` times as long."""
    return replace(link, latency=link.latency * factor, bandwidth=link.bandwidth / factor)


def scaled_costs(case: PlanningCase, base: Outcome, rng: random.Random) -> Iterator[str]:
    """If everything takes longer by a factor, so does the step."""
    factor = rng.choice((4.0, 0.25, 1024.0))
    made = replace(
        case.cluster,
        devices=tuple(scale_device(device, factor) for device in case.cluster.devices),
        links=tuple(scale_link(link, factor) for link in case.cluster.links),
    )
    with mock.patch.object(split_costs, "SECONDS", split_costs.SECONDS * factor):
        other = attempt(case, made, cost_model=ScaledRoofline(factor))
    yield from different(f"times x{factor}", base, other, factor)


def reported_decisions(plan: Plan) -> Constraints:
    """Return constraints that fix what a plan reports."""
    stage = plan.stages[0]
    tensor = [one.tensor_parallel for one in plan.stages]
    given: Constraints = {
        "dp": stage.data_parallel,
        "tp": "|".join(map(str, tensor)) if len({*tensor}) > 1 else tensor[0],
        "zero": stage.zero,
        "stages": len(plan.firsts),
        "microbatches": plan.microbatches,
    }
    if plan.schedule != "async":
        given["schedule"] = plan.schedule
    return given


def fixed_decisions(case: PlanningCase, base: Outcome, rng: random.Random) -> Iterator[str]:
    """Fixing what a plan reports keeps its step time; each decision alone too."""
    if base.plan is None or base.plan.replicas or "copies" in case.constraints:
        raise NothingToCheckError
    given = reported_decisions(base.plan)
    if "mesh" in case.constraints:
        given = {k: v for k, v in given.items() if k not in ("dp", "tp")}
    if "mode" in case.constraints:
        given = {k: v for k, v in given.items() if k not in ("dp", "tp", "zero", "schedule")}
    given = {k: v for k, v in given.items() if k not in case.constraints}
    if rng.random() < 0.5 and given:
        key = rng.choice(sorted(given))
        given = {key: given[key]}
    if not given:
        raise NothingToCheckError
    yield from different(f"fixed {given}", base, attempt(case, **given))


def forbidden_decision(case: PlanningCase, base: Outcome, rng: random.Random) -> Iterator[str]:
    """Forbidding a decision of the plan changes it, and is never faster."""
    if base.plan is None or base.plan.replicas or set(case.constraints) & {"forbid", "copies"}:
        raise NothingToCheckError
    given = reported_decisions(base.plan)
    if case.constraints.get("mode") == "queue":
        given = {k: v for k, v in given.items() if k in ("microbatches", "stages")}
    if 1 < len(base.plan.firsts) < len(case.cluster.devices):
        given.pop("stages")  # a gap in the numbers of stages is rejected
    if isinstance(given["tp"], str):
        given.pop("tp")  # degrees by stage can only be fixed
    key = rng.choice(sorted(given))
    name = "pp" if key == "stages" else key
    other = attempt(case, forbid=f"{name}={given[key]}")
    yield from slower(f"free beside forbid {name}={given[key]}", base, other)
    if other.plan is not None and not other.plan.replicas and key in ("dp", "tp", "zero"):
        found = reported_decisions(other.plan)[key]
        if found == given[key]:
            yield f"forbid {name}={given[key]} was ignored: {other}"


def larger_space(case: PlanningCase, base: Outcome, rng: random.Random) -> Iterator[str]:
    """A constraint more is never faster."""
    count = len(case.cluster.devices)
    options: list[Constraints] = [
        {"mesh": "none"},
        {"mesh": f"tp={rng.randint(1, count)}"},
        {"mesh": f"dp={rng.randint(1, count)}"},
        {"stages": rng.randint(1, count)},
        {"stages": 1},
        {"zero": rng.randint(0, 3)},
        {"tp": rng.randint(1, count)},
        {"tp": rng.choice(("1|2", "2|1", "1|2|1"))},
        {"offload": "none"},
        {"dp": rng.randint(1, count)},
        {"microbatches": rng.choice((1, 2, 4))},
        {"copies": "none"},
        {"schedule": rng.choice(("1f1b", "zb-h1"))},
        {"forbid": rng.choice(("zero", "tp", "dp", "pp=1"))},
    ]
    given = rng.choice(options)
    if set(given) & set(case.constraints) or case.constraints.get("mode") == "queue":
        raise NothingToCheckError
    if case.constraints.get("copies") == "always" and set(given) - {"microbatches", "stages"}:
        raise NothingToCheckError
    if "mesh" in case.constraints and set(given) & {"tp", "dp", "zero", "copies"}:
        raise NothingToCheckError
    if "mode" in case.constraints and set(given) & {"zero", "schedule"}:
        raise NothingToCheckError
    if "schedule" in case.constraints or ("mesh" in given and "zero" in case.constraints):
        raise NothingToCheckError
    try:
        other = attempt(case, **given)
    except FxpartError as fault:
        if {problem.code for problem in fault.problems} <= {"FXP105", "FXP109"}:
            raise NothingToCheckError from fault  # axes that the model does not have
        raise
    yield from slower(f"free beside {given}", base, other)


def larger_offloads(case: PlanningCase, base: Outcome, rng: random.Random) -> Iterator[str]:
    """Offloads to choose from are never slower than one of them, or none."""
    if set(case.constraints) & {"mode", "offload"}:
        raise NothingToCheckError
    devices = (replace(one, kind="gpu") for one in case.cluster.devices)
    mine = dataclasses.replace(case, cluster=with_devices(case.cluster, tuple(devices)))
    free = attempt(mine, offload="auto")
    for offload in ("none", rng.choice(("optimizer", "activations", "both"))):
        yield from slower(f"auto beside {offload}", free, attempt(mine, offload=offload))


def whole_space(case: PlanningCase, base: Outcome, rng: random.Random) -> Iterator[str]:
    """No combination of fixed degrees, stages, ZeRO level, schedule and microbatches is faster."""
    if "mode" in case.constraints or len(case.cluster.devices) > 4:
        raise NothingToCheckError
    decisions = {"dp", "tp", "stages", "zero", "schedule", "microbatches"}
    if set(case.constraints) & {*decisions, "mesh", "forbid", "copies"}:
        raise NothingToCheckError
    count, rows = len(case.cluster.devices), case.shape.rows
    for dp, tp, stages in product(range(1, count + 1), repeat=3):
        if dp * tp * stages > count or rows % dp:
            continue
        for zero in range(4) if dp > 1 else (0,):
            for schedule in ("gpipe", "1f1b", "zb-h1") if stages > 1 else ("1f1b",):
                given: Constraints = {
                    "dp": dp, "tp": tp, "stages": stages, "zero": zero, "schedule": schedule,
                }  # fmt: skip
                try:
                    other = attempt(case, **given)
                except FxpartError as fault:
                    if {problem.code for problem in fault.problems} <= {"FXP105", "FXP109"}:
                        continue  # axes that the model does not have
                    raise
                yield from slower(f"free beside {given}", base, other)


def larger_schedules(case: PlanningCase, base: Outcome, rng: random.Random) -> Iterator[str]:
    """More schedules or modes to choose from are never slower."""
    if set(case.constraints) & {"mode", "schedule", "mesh", "copies"}:
        raise NothingToCheckError
    names = ["1f1b", "gpipe", "zb-h1"]
    rng.shuffle(names)
    some = attempt(case, schedule=names[0])
    yield from slower(
        f"{names[:2]} beside {names[0]}", attempt(case, schedule=",".join(names[:2])), some
    )
    if "zero" not in case.constraints and rng.random() < 0.3:
        yield from slower("auto beside sync", attempt(case, mode="auto"), base)


def same_bytes(case: PlanningCase, base: Outcome, rng: random.Random) -> Iterator[str]:
    """The same input gives the same bytes, also captured again."""
    if base.plan is None:
        raise NothingToCheckError
    x, y = case.shape.batch()
    again = fxpart.compile(
        case.shape.build(), case.cluster, example_inputs=(x, y), loss=mean_loss, check="off",
        seed=0, constraints=case.constraints,
    ).plan  # fmt: skip
    a, b = msgspec.json.encode(base.plan), msgspec.json.encode(again)
    if a != b:
        place = next((i for i, (p, q) in enumerate(zip(a, b, strict=False)) if p != q), 0)
        near = slice(max(0, place - 80), place + 40)
        yield f"bytes differ at {place}: {a[near]!r} / {b[near]!r}"


def bounds(case: PlanningCase, base: Outcome, rng: random.Random) -> Iterator[str]:
    """No printed bound is above its objective, or above the closed form that is minimized."""
    plan = base.plan
    if plan is None:
        raise NothingToCheckError
    for name in ("certificate", "degrees"):
        one = getattr(plan, name)
        if one is None:
            continue
        if one.lower_bound > one.objective * (1 + EXACT):
            yield f"{name}: bound {one.lower_bound} above objective {one.objective}: {base}"
        if one.lower_bound > plan.prediction.step_seconds * (1 + EXACT):
            yield f"{name}: bound {one.lower_bound} above the closed form: {base}"


Law = Callable[[PlanningCase, Outcome, random.Random], Iterator[str]]
LAWS: dict[str, Law] = {
    "bandwidth": more_bandwidth,
    "memory": more_memory,
    "devices": more_devices,
    "faster": faster_device,
    "order": permuted_devices,
    "names": renamed_hosts,
    "hosts": equal_links,
    "scale": scaled_costs,
    "fix": fixed_decisions,
    "forbid": forbidden_decision,
    "space": larger_space,
    "schedules": larger_schedules,
    "offload": larger_offloads,
    "whole": whole_space,
    "bytes": same_bytes,
    "bound": bounds,
    "printed": printed_numbers,
    "what-if": what_if,
}


def check_law(name: str, case: PlanningCase, base: Outcome | None = None) -> list[str] | None:
    """Return the violations of a law on a case; None if it says nothing about the case.

    base: the case's own plan, if known.
    """
    rng = random.Random(f"{name} {case.seed}")
    captured(case.shape)
    try:
        return list(LAWS[name](case, base or attempt(case), rng))
    except NothingToCheckError:
        return None
