"""Whether an instance makes sense: every fault of it, not the first."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from fxpart.errors import FxpartError, Problem

from .instance import Instance

LARGEST = 2.0**60  # times and bytes
MOST_NODES = 20_000
MOST_DEVICES = 1024


def check_instance(instance: Instance, where: str = "instance") -> None:
    """Raises FXP206 with every fault of ``instance`` (the first 20); returns if there is none."""
    found = [
        Problem("FXP206", f"{where}: {place}", why, "correct this entry")
        for place, why in _faults(instance)
    ]
    if found:
        raise FxpartError(found[:20])


def _faults(instance: Instance) -> Iterator[tuple[str, str]]:
    n = len(instance.nodes)
    if not 1 <= n <= MOST_NODES:
        yield "nodes", f"there are {n}, not 1 to {MOST_NODES}"
    kinds = instance.accelerators, instance.cpus
    if min(kinds) < 0 or not 1 <= sum(kinds) <= MOST_DEVICES:
        yield (
            "devices",
            f"{kinds[0]} accelerators, {kinds[1]} CPU cores: not 1 to {MOST_DEVICES}",
        )
    if not _number(instance.memory):
        yield "memory", f"{instance.memory} is not a number from 0 to 2**60"
    seen = set()
    for node in instance.nodes:
        if node.id in seen:
            yield f"node {node.id}", "there are several with this id"
        seen.add(node.id)
        for name in ("accelerator", "cpu", "bytes", "transfer"):
            if not _number(getattr(node, name)):
                yield f"node {node.id}, {name}", "not a number from 0 to 2**60"
    for index, edge in enumerate(instance.edges):
        if not all(0 <= end < n for end in edge):
            yield f"edges[{index}]", f"{edge} names a node that there is not"


def _number(x: float) -> bool:
    return isfinite(x) and 0 <= x <= LARGEST
