"""One run of a program of nccl-tests, however it was written down."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class NcclTestRun:
    """One run.

    program: such as "all_reduce_perf", "" where it is not said. ranks, hosts: of one communicator.
    times: (size as nccl-tests counts it, seconds). places: host and device of each rank that is
    named; products: their names. where: the place in the text. source: what was run, in words.
    """

    program: str
    ranks: int
    hosts: int
    times: tuple[tuple[int, float], ...]
    where: str
    source: str
    places: tuple[tuple[str, int], ...] = field(default=())
    products: tuple[str, ...] = field(default=())


def describe_run(program: str, products: tuple[str, ...], kinds: set[str], version: str) -> str:
    """What was run, in words."""
    parts = [f"nccl-tests {program}".strip(), ", ".join(dict.fromkeys(products))]
    parts += [", ".join(sorted(kinds)), f"NCCL {version}" if version else ""]
    return "; ".join(part for part in parts if part)
