"""Check the laws of planning on random cases, and print violations with their seeds.

python tests/benchmarks/laws.py --cases 500 --law memory --law space
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from planning_cases import draw_case
from planning_laws import LAWS, check_law
from planning_outcomes import attempt


def main() -> int:
    """Return 1 if a law is violated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--law", action="append", choices=list(LAWS))
    parser.add_argument("--free", action="store_true", help="cases without constraints only")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    laws = given.law or list(LAWS)
    checked: Counter[str] = Counter()
    broken: Counter[str] = Counter()
    start = time.monotonic()
    for seed in range(given.first, given.first + given.cases):
        if time.monotonic() - start > given.seconds:
            break
        case = draw_case(seed, constrained=not given.free)
        try:
            base = attempt(case)
        except Exception as fault:  # any error is a finding
            broken["plan"] += 1
            print(f"plan {seed} {case.constraints}: {fault!r}", flush=True)
            continue
        for law in laws:
            checked[law] += 1
            try:
                found = check_law(law, case, base)
            except Exception as fault:
                place = traceback.extract_tb(fault.__traceback__)[-1]
                found = [f"{type(fault).__name__} at {place.filename}:{place.lineno}: {fault}"]
            broken[law] += bool(found)
            for text in found:
                about = f"{case.shape.family}, {len(case.cluster.devices)} devices"
                print(f"{law} {seed} ({about}, {case.constraints}): {text}", flush=True)
    for law in laws:
        print(f"{law}: {broken[law]} of {checked[law]} cases violate it")
    return 1 if any(broken.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
