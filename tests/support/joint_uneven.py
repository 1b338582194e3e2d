"""Chains of equal layers with uneven ends, devices or memory: cases that even splits do badly.

Seconds are those of one layer for one row; one option a device unless degrees are the matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from joint_problems import make

from fxpart.solver.joint.problem import JointProblem, LinearCost, Pool

LINK = LinearCost(latency=1e-3, inverse=1e-3)
MUCH = 10**9


def pools(*counts: int, memory: Sequence[int] = (MUCH, MUCH)) -> list[Pool]:
    """A pool for each count."""
    return [
        Pool(name=f"type{p}", devices=n, memory=memory[p], host=max(n, 1), transfer=LINK)
        for p, n in enumerate(counts)
    ]


def model(
    layers: int,
    places: list[Pool],
    *,
    first: float = 0.1,
    head: float = 0.1,
    speed: Sequence[float] = (1.0, 1.0),
    microbatches: Sequence[int] = (16,),
    batch: int = 16,
    degrees: Sequence[tuple[int, int, int, int, str]] | None = None,
    **fields: object,
) -> JointProblem:
    """A first block, ``layers`` of one second forward each, and a head, in a chain."""
    return make(
        forward=[[first / s, 1.0 / s, head / s] for s in speed[: len(places)]],
        kinds=[0, *[1] * layers, 2],
        batch=batch,
        microbatches=microbatches,
        pools=places,
        degrees=degrees or [(p, 1, 1, 0, "none") for p in range(len(places))],
        weight=[0, 10, 0],
        activation=[1, 10, 1],
        workspace=[0, 0, 0],
        row_bytes=10,
        max_stages=sum(pool.devices for pool in places),
        **fields,
    )


def cases() -> dict[str, JointProblem]:
    """The cases of the tests by name."""
    six, seven = (
        model(
            20,
            pools(n),
            degrees=[(0, data, 1, 0, "none") for data in range(1, n + 1)],
            batch=84,
            microbatches=(1, 2, 3, 4, 6, 12, 14),
        )
        for n in (6, 7)
    )
    return {
        "large head": model(24, pools(4), head=4.0),
        "heavy first block": model(24, pools(4), first=5.0),
        "30 layers on 4 devices": model(30, pools(4)),
        "30 layers and a head on 4 devices": model(30, pools(4), head=2.0),
        "6 devices": six,
        "7 devices": seven,
        "one slower device": model(28, pools(3, 1), speed=(1.0, 0.5)),
        "one device with half the memory": model(25, pools(3, 1, memory=(560, 280))),
        "7 microbatches": model(
            40, pools(4), batch=7, microbatches=(1, 4, 7), first=1e-3, head=1e-3
        ),
    }
