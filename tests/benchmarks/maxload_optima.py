"""How long the max-load solver takes to prove the optimum of graphs that others have priced.

    python tests/benchmarks/maxload_optima.py

The eight published instances of Tarnawski et al. (NeurIPS 2020), read from ../shared/bench/maxload,
as chains by the dynamic programme and by CP-SAT, and with any assignment; then transformers, op by
op, of 134 to 3170 ops on 8 to 32 devices (maxload/instances.py). CPU seconds of the
process, and wall seconds; OR-Tools is imported before. The limit for any assignment is in wall
seconds.
"""

from __future__ import annotations

import time
from typing import Any

from record import ROOT, parser, write

FOLDER = ROOT.parent / "shared" / "bench" / "maxload"
# What the instances' authors print of PipeDream's planner and of people's own splits.
PIPEDREAM = {
    "layer_bert24_inference": (17.79, 20.084),
    "layer_bert24_training": (187.91, 49.405),
    "layer_resnet50_inference": (39.40, 43.918),
    "layer_gnmt_inference": (33.03, 46.209),
    "op_bert_l-3_inference": (37.46, None),
    "op_bert_l-3_training": (122.99, None),
    "op_bert_l-6_inference": (65.56, None),
    "op_resnet50_inference": (129.16, None),
}
GROWN = ((4, 8), (12, 8), (24, 8), (48, 8), (48, 16), (48, 32), (96, 8), (96, 16), (96, 32))


def timed(instance: Any, **options: Any) -> dict[str, Any]:
    """One answer in figures; FAILED assertions where it is not valid."""
    from benchmarks.maxload.instance import faults
    from benchmarks.maxload.portfolio import solve

    cpu, wall = time.process_time(), time.perf_counter()
    found = solve(instance, **options)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert found.assignment is not None
    assert not faults(instance, found.assignment, options.get("mode", "chain"))
    return {
        "status": found.status,
        "objective": round(found.objective, 4),
        "lower_bound": round(found.lower_bound, 4),
        "gap": round(found.gap, 8),
        "solver": found.solver,
        "cpu_seconds": round(cpu, 2),
        "wall_seconds": round(wall, 2),
    }


def published(limit: float) -> list[dict[str, Any]]:
    """The instances of the paper."""
    from benchmarks.maxload.formats import read_instance

    rows = []
    for name, (pipedream, people) in PIPEDREAM.items():
        instance = read_instance(FOLDER / f"{name}.json")
        rows.append({
            "name": name,
            "nodes": len(instance.nodes),
            "pipedream": pipedream,
            "people": people,
            "dp": timed(instance, solver="dp"),
            "cp_sat": timed(instance, solver="cp-sat"),
            "any": timed(instance, mode="any", time_limit=limit),
        })  # fmt: skip
    return rows


def grown() -> list[dict[str, Any]]:
    """Transformers op by op."""
    from benchmarks.maxload.instances import transformer

    rows = []
    for layers, devices in GROWN:
        instance = transformer(layers, devices)
        found = timed(instance, solver="dp", time_limit=300)
        rows.append({"ops": len(instance.nodes), "devices": devices, **found})
    return rows


def main() -> None:
    """All of it."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--limit", type=float, default=100.0, help="seconds, for any")
    options = options_parser.parse_args()
    import benchmarks.maxload.any_ilp
    import benchmarks.maxload.chain_ilp  # noqa: F401

    rows = published(options.limit)
    totals = {
        f"{kind}_{unit}_seconds": round(sum(row[kind][f"{unit}_seconds"] for row in rows), 2)
        for kind in ("dp", "cp_sat")
        for unit in ("cpu", "wall")
    }
    write("maxload_optima", {"published": rows, "all_eight": totals, "grown": grown()}, options)


if __name__ == "__main__":
    main()
