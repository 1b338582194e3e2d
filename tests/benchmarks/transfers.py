"""Random schedules of every sort over gloo on four ranks, with tiny and with 8 MB tensors.

    python tests/benchmarks/transfers.py [--count 200] [--shared-memory]

Every value and gradient that comes to a stage is compared with the number that it must be; the
schedules are those of tests/support/transfer_programs.py. Ends with an error at the first that is
wrong.
"""

from __future__ import annotations

import time
from collections import Counter

from record import parser, write

SIZES = {"tiny": 5, "8 MB": 2 << 20}


def main() -> None:
    """Run all cases of both sizes; print and keep how many transfers were checked."""
    made = parser(__doc__)
    made.add_argument("--count", type=int, default=200, help="schedules of each size")
    made.add_argument("--shared-memory", action="store_true", help="the runtime's way on one host")
    options = made.parse_args()
    import transfer_programs as programs
    from ranks import Pool

    pool, figures = Pool(), {}
    try:
        for name, elements in SIZES.items():
            total, begun = Counter[str](), time.perf_counter()
            for first in range(0, options.count, 20):
                seeds = list(range(first, min(first + 20, options.count)))
                arguments = (seeds, elements, options.shared_memory)
                for found in pool.run(programs.run, *arguments, ranks=4, timeout=600.0):
                    total += Counter(found)
            figures[name] = {
                "schedules": options.count,
                "values checked": total["F"],
                "gradients checked": total["B"],
                "transfers": total["transfers"],
                "seconds": round(time.perf_counter() - begun, 1),
            }
    finally:
        pool.close()
    write("transfers", figures, options)


if __name__ == "__main__":
    main()
