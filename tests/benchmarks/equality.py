"""Every schedule against one process: the whole zoo in one process, six models over gloo.

    python tests/benchmarks/equality.py [--models gpt2,bert] [--skip-zoo] [--go-on]

In process: each model of the zoo on each schedule, as tests/runtime/test_schedules_equality.py
checks it. Over gloo: six models on each schedule at 2 and 4 ranks, and data 2 x pipeline 2; losses,
parameters and buffers of all ranks are those of the same program in one process, bit for bit (1e-6
with replicas), and that passes `verify` against the unpartitioned model (where replicas do not in
float32, in float64). A code such as FXP202 says
that the model has too few blocks for the schedule's pieces. With --go-on, what an earlier run has
kept is not repeated. Ends with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping

from record import parser, read, write

PLACES = ((2, "none"), (4, "none"), (2, "dp=2"))


def zoo(schedules: list[str]) -> dict[str, str]:
    """Each model and schedule: "equal", or what happened."""
    import pytest
    from runtime.test_schedules_equality import check
    from zoo import ZOO

    found = {}
    for name in ZOO:
        for schedule in schedules:
            try:
                check(name, schedule)
                found[f"{name} {schedule}"] = "equal"
            except pytest.skip.Exception as why:
                found[f"{name} {schedule}"] = f"skipped: {why}"
            except Exception as failure:
                found[f"{name} {schedule}"] = f"{type(failure).__name__}: {failure}"[:300]
    return found


def main() -> None:
    """Run all; print and keep what was equal and what was not."""
    made = parser(__doc__)
    made.add_argument("--models", default="")
    made.add_argument("--skip-zoo", action="store_true")
    made.add_argument("--go-on", action="store_true")
    options = made.parse_args()
    from equality_programs import MODELS, compared
    from ranks import Pool

    from fxpart.schedule.spec import SCHEDULES

    schedules = [name for name, b in SCHEDULES.items() if b.build and b.trains and b.flushes]
    begun = time.perf_counter()
    before = read("equality")["figures"] if options.go_on else {}
    inside: dict[str, str] = before.get("in process") or {}
    if not inside and not options.skip_zoo:
        inside = zoo(schedules)
    over: dict[str, str] = before.get("over gloo", {})
    keep(inside, over, begun, options)
    pool = Pool()
    try:
        for name in options.models.split(",") if options.models else MODELS:
            for schedule in [*schedules, "found"]:
                for stages, mesh in PLACES:
                    key = f"{name} {schedule} {stages} stages, mesh {mesh}"
                    if over.get(key, "").startswith(("equal", "FXP202")):
                        continue
                    over[key] = compared(pool, name, schedule, stages, mesh)
                    sys.stderr.write(f"{key}: {over[key]}\n")
                keep(inside, over, begun, options)
            wrong = keep(inside, over, begun, options)
    finally:
        pool.close()
    sys.exit(1 if wrong else 0)


def keep(
    inside: Mapping[str, str], over: Mapping[str, str], begun: float, options: argparse.Namespace
) -> dict[str, str]:
    """Write down what is known so far; what was not equal."""
    wrong = {
        key: value
        for key, value in {**inside, **over}.items()
        if not value.startswith(("equal", "skipped", "FXP202"))
    }
    figures = {
        "counted": {
            "in process": Counter(value[:40] for value in inside.values()),
            "over gloo": Counter(value[:40] for value in over.values()),
        },
        "in process": inside,
        "over gloo": over,
        "models over gloo": sorted({key.split()[0] for key in over}),
        "not equal": wrong,
        "too few blocks": sorted(key for key, value in over.items() if value == "FXP202"),
        "seconds": round(time.perf_counter() - begun, 1),
    }
    write("equality", figures, options)
    return wrong


if __name__ == "__main__":
    main()
