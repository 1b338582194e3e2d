"""``graph.txt`` of PipeDream's profiler (SOSP 2019), also where its planner added stages.

A line for each node, ``node4 -- Linear(...) -- forward_compute_time=1.0, backward_compute_time=2.0,
activation_size=3.0, parameter_size=4.0``, then an indented line for each edge, ``node4 -- node5``.
node4 gets the id 4. Both compute times add up, in milliseconds; bytes are activation_size (a list
adds up) and parameter_size, each once; a transfer takes 2 * activation_size / bandwidth, for the
value and its gradient, as in PipeDream's planner. As there, sources called Input cost nothing. The
number of devices and the bandwidth have to be given; memory is without limit if it is not.
"""

from __future__ import annotations

import re

from fxpart.errors import FxpartError, Problem

from ..checks import LARGEST
from ..instance import Instance, Node
from .overrides import DeviceOverrides, missing, useless

_NUMBER = r"([0-9.eE+-]+)"
_NODE = re.compile(
    r"node(\d{1,15}) -- (.*) -- "
    rf"forward_compute_time={_NUMBER}, backward_compute_time={_NUMBER}, "
    rf"activation_size=(?:{_NUMBER}|\[([0-9.eE+; -]+)\]), parameter_size={_NUMBER}"
    r"(?: -- stage_id=\d+)?"
)
_EDGE = re.compile(r"node(\d{1,15}) -- node(\d{1,15})")


def parse(data: bytes, where: str, overrides: DeviceOverrides) -> Instance:
    """The instance; FXP206 with every line that is neither node nor edge, FXP109."""
    nodes, ends, faults = _lines(data.decode("utf-8"), where, overrides)
    place = {node.id: i for i, node in enumerate(nodes)}
    for number, *pair in ends:
        if not all(end in place for end in pair):
            at = f"{where}, line {number}"
            faults.append(Problem("FXP206", at, "it names a node that there is not", ""))
    if faults:
        raise FxpartError(faults)
    if overrides.cpus:
        raise useless(where, "--cpus", "the file has no times on a CPU core")
    if overrides.accelerators is None:
        raise missing(where, "--devices", "how many devices there are")
    if overrides.bandwidth is None or not overrides.bandwidth > 0:
        raise missing(where, "--bandwidth", "a bandwidth above 0")
    targets = {v for _, _, v in ends}
    return Instance(
        nodes=tuple(
            Node(id=node.id, name=node.name, accelerator=0.0)
            if node.name.startswith("Input") and node.id not in targets
            else node
            for node in nodes
        ),
        edges=tuple((place[u], place[v]) for _, u, v in ends),
        accelerators=overrides.accelerators,
        memory=LARGEST if overrides.memory is None else overrides.memory,
    )


def _lines(
    text: str, where: str, overrides: DeviceOverrides
) -> tuple[list[Node], list[tuple[int, int, int]], list[Problem]]:
    """Nodes, edges as (line, id, id), and the lines that are neither."""
    nodes: list[Node] = []
    ends: list[tuple[int, int, int]] = []
    faults: list[Problem] = []
    rate = (overrides.bandwidth or 1.0) / 1000.0  # bytes a millisecond
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip()
        edge, node = _EDGE.fullmatch(words), _NODE.fullmatch(words)
        try:
            if node is not None:
                nodes.append(_node(node, rate))
            elif edge is not None:
                ends.append((number, int(edge[1]), int(edge[2])))
            elif words:
                raise ValueError(f"neither a node nor an edge: {words[:60]!r}")
        except (ValueError, OverflowError, ZeroDivisionError) as failure:
            at = f"{where}, line {number}"
            faults.append(Problem("FXP206", at, str(failure), "see PipeDream's profiler"))
    return nodes, ends, faults


def _node(found: re.Match[str], rate: float) -> Node:
    """A node from its line; ValueError where a number is none."""
    number, name, forward, backward, one, several, parameters = found.groups()
    activation = sum(map(float, several.split(";"))) if several else float(one)
    return Node(
        id=int(number),
        name=name,
        accelerator=float(forward) + float(backward),
        bytes=activation + float(parameters),
        transfer=2 * activation / rate,
    )
