"""Orders of unequal devices for the ranks of a mesh: groups with fast devices and links come first.

A stage runs on a group of consecutive devices, and all groups pay for the slowest ring that any of
them uses. So the order decides which devices form a group, and it pays to price the first groups
alone, without slower ones that come later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from math import comb, factorial
from typing import TYPE_CHECKING

from fxpart.cluster.link_index import LinkIndex, has_equal_links
from fxpart.planner.device_assignment import StageAssignment
from fxpart.pricing.device_groups import Rings, slowest_device
from fxpart.pricing.topology import pools_of

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.planner.request import PlanRequest

_GROUPS = 130  # groups of devices up to which all are compared; beyond, only neighbors
_HOSTS = 3  # hosts up to which their order in a group is searched
_SIZES = (1.0, float(1 << 26))  # bytes by which latency or bandwidth decides
_LARGEST = 64  # devices up to which orders are searched


def is_unequal(cluster: Cluster) -> bool:
    """Return whether it matters which devices a stage uses."""
    count = len(cluster.devices)
    return 1 < count <= _LARGEST and (
        len(set(pools_of(cluster))) > 1 or not has_equal_links(cluster)
    )


def expand_assignments(
    request: PlanRequest, given: StageAssignment, *, every: bool
) -> tuple[StageAssignment, ...]:
    """Return the assignment, and others of the same mesh on unequal devices or links.

    The first groups of an order alone are an assignment where the others have slower rings or
    devices. every: all orders and numbers of groups; by default those that are most often best.
    """
    if not is_unequal(request.cluster):
        return (given,)
    made = [given]
    if given.order is not None:
        made.append(replace(given, order=None))
    if request.sharded:
        orders = _list_orders(request, range(2 * len(_SIZES)) if every else (len(_SIZES),))
        made += [replace(given, order=order) for order in orders]
    found: dict[object, StageAssignment] = {}
    for one in made:
        limits: Sequence[int | None] = (None,)
        if request.sharded and one is not given:
            limits = _list_limits(request, one) if every else (_clip(request, one),)
        for limit in limits:
            found.setdefault(_key(request, one, limit), replace(one, limit=limit))
    return tuple(found.values())


def _key(request: PlanRequest, one: StageAssignment, limit: int | None) -> object:
    """Return what distinguishes assignments: the devices in their order."""
    count = len(request.cluster.devices)
    order = range(count) if one.order is None else one.order
    most = count // request.mesh.size
    return tuple(order), most if limit is None else min(limit, most)


def _clip(request: PlanRequest, one: StageAssignment) -> int | None:
    """Return the expected number of stages where it is allowed, else None."""
    least, most = request.stages
    return one.stages if one.stages is not None and least <= one.stages <= most else None


def _list_orders(request: PlanRequest, keys: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Yield orders in which each group has the best of the devices that are left.

    By the speed of the slowest device and the seconds of all-reduces over each axis. keys: which of
    them count first, see :func:`_rank`.
    """
    cluster, width = request.cluster, request.mesh.size
    rates: dict[tuple[int, ...], tuple[tuple[float, ...], tuple[float, ...]]] = {}
    for key in keys:
        left, order = list(range(len(cluster.devices))), list[int]()
        while len(left) >= width:
            groups = list(_list_groups(cluster, left, width))
            for group in groups:
                if group not in rates:
                    rates[group] = _rate(request, group)
            best: tuple[int, ...] = min(groups, key=lambda group: _rank(rates[group], key))
            order += best
            left = [device for device in left if device not in order]
        yield (*order, *left)
        yield from _list_even_orders(request, rates, key)


def _list_even_orders(
    request: PlanRequest,
    rates: Mapping[tuple[int, ...], tuple[tuple[float, ...], tuple[float, ...]]],
    key: int,
) -> Iterator[tuple[int, ...]]:
    """Yield orders whose first groups, as many as there are stages, have a fast slowest one.

    All groups pay for the slowest. The groups up to a rank are taken one by one, first of the
    devices with the fewest of them; the lowest rank that gives enough groups counts.
    """
    devices = range(len(request.cluster.devices))
    wanted = min(len(devices) // request.mesh.size, request.stages[1])
    groups = sorted(rates, key=lambda group: _rank(rates[group], key))
    for end in range(wanted, len(groups) + 1):
        if end < len(groups) and _rank(rates[groups[end]], key) == _rank(
            rates[groups[end - 1]], key
        ):
            continue
        allowed, order = groups[:end], list[int]()
        while allowed:
            uses = Counter(device for group in allowed for device in group)
            best = min(
                allowed,
                key=lambda group: (
                    min(uses[each] for each in group),
                    sum(uses[each] for each in group),
                ),
            )
            order += best
            allowed = [group for group in allowed if not {*group} & {*best}]
        if len(order) >= wanted * request.mesh.size:
            yield (*order, *(each for each in devices if each not in order))
            return


def _list_groups(cluster: Cluster, left: Sequence[int], width: int) -> Iterator[tuple[int, ...]]:
    """Yield groups of devices, hosts in any order: one after the other, or round-robin.

    In round-robin order the ranks of an inner axis are on several hosts.
    """
    index = LinkIndex(cluster)
    named = any(index.group(device.name) == device.name for device in cluster.devices)
    hosts = list(dict.fromkeys(cluster.devices[each].host for each in left))
    turns = permutations(hosts) if len(hosts) <= _HOSTS else [tuple(hosts)]
    for turn in turns:
        ordered = sorted(left, key=lambda each: turn.index(cluster.devices[each].host))
        if comb(len(left), width) * factorial(width - 1) <= _GROUPS and named:
            for first, *others in combinations(ordered, width):
                yield from ((first, *rest) for rest in permutations(others))
        elif comb(len(left), width) <= _GROUPS:
            for group in combinations(ordered, width):
                yield group
                yield _order_round_robin(cluster, group)
        else:
            yield from (tuple(ordered[k : k + width]) for k in range(len(left) - width + 1))


def _order_round_robin(cluster: Cluster, group: tuple[int, ...]) -> tuple[int, ...]:
    """Return the devices with the first of each host first, then the second of each."""
    seen: Counter[str] = Counter()
    turns = []
    for device in group:
        host = cluster.devices[device].host
        turns.append((seen[host], device))
        seen[host] += 1
    places = sorted(range(len(group)), key=lambda place: turns[place][0])
    return tuple(group[place] for place in places)


def _rate(
    request: PlanRequest, group: tuple[int, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the seconds of all-reduces of each size, and the slowness of the slowest device."""
    part = request.cluster.part(group)
    rings, model = Rings(part, request.mesh), request.cost_model
    seconds = tuple(
        sum(
            model.reshard("partial", "replicate", size, rings(axis)).seconds
            for axis in request.mesh.names
        )
        for size in _SIZES
    )
    slow = slowest_device(part.devices)
    return seconds, (-max(slow.flops.values()), -slow.bandwidth, -float(slow.memory))


def _rank(rate: tuple[tuple[float, ...], tuple[float, ...]], key: int) -> tuple[float, ...]:
    """Return the criteria of a group in the order of ``key``; less is better."""
    seconds, slowness = rate
    times = seconds if key % 2 == 0 else seconds[::-1]
    return (*slowness, *times) if key < len(_SIZES) else (*times, *slowness)


def _list_limits(request: PlanRequest, one: StageAssignment) -> list[int | None]:
    """Return the numbers of groups to price alone: before each group that is slower, and all."""
    cluster = one.ordered(request.cluster)
    width = request.mesh.size
    most = min(len(cluster.devices) // width, request.stages[1])
    least = max(1, request.stages[0])
    limits: list[int | None] = []
    known: object = None
    for count in range(least, most + 1):
        part = cluster.part(range(count * width))
        rings = Rings(part, request.mesh)
        slow = slowest_device(part.devices)
        state = (
            tuple(
                tuple((link.latency, link.bandwidth, link.curve) for link in rings(axis))
                for axis in request.mesh.names
            ),
            tuple(sorted(slow.flops.items())), slow.bandwidth, slow.memory,
        )  # fmt: skip
        if count > least and state != known:
            limits.append(count - 1)
        known = state
    return [*limits, most if most * width < len(cluster.devices) else None]
