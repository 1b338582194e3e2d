"""The compatibility table: every model of the zoo on two and four stages, against one process.

    python tests/benchmarks/compatibility.py      (--only gpt2,bert for some)

Each model is captured once and cut twice, by ``Program.replan``; ``Program.verify`` then trains
three AdamW steps both ways and compares every loss, gradient, parameter and buffer. All in one
process; tests/verification/test_single_process.py repeats it with real processes for a dozen of the
models.
"""

from __future__ import annotations

from typing import Any

from record import parser, write

STAGES = (2, 4)


def measure(name: str) -> dict[str, Any]:
    """One row."""
    from zoo import ZOO

    import fxpart

    entry = ZOO[name]
    if not entry.available:
        return {"model": name, "fault": f"needs {entry.needs}", "note": entry.note}
    built = entry.build()
    try:
        whole = fxpart.compile(
            built.model, "local:4", example_inputs=built.batch, loss=built.loss,
            batch_dims=built.batch_dims, microbatches=built.batch_size,
            constraints={"stages": 1, "mesh": "none"},
        )  # fmt: skip
        found = {stages: cut(whole, stages) for stages in STAGES}
    except fxpart.FxpartError as problem:
        return {"model": name, "fault": problem.code, "note": entry.note}
    model, last = whole.plan.model, found[max(STAGES)][0]
    return {
        "model": name,
        "parameters": model.parameters,
        "ops": model.nodes,
        "capture": model.capture,
        "symbolic_batch": model.batch == "symbolic",
        "stages": {str(k): v.stages for k, (v, _) in found.items()},
        "equal": {str(k): v.equal for k, (v, _) in found.items()},
        "passed": all(v.passed for v, _ in found.values()),
        "largest": max(v.largest for v, _ in found.values()),
        "eager_loss": last.eager_loss,
        "eager_gradient": last.eager_gradient,
        "microbatches": last.microbatches,
        "ties": len(found[max(STAGES)][1].plan.ties),
        "skips": sum(b - a > 1 for a, b, _ in found[max(STAGES)][1].plan.stage_edges),
        "note": entry.note,
    }


def cut(whole: Any, stages: int) -> tuple[Any, Any]:
    """The verification on a number of stages (fewer where there are fewer blocks), the program."""
    count = min(stages, whole.plan.model.blocks)
    program = whole.replan(
        "local:4", microbatches=whole.plan.batch_size, constraints={"stages": count, "mesh": "none"}
    )
    return program.verify(steps=3), program


def main() -> None:
    """Measure the models asked for, in the zoo's order."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--only", default="", help="comma-separated names")
    options = options_parser.parse_args()
    import torch
    from zoo import ZOO

    torch.set_num_threads(1)
    wanted = options.only.split(",") if options.only else list(ZOO)
    del options.only
    write("compatibility", [measure(name) for name in wanted], options)


if __name__ == "__main__":
    main()
