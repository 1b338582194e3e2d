"""Step time of data 2 x pipeline with sums that start in the last backward, over sums at the end.

    python tests/benchmarks/overlap.py [--width 384] [--data-only]

Four ranks of one thread over gloo (two stages of two mesh ranks; --data-only: one stage on two
ranks) train a small GPT. One trainer makes both kinds of steps in turn, by ``step`` and by
``backward`` and ``update``, so that a busy machine disturbs both alike; the ratio is the median
over the pairs.
"""

from __future__ import annotations

from record import parser, write


def main() -> None:
    """Measure on ranks of the pool; print and keep the figures."""
    made = parser(__doc__)
    made.add_argument("--width", type=int, default=384)
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--rows", type=int, default=8)
    made.add_argument("--length", type=int, default=64)
    made.add_argument("--microbatches", type=int, default=4)
    made.add_argument("--rounds", type=int, default=15)
    made.add_argument("--data-only", action="store_true", help="one stage on two ranks")
    options = made.parse_args()
    from overlap_models import measure
    from ranks import Pool

    pool = Pool()
    try:
        ranks = 2 if options.data_only else 4
        figures = pool.run(measure, vars(options), ranks=ranks, timeout=600.0)[0]
    finally:
        pool.close()
    write("overlap", figures, options)


if __name__ == "__main__":
    main()
