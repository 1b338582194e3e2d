"""What the module check adds to compile(): the zoo, and GPT-2 small.

    python tests/benchmarks/module_check.py      (--only gpt2,bert for some; --repeat 3)

Each model is compiled without and with the check in turn, in one process, and the medians are
compared. "checks" is the time of the check over the rest of compile().
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from record import parser, write

LARGE = "gpt2-small (124M)"


def small_gpt2() -> Any:
    """GPT-2 small with its published sizes and random weights, 8 rows of 128 tokens."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    from zoo_entry import Built

    torch.manual_seed(0)
    ids = torch.randint(50257, (8, 128))
    return Built(
        GPT2LMHeadModel(GPT2Config()), {"input_ids": ids, "labels": ids}, loss=None, batch_size=8
    )


def measure(name: str, build: Callable[[], Any], repeat: int) -> dict[str, Any]:
    """One row: seconds of compile() without and with the check."""
    import fxpart

    seconds: dict[str, list[float]] = {"off": [], "auto": []}
    status = None
    built = build()
    for _ in range(repeat):
        for check, kept in seconds.items():
            begin = time.perf_counter()
            program = fxpart.compile(
                built.model, "local:2", example_inputs=built.batch, loss=built.loss,
                batch_dims=built.batch_dims, microbatches=1, check=check,
                constraints={"stages": 2, "mesh": "none"},
            )  # fmt: skip
            kept.append(time.perf_counter() - begin)
            status = program.plan.check
    without, whole = median(seconds["off"]), median(seconds["auto"])
    return {
        "model": name,
        "compile_seconds": without,
        "check_seconds": whole - without,
        "check_over_rest": (whole - without) / without,
        "status": "" if status is None else status.status,
    }


def main() -> None:
    """Measure the models asked for."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--only", default="", help="comma-separated names")
    options_parser.add_argument("--repeat", type=int, default=3, help="compiles of each kind")
    options = options_parser.parse_args()
    import torch
    from zoo import ZOO

    torch.set_num_threads(1)
    models = {name: entry.build for name, entry in ZOO.items() if entry.available}
    models[LARGE] = small_gpt2
    wanted = options.only.split(",") if options.only else list(models)
    del options.only
    write("module_check", [measure(n, models[n], options.repeat) for n in wanted], options)


if __name__ == "__main__":
    main()
