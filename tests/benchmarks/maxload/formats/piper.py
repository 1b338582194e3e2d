"""The JSON profile of "Piper: Multidimensional Planner for DNN Parallelization" (NeurIPS 2021).

maxDevices, maxMemoryPerDevice, bandwidth: accelerators, bytes each, bytes a second. Node: id, name,
and of its alternatives (TMPCs) the first without tensor parallelism: timePerSample (forward and
backward, seconds) and memory a * y + b (memoryUsageA, memoryUsageB) with y microbatches in flight.
y depends on the stage; here it is the number of accelerators, the most that a stage can have. Edge:
sourceId, destId, communicationCost (bytes); a transfer takes 2 * bytes / bandwidth, for the value
and its gradient, as in Piper. A node's output is as large as its largest edge, and moves once for
each accelerator, where Piper counts each edge. There are no times on a CPU core. Data and tensor
parallelism and recomputation are not choices here.
"""

from __future__ import annotations

import msgspec

from fxpart.errors import FxpartError, Problem
from fxpart.files import from_json

from ..instance import Instance, Node
from .overrides import DeviceOverrides, missing, useless


class _Alternative(msgspec.Struct, rename="camel"):
    time_per_sample: float
    memory_usage_a: float = msgspec.field(name="memoryUsageA", default=0.0)
    memory_usage_b: float = msgspec.field(name="memoryUsageB", default=0.0)


class _MaxLoadPiperNode(msgspec.Struct):
    id: int
    alternatives: dict[str, list[_Alternative]] = msgspec.field(name="TMPCs")
    name: str = ""


class _MaxLoadPiperEdge(msgspec.Struct, rename="camel"):
    source_id: int
    dest_id: int
    communication_cost: float = 0.0


class _MaxLoadPiperFile(msgspec.Struct, rename="camel"):
    nodes: list[_MaxLoadPiperNode]
    edges: list[_MaxLoadPiperEdge]
    max_devices: int | None = None
    max_memory_per_device: float | None = None
    bandwidth: float | None = None


def parse(data: bytes, where: str, overrides: DeviceOverrides) -> Instance:
    """The instance; FXP206 for edges that name no node and nodes without a time, FXP109."""
    if overrides.cpus:
        raise useless(where, "--cpus", "the file has no times on a CPU core")
    file = from_json(data, _MaxLoadPiperFile)
    accelerators = file.max_devices if overrides.accelerators is None else overrides.accelerators
    memory = file.max_memory_per_device if overrides.memory is None else overrides.memory
    bandwidth = file.bandwidth if overrides.bandwidth is None else overrides.bandwidth
    if accelerators is None:
        raise missing(where, "--devices", "how many devices there are")
    if memory is None:
        raise missing(where, "--memory", "how many bytes a device has")
    if bandwidth is None or not bandwidth > 0:
        raise missing(where, "--bandwidth", "a bandwidth above 0")
    faults, nodes = [], []
    place = {node.id: i for i, node in enumerate(file.nodes)}
    output = dict.fromkeys(place, 0.0)
    for index, edge in enumerate(file.edges):
        ends = edge.source_id, edge.dest_id
        if not all(end in place for end in ends):
            at, why = f"{where}: edges[{index}]", f"{ends} names a node that there is not"
            faults.append(Problem("FXP206", at, why, ""))
        else:
            output[ends[0]] = max(output[ends[0]], edge.communication_cost)
    for node in file.nodes:
        if not node.alternatives.get("1"):
            at, why = f"{where}: node {node.id}", "it has no TMPC for one device"
            faults.append(Problem("FXP206", at, why, 'add one under "TMPCs", "1"'))
            continue
        one = node.alternatives["1"][0]
        nodes.append(
            Node(
                id=node.id,
                name=node.name,
                accelerator=one.time_per_sample,
                bytes=one.memory_usage_a * accelerators + one.memory_usage_b,
                transfer=2 * output[node.id] / bandwidth,
            )
        )
    if faults:
        raise FxpartError(faults)
    return Instance(
        nodes=tuple(nodes),
        edges=tuple((place[e.source_id], place[e.dest_id]) for e in file.edges),
        accelerators=accelerators,
        memory=memory,
    )
