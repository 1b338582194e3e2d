"""One run of a program of nccl-tests, from its table or its JSON."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class NcclTestRun:
    """One run of nccl-tests.

    program: such as "all_reduce_perf", "" if unknown. ranks, hosts: of one communicator. times:
    (size in the definition of nccl-tests, seconds). places: host and device of each listed rank.
    products: product names of these devices. where: location in the text. source: description of
    the run.
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
    """Return a description of the run."""
    parts = [f"nccl-tests {program}".strip(), ", ".join(dict.fromkeys(products))]
    parts += [", ".join(sorted(kinds)), f"NCCL {version}" if version else ""]
    return "; ".join(part for part in parts if part)
