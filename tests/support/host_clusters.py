"""Clusters of equal hosts with fast links inside and slow links between them."""

from __future__ import annotations

from fxpart import Cluster, Device, Link


def equal_hosts(
    count: int, each: int, *, memory: int, near: float, far: float, shared: bool = False
) -> Cluster:
    """``count`` hosts of ``each`` devices; bandwidths in bytes per second."""
    return Cluster(
        name="hosts",
        devices=tuple(
            Device(
                name=f"h{host}/gpu:{place}", kind="gpu", model="card", host=f"h{host}",
                memory=memory, flops={"float32": 20e12}, bandwidth=1e12, source="formula",
            )
            for host in range(count)
            for place in range(each)
        ),
        links=(
            Link(source="*", target="*", latency=1e-9, bandwidth=far, kind="net", shared=shared),
            *(
                Link(source=f"h{host}", target=f"h{host}", latency=1e-9, bandwidth=near)
                for host in range(count)
            ),
        ),
    )  # fmt: skip
