"""What it costs to choose placements for GPT-3 175B, and how good they are.

    python tests/benchmarks/placement.py

The graph of 96 layers is captured once on the meta device (not counted). Then, for meshes of 8 and
of 8 x 8 H100: CPU seconds from the graph to the problem (strategies, tables) and from there to the
choice, without and with tight memory, with the proven gap; and the step time of Megatron-LM's
placements under the same cost model beside the chosen one's. Medians of several runs.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from large_models import LENGTH, ROWS, cpu, model
from record import parser, write

CLUSTER = "16x8xh100"
MESHES = ("tp=8", "dp=8,tp=8")
TIGHT = (0.5, 0.2, 0.05)  # of the way from the least memory to what the fastest choice takes
BLOCKS = "transformer.h.*."
# Column-parallel, then row-parallel; the vocabulary cut.
MEGATRON = {
    BLOCKS + "attn.c_attn.weight": "tp:S(1,3)",
    BLOCKS + "attn.c_attn.bias": "tp:S(0,3)",
    BLOCKS + "attn.c_proj.weight": "tp:S(0)",
    BLOCKS + "attn.c_proj.bias": "tp:R",
    BLOCKS + "mlp.c_fc.weight": "tp:S(1)",
    BLOCKS + "mlp.c_fc.bias": "tp:S(0)",
    BLOCKS + "mlp.c_proj.weight": "tp:S(0)",
    BLOCKS + "mlp.c_proj.bias": "tp:R",
    "transformer.wte.weight": "tp:S(0)",
}
BATCH = {"input:input_ids": "dp:S(0)", "input:labels": "dp:S(0)"}


def annotated(graph: Any, mesh: str, seeds: dict[str, str], *, close: bool) -> Any:
    """The graph with these annotations, propagated. close: the rest replicated."""
    from fxpart.passes import all_passes

    from fxpart.compiler import PassManager

    options = f'mesh="{mesh}",seeds={json.dumps(json.dumps(seeds))}'
    return PassManager(all_passes()).run(
        f"annotate{{{options}}},propagate{{close={str(close).lower()}}}", graph
    )


class Case:
    """One mesh and one number of microbatches."""

    def __init__(self, graph: Any, captured: Any, cluster: Any, mesh: str, microbatches: int):
        self.graph, self.captured, self.cluster = graph, captured, cluster
        self.mesh, self.microbatches = mesh, microbatches

    def problem(self, graph: Any, budget: float) -> Any:
        """The placement problem of an annotated graph."""
        from fxpart.pricing.placements import build

        return build(
            graph, self.captured, self.cluster, budget=budget, microbatches=self.microbatches
        ).problem

    def fixed(self, *, close: bool) -> float:
        """Step seconds of Megatron's placements; not close: the rest as the solver likes."""
        from fxpart.solver.placement.portfolio import solve_placement

        seeds = MEGATRON | (BATCH if "dp" in self.mesh else {})
        graph = annotated(self.graph, self.mesh, seeds, close=close)
        return float(solve_placement(self.problem(graph, 1e18)).seconds)

    def figures(self, runs: int) -> dict[str, Any]:
        """Seconds and gaps."""
        import msgspec

        from fxpart.solver.placement.portfolio import solve_placement

        graph = annotated(self.graph, self.mesh, {}, close=False)
        made, solved = [], []
        for _ in range(runs):
            start = cpu()
            problem = self.problem(graph, 1e18)
            middle = cpu()
            free = solve_placement(problem)
            made.append(middle - start)
            solved.append(cpu() - middle)
        tight = []
        for share in TIGHT:
            budget = free.least + share * (free.bytes - free.least)
            given = msgspec.structs.replace(problem, budget=budget)
            taken = []
            for _ in range(runs):
                start, wall = cpu(), time.perf_counter()
                found = solve_placement(given)
                taken.append((cpu() - start, time.perf_counter() - wall))
            tight.append({
                "memory_share": share,
                "solve_cpu_seconds": round(statistics.median(c for c, _ in taken), 2),
                "solve_wall_seconds": round(statistics.median(w for _, w in taken), 2),
                "step_seconds": round(found.seconds, 4),
                "gap": round(found.gap, 6),
                "solver": found.solver,
            })  # fmt: skip
        sizes = [len(problem.kinds[k].seconds) for k in problem.nodes]
        return {
            "mesh": self.mesh,
            "microbatches": self.microbatches,
            "nodes": len(problem.nodes),
            "edges": len(problem.edges),
            "strategies": sum(sizes),
            "distinct_matrices": len(problem.matrices),
            "build_cpu_seconds": round(statistics.median(made), 2),
            "solve_cpu_seconds": round(statistics.median(solved), 2),
            "step_seconds": round(free.seconds, 4),
            "gap": round(free.gap, 6),
            "tight": tight,
            "megatron_step_seconds": round(self.fixed(close=True), 4),
            "megatron_rest_chosen_step_seconds": round(self.fixed(close=False), 4),
        }


def main() -> None:
    """Capture once, then every mesh."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--runs", type=int, default=3)
    options_parser.add_argument("--layers", type=int, default=96)
    options = options_parser.parse_args()
    import torch
    from fxpart.passes import PREPARE, all_passes

    from fxpart.capture import capture
    from fxpart.cluster.model import Cluster
    from fxpart.compiler import PassManager

    torch.set_num_threads(1)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    captured = capture(model("gpt3-175b", options.layers), None, batch, batch_size=ROWS)
    graph = PassManager(all_passes()).run(PREPARE, captured.graph)
    cluster = Cluster.parse(CLUSTER)
    figures = [
        Case(graph, captured, cluster, mesh, count).figures(options.runs)
        for mesh, count in ((MESHES[0], 1), (MESHES[0], ROWS), (MESHES[1], 1))
    ]
    write("placement", figures, options)


if __name__ == "__main__":
    main()
