"""Twenty thousand tiny steps over four ranks: memory, descriptors and threads stay what they are.

    python tests/benchmarks/soak.py [--steps 20000]

Once as a pipeline of four stages, once as two stages of two mesh ranks; most steps are plain,
others accumulate, have other shapes, are refused or read the state. Each rank is looked at forty
times; the first quarter is warm-up. Memory may grow by 1 MiB from the second quarter to the last
(by median), Python's objects by 40, descriptors and threads not at all. Ends with status 1 on a
leak.
"""

from __future__ import annotations

import sys
import time

from record import parser, write


def main() -> None:
    """Run both kinds; print and keep what has grown on each rank."""
    made = parser(__doc__)
    made.add_argument("--steps", type=int, default=20_000)
    options = made.parse_args()
    import soak_programs as programs
    from ranks import Pool

    pool, figures, bad = Pool(), {}, []
    try:
        for kind in programs.KINDS:
            begun = time.perf_counter()
            results = programs.run(pool, kind, options.steps, timeout=6 * 3600.0)
            seconds = time.perf_counter() - begun
            bad += [leak for samples in results for leak in programs.leaks(samples)]
            figures[kind] = {
                "steps": options.steps,
                "seconds": round(seconds, 1),
                "growth": [programs.growth(samples) for samples in results],
                "leaks": [programs.leaks(samples) for samples in results],
                "first_and_last": [
                    [samples[len(samples) // 4]._asdict(), samples[-1]._asdict()]
                    for samples in results
                ],
            }
    finally:
        pool.close()
    write("soak", figures, options)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
