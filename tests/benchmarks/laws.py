"""Check the laws of planning on random cases; keep violations with their seeds.

    python tests/benchmarks/laws.py [--cases 500] [--first 10000] [--law NAME ...] [--resume]

Results are written after each case. --resume checks the cases with violations again and then adds
cases to the results. A law that says nothing about a case does not count it as checked. "seeds" has
the first and last seed that a revision checked. Ends with status 1 if a law is violated.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from record import ROOT, parser, resumed, write

PLANNED = "plan"  # the law that a case is planned, or refused where nothing fits


def main() -> int:
    """Check the cases; return 1 if a law is violated."""
    own = parser(__doc__)
    own.add_argument("--cases", type=int, default=500, help="in total")
    own.add_argument("--first", type=int, default=10_000, help="seed of the first case")
    own.add_argument("--law", action="append", help="all by default")
    own.add_argument("--free", action="store_true", help="cases without constraints only")
    own.add_argument("--seconds", type=float, help="start no case after")
    own.add_argument("--resume", action="store_true", help="add to the results that there are")
    own.add_argument("--json", action="store_true", help="print one line of JSON, keep nothing")
    options = own.parse_args()
    options.dry |= options.json
    import torch

    torch.set_num_threads(1)
    figures, start, revision = resumed("laws", options, empty()), time.monotonic(), find_revision()
    for seed in list_seeds(figures, options.first, options.cases):
        if options.seconds is not None and time.monotonic() - start > options.seconds:
            break
        add_case(figures, seed, revision, check_case(seed, options))
        if not options.json:
            with redirect_stdout(StringIO()):
                write("laws", figures, options)  # as far as it has come
    if options.json:
        write("laws", figures, options)
    for law, row in figures["laws"].items():
        found = f"{row['violated']} of {row['checked']} cases violate it"
        sys.stderr.write(f"{law}: {found}, {row['cpu_seconds']:.0f} CPU s\n")
    return 1 if figures["violations"] else 0


def empty() -> dict[str, Any]:
    """The figures of no case."""
    return {"seeds": [], "laws": {}, "violations": []}


def list_seeds(figures: dict[str, Any], first: int, cases: int) -> list[int]:
    """The seeds with violations, which are checked again, and those that were not checked yet."""
    known = {seed for row in figures["seeds"] for seed in range(row["first"], row["last"] + 1)}
    again = [row["seed"] for row in figures["violations"]]
    return again + [seed for seed in range(first, first + cases) if seed not in known]


def add_case(figures: dict[str, Any], seed: int, revision: str, found: dict[str, Any]) -> None:
    """Add what was found of a case, in place of what was found of it before."""
    laws, before = figures["laws"], figures["violations"]
    for row in [row for row in before if row["seed"] == seed]:
        before.remove(row)
        for law in row["checked"]:
            laws[law]["checked"] -= 1
            laws[law]["violated"] -= law in row["found"]
    for law, seconds in found["cpu_seconds"].items():
        row = laws.setdefault(law, {"checked": 0, "violated": 0, "cpu_seconds": 0.0})
        row["checked"] += 1
        row["violated"] += law in found["found"]
        row["cpu_seconds"] = round(row["cpu_seconds"] + seconds, 1)
    if found["found"]:
        checked = list(found["cpu_seconds"])
        before.append(
            {"seed": seed, "case": found["case"], "checked": checked, "found": found["found"]}
        )
    last = figures["seeds"][-1] if figures["seeds"] else {}
    if any(row["first"] <= seed <= row["last"] for row in figures["seeds"]):
        return
    if last and last["revision"] == revision and last["last"] + 1 == seed:
        last["last"] = seed
    else:
        figures["seeds"].append({"first": seed, "last": seed, "revision": revision})


def check_case(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The CPU seconds of each law that says something of the case, and the violations found."""
    from planning_cases import draw_case
    from planning_laws import LAWS, check_law
    from planning_outcomes import attempt

    case = draw_case(seed, constrained=not options.free)
    about = f"{case.shape.family}, {len(case.cluster.devices)} devices, {case.constraints}"
    seconds: dict[str, float] = {}
    found: dict[str, list[str]] = {}
    base = None
    for law in (PLANNED, *(options.law or LAWS)):
        begin = time.process_time()
        try:
            if base is None:
                base, texts = attempt(case), []
            else:
                texts = check_law(law, case, base)
        except Exception as fault:  # any error is a finding
            place = traceback.extract_tb(fault.__traceback__)[-1]
            where = f"{place.filename.removeprefix(f'{ROOT}/')}:{place.lineno}"
            texts = [f"{type(fault).__name__} at {where}: {fault}"]
        if texts is None:
            continue
        seconds[law] = time.process_time() - begin
        if texts:
            found[law] = texts
            sys.stderr.write("".join(f"{law} {seed} ({about}): {text}\n" for text in texts))
        if base is None:
            break
    sys.stderr.write(f"{seed} ({about}): {sum(seconds.values()):.1f} CPU s\n")
    return {"case": about, "cpu_seconds": seconds, "found": found}


def find_revision() -> str:
    """The commit that is checked out; empty outside of a repository."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
