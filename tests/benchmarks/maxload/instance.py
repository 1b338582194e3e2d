"""The max-load problem as numbers, its one objective, and which assignments are valid.

From Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS
2020). Times are in the unit of the file that they came from, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import Literal, get_args

import msgspec

Mode = Literal["chain", "any"]
MODES: tuple[str, ...] = get_args(Mode)
Status = Literal["optimal", "within gap", "best found", "infeasible", "unknown"]


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One operation or layer, placed whole.

    accelerator, cpu: time on an accelerator and on a CPU core. bytes: its memory on an accelerator.
    transfer: time to move its output between an accelerator and host memory. runs: whether an
    accelerator can run it at all. group: nodes of the same group lie on the same device.
    """

    id: int
    name: str = ""
    accelerator: float
    cpu: float = 0.0
    bytes: float = 0.0
    transfer: float = 0.0
    runs: bool = True
    backward: bool = False
    group: int | None = None


class Instance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes, edges as (producer, consumer) positions in ``nodes``, and what they are placed on.

    Devices are numbered: ``accelerators`` of ``memory`` bytes each, then ``cpus`` CPU cores.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    accelerators: int
    cpus: int = 0
    memory: float

    @property
    def devices(self) -> tuple[str, ...]:
        """Their names in order: ``acc0``, ``acc1``, ..., ``cpu0``, ..."""
        names = [f"acc{d}" for d in range(self.accelerators)]
        return (*names, *(f"cpu{d}" for d in range(self.cpus)))


class MaxLoadAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was found: a device for each node (None where nothing was), and what is proven.

    objective: the largest load, infinite without assignment; no valid assignment is below
    lower_bound. status: "optimal" to a relative 1e-6, "within gap" to 1 %.
    """

    status: Status
    assignment: tuple[int, ...] | None
    objective: float
    lower_bound: float
    solver: str

    @property
    def gap(self) -> float:
        """(objective - bound) / objective; 0 where both are 0, infinite without assignment."""
        if self.assignment is None:
            return float("inf")
        return 1.0 - self.lower_bound / self.objective if self.objective > 0 else 0.0


def loads(instance: Instance, assignment: Sequence[int]) -> list[float]:
    """The load of each device under a device for each node.

    A CPU core: the sum of its nodes' CPU times. An accelerator: its nodes' accelerator times, what
    it pulls (once for each outside producer that it uses) and what it pushes (once for each own
    node that is used outside).
    """
    terms: list[list[float]] = [[] for _ in instance.devices]
    for node, d in zip(instance.nodes, assignment, strict=True):
        terms[d].append(node.accelerator if d < instance.accelerators else node.cpu)
    moved = {
        (u, device)
        for u, v in instance.edges
        if assignment[u] != assignment[v]
        for device in (assignment[u], assignment[v])
        if device < instance.accelerators
    }
    for u, device in sorted(moved):
        terms[device].append(instance.nodes[u].transfer)
    return [fsum(t) for t in terms]


def evaluate(instance: Instance, assignment: Sequence[int]) -> float:
    """The objective: the largest load of any device."""
    return max(loads(instance, assignment))


def bytes_held(instance: Instance, assignment: Sequence[int]) -> list[float]:
    """Bytes on each accelerator."""
    held: list[list[float]] = [[] for _ in range(instance.accelerators)]
    for node, d in zip(instance.nodes, assignment, strict=True):
        if d < instance.accelerators:
            held[d].append(node.bytes)
    return [fsum(h) for h in held]


def groups(instance: Instance) -> list[int]:
    """For each node the number of its group; groups in order of their first node."""
    numbers: dict[int, int] = {}
    found, count = [], 0
    for node in instance.nodes:
        known = None if node.group is None else numbers.get(node.group)
        if known is None:
            known, count = count, count + 1
            if node.group is not None:
                numbers[node.group] = known
        found.append(known)
    return found


def order_edges(instance: Instance, group: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of groups (first, second) that a pipeline has to run in this order, sorted.

    Edges between forward nodes as they are. A group without a forward node has no place in the
    forward pass: its place is where the forward of its gradients would be, so that its edges to
    and from backward nodes count mirrored. What goes from forward to backward goes either way.
    """
    forward = [False] * (max(group, default=-1) + 1)
    for node, g in zip(instance.nodes, group, strict=True):
        forward[g] |= not node.backward
    pairs = set()
    for u, v in instance.edges:
        a, b = group[u], group[v]
        if a == b:
            continue
        back = instance.nodes[u].backward + instance.nodes[v].backward
        if back == 0:
            pairs.add((a, b))
        elif back == 2 and not (forward[a] and forward[b]):
            pairs.add((b, a))
    return sorted(pairs)


def faults(instance: Instance, assignment: Sequence[int], mode: Mode) -> list[str]:
    """What is not valid about an assignment; nothing where it is valid."""
    if len(assignment) != len(instance.nodes):
        return [f"{len(assignment)} nodes are placed, there are {len(instance.nodes)}"]
    count, found = len(instance.devices), []
    for node, d in zip(instance.nodes, assignment, strict=True):
        if not 0 <= d < count:
            found.append(f"node {node.id} is on device {d} of {count}")
        elif d < instance.accelerators and not node.runs:
            found.append(f"node {node.id} is on an accelerator, which cannot run it")
    if found:
        return found
    for d, held in enumerate(bytes_held(instance, assignment)):
        if held > instance.memory:
            found.append(f"{instance.devices[d]} holds {held:.17g} of {instance.memory:.17g} bytes")
    group = groups(instance)
    place: dict[int, int] = {}
    for node, g, d in zip(instance.nodes, group, assignment, strict=True):
        if place.setdefault(g, d) != d:
            found.append(f"group {node.group} is not on one device")
    if not found and mode == "chain":
        between = {(place[a], place[b]) for a, b in order_edges(instance, group)}
        if _cyclic(sorted((a, b) for a, b in between if a != b), count):
            found.append("the devices wait for each other in a circle")
    return found


def _cyclic(edges: list[tuple[int, int]], count: int) -> bool:
    """Whether the edges over 0..count-1 have a cycle."""
    waiting = [sum(b == d for _, b in edges) for d in range(count)]
    ready = [d for d in range(count) if not waiting[d]]
    for d in ready:
        for a, b in edges:
            if a == d:
                waiting[b] -= 1
                if not waiting[b]:
                    ready.append(b)
    return len(ready) < count
