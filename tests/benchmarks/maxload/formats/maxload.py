"""The JSON of "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020).

maxFPGAs, maxCPUs, maxSizePerFPGA: accelerators, CPU cores, bytes of an accelerator. Node: id, name,
fpgaLatency (time on an accelerator), cpuLatency, size (bytes), supportedOnFpga, isBackwardNode,
colorClass (a group). Edge: sourceId, destId, cost: time to move the source's output, which has to
be equal on all its edges. Other fields are left alone, and times stay in the file's unit.
"""

from __future__ import annotations

import msgspec

from fxpart.errors import FxpartError, Problem
from fxpart.files import from_json

from ..instance import Instance, Node
from .overrides import DeviceOverrides, useless


class _MaxLoadNode(msgspec.Struct, rename="camel"):
    id: int
    fpga_latency: float
    cpu_latency: float = 0.0
    size: float = 0.0
    name: str = ""
    supported_on_fpga: bool | int = True
    is_backward_node: bool | int = False
    color_class: int | None = None


class _MaxLoadEdge(msgspec.Struct, rename="camel"):
    source_id: int
    dest_id: int
    cost: float = 0.0


class _MaxLoadFile(msgspec.Struct):
    nodes: list[_MaxLoadNode]
    edges: list[_MaxLoadEdge]
    accelerators: int = msgspec.field(name="maxFPGAs")
    memory: float = msgspec.field(name="maxSizePerFPGA")
    cpus: int = msgspec.field(name="maxCPUs", default=0)


def parse(data: bytes, where: str, overrides: DeviceOverrides) -> Instance:
    """The instance; FXP206 for edges that name no node or disagree."""
    if overrides.bandwidth is not None:
        raise useless(where, "--bandwidth", "the file has the time of each transfer")
    file = from_json(data, _MaxLoadFile)
    place = {node.id: i for i, node in enumerate(file.nodes)}
    transfer: dict[int, float] = {}
    faults, edges = [], []
    for index, edge in enumerate(file.edges):
        at = f"{where}: edges[{index}]"
        ends = edge.source_id, edge.dest_id
        if not all(end in place for end in ends):
            faults.append(Problem("FXP206", at, f"{ends} names a node that there is not", ""))
            continue
        edges.append((place[ends[0]], place[ends[1]]))
        cost = transfer.setdefault(ends[0], edge.cost)
        if cost != edge.cost:
            why = f"cost {edge.cost}, another edge of node {ends[0]} has {cost}"
            faults.append(Problem("FXP206", at, why, "one cost for all edges out of a node"))
    if faults:
        raise FxpartError(faults)
    return Instance(
        nodes=tuple(
            Node(
                id=node.id,
                name=node.name,
                accelerator=node.fpga_latency,
                cpu=node.cpu_latency,
                bytes=node.size,
                transfer=transfer.get(node.id, 0.0),
                runs=bool(node.supported_on_fpga),
                backward=bool(node.is_backward_node),
                group=node.color_class,
            )
            for node in file.nodes
        ),
        edges=tuple(edges),
        accelerators=file.accelerators
        if overrides.accelerators is None
        else overrides.accelerators,
        cpus=file.cpus if overrides.cpus is None else overrides.cpus,
        memory=file.memory if overrides.memory is None else overrides.memory,
    )
