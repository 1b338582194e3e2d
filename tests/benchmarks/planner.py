"""Planning models that no machine at hand could hold: seconds, gap, and what was chosen.

    python tests/benchmarks/planner.py

GPT-3 175B, a Llama of 70 billion parameters and a mixture of a trillion on the meta device, in
bfloat16, 1536 sequences of 2048 tokens, for 128, 1,024 and 16,384 devices of one type and of two.
Each model has a process of its own that captures it once; for each cluster it is priced and solved
with options of its own for each stage, of which not all can be trained. CPU seconds of one thread.
Then ``fxpart plan``, once for each model and cluster of one type, from the shell, with
capture: CPU seconds and seconds of wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from large_models import model
from record import ROOT, parser, write

from fxpart import Plan

MODELS = {"gpt3": "gpt3-175b", "llama": "llama-70b", "mixture": "moe-1t"}
ONE = ("16x8xh100", "128x8xh100", "2048x8xh100")
TWO = ("8x8xh100+8x8xa100", "64x8xh100+64x8xa100", "1024x8xh100+1024x8xa100")
BATCH, LENGTH = 1536, 2048


def workload(name: str) -> Any:
    """A target for the command line."""
    import torch

    import fxpart

    ids = torch.zeros(8, LENGTH, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    return fxpart.Workload(model(name), example=batch, batch_size=BATCH)


def gpt3() -> Any:
    """GPT-3 175B."""
    return workload("gpt3-175b")


def llama() -> Any:
    """Llama of 70 billion parameters."""
    return workload("llama-70b")


def mixture() -> Any:
    """A mixture of experts of a trillion parameters."""
    return workload("moe-1t")


def measure(name: str) -> list[dict[str, Any]]:
    """Figures of one model on every cluster, in this process."""
    import torch

    from fxpart.planner.degrees import build_joint_problem
    from fxpart.planner.prepared_model import PlanningArguments, prepare_model
    from fxpart.pricing.joint_space import SearchSpace
    from fxpart.solver.joint.objective import degrees, evaluate
    from fxpart.solver.joint.portfolio import solve

    torch.set_num_threads(1)
    start = time.process_time()
    work = workload(name)
    fronts: dict[str, Any] = {}
    rows = []
    for text in (*ONE, *TWO):
        asked = PlanningArguments(work.batch_size, None, None, "auto", {}, 0)
        if not fronts:
            fronts[""] = prepare_model(
                work.model, text, None, (work.example, None), asked, {"loss": None}
            )
            capture = time.process_time() - start
        front = fronts[""]
        request = with_cluster(front.request, text)
        before = time.process_time()
        problem, _ = build_joint_problem(front.graph, front.captured, request, None, SearchSpace())
        priced = time.process_time()
        solution = solve(problem, time_limit=60.0)
        solved = time.process_time()
        row: dict[str, Any] = {
            "model": name,
            "parameters": front.info.parameters,
            "blocks": front.info.blocks,
            "cluster": text,
            "capture_cpu_seconds": round(capture, 1),
            "price_cpu_seconds": round(priced - before, 2),
            "solve_cpu_seconds": round(solved - priced, 2),
            "options": len(problem.options),
            "status": solution.status,
        }
        if solution.choice is not None:
            assert evaluate(problem, solution.choice).feasible
            row |= {
                "step_seconds": solution.objective,
                "bound_seconds": solution.bound,
                "gap": (solution.objective - solution.bound) / solution.objective,
                "stages": len(solution.choice.options),
                "microbatches": solution.choice.microbatches,
                "degrees": sorted({degrees(problem, o) for o in solution.choice.options}),
            }
        rows.append(row)
        sys.stderr.write(json.dumps(rows[-1]) + "\n")
    return rows


def with_cluster(request: Any, text: str) -> Any:
    """The same request for another cluster."""
    from dataclasses import replace

    from fxpart import Cluster

    return replace(request, cluster=Cluster.parse(text))


def shell(function: str, cluster: str) -> dict[str, Any]:
    """``fxpart plan`` from the shell: its seconds, the step, and the size of what it writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "fxpart", "plan", f"{__file__}:{function}",
                   "--cluster", cluster, "-o", str(path)]  # fmt: skip
        before, used = time.perf_counter(), children_seconds()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, env=environment)
        row = {
            "model": MODELS[function],
            "cluster": cluster,
            "plan_wall_seconds": round(time.perf_counter() - before, 1),
            "plan_cpu_seconds": round(children_seconds() - used, 1),
            "plan_bytes": path.stat().st_size,
            "step_seconds": Plan.load(path).prediction.step_seconds,
        }
        sys.stderr.write(json.dumps(row) + "\n")
        return row


def children_seconds() -> float:
    """CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure each model in a process of its own."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--only", choices=MODELS.values(), help=argparse.SUPPRESS)
    options = options_parser.parse_args()
    if options.only:
        sys.stdout.write(json.dumps(measure(options.only)))
        return
    figures: dict[str, Any] = {"solved": [], "shell": []}
    for function, name in MODELS.items():
        command = [sys.executable, __file__, "--only", name]
        found = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        figures["solved"] += json.loads(found.stdout)
        figures["shell"] += [shell(function, cluster) for cluster in ONE]
    del options.only
    write("planner", figures, options)


if __name__ == "__main__":
    main()
