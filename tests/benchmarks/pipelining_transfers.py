"""pipelining.py's stages in which transfers matter, as a group of their own. Imported, not run.

Each case comes with what its transfers are of torch's step: one message of the boundary's size,
timed from rank 0 to rank 1 while nothing else runs, over gloo as torch's runtime sends it and as
fxpart does, and times the messages that a boundary carries in a step, there and back. What is
hidden behind computations counts too; so it bounds what faster transfers can gain.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from pipelining_models import Case


class Wires:
    """The ways between the ranks: fxpart's own, and gloo."""

    def __init__(self, ranks: int) -> None:
        """Called by all ranks at the same time."""
        from fxpart.runtime import connect
        from fxpart.runtime.transport.process_group_transport import ProcessGroupTransport

        self.ways = {
            "fxpart": connect(ranks),
            "torch": ProcessGroupTransport(one_machine=True, shared_memory=False),
        }

    def milliseconds(self, megabytes: float) -> dict[str, float]:
        """Of one message of that size, one way; the same on every rank."""
        import torch
        import torch.distributed as dist
        from local_transfers import Pair, rounds

        found = {}
        for name, way in self.ways.items():
            dist.barrier()
            taken = torch.zeros(1, dtype=torch.float64)
            if dist.get_rank() < 2:
                pair = Pair(way, int(megabytes * 1e6) // 4 * 4)
                best = min(rounds(4, pair.trip)[0] for _ in range(5))
                taken[0] = best / 2e3
            dist.broadcast(taken, 0)
            found[name] = round(float(taken), 3)
        return found

    def close(self) -> None:
        """Gives back what it holds."""
        for way in self.ways.values():
            way.close()


def chosen(
    families: Mapping[str, Mapping[str, Case]], group: str, options: argparse.Namespace
) -> list[tuple[str, str, Case]]:
    """The cases of a group that are to be measured, with family and size."""
    wanted = set(options.only.split(","))
    return [
        (family, size, case)
        for family, sizes in families.items()
        for size, case in sizes.items()
        if wanted & {"", group, family, size, f"{family} {size}"}
    ]


def with_shares(case: dict[str, Any], wires: Wires, microbatches: int) -> dict[str, Any]:
    """A measured case and what its transfers are of torch's steps."""
    one = wires.milliseconds(case["boundary_mb"])
    share = {
        name: round(2 * microbatches * one["torch"] / found["step_ms"]["torch"], 3)
        for name, found in case.items()
        if isinstance(found, Mapping)
    }
    return {**case, "transfer_ms": one, "share_of_torch": share}


def rows(worlds: Mapping[str, Any]) -> Iterator[tuple[float, float]]:
    """Of each case and schedule: throughput over torch, and the share of transfers."""
    for world in worlds.values():
        for family in world.get("transfers", {}).values():
            for case in family.values():
                for name, share in case["share_of_torch"].items():
                    yield case[name]["throughput_over_torch"], share
