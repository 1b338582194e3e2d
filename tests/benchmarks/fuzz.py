"""Every reader of files over 100,000 changed files each: what they say, how long and how much.

The figures are, for each reader, how many files were read and refused, the most seconds of the
processor that one took, and the most bytes that its reading added to the process. A traceback, a
second, or more memory than tests/fuzz/driving.py allows ends it with the smallest file that fails.

    python tests/benchmarks/fuzz.py [--quick] [--seed N] [READER ...]
"""

from __future__ import annotations

import resource
import sys
import tracemalloc

from record import parser, write


def main() -> int:
    """Fuzz all readers, or those that are named."""
    options = parser(__doc__)
    options.add_argument("readers", nargs="*", help="all by default")
    options.add_argument("--count", type=int, default=100_000, help="files of each reader")
    options.add_argument("--seed", type=int, default=1, help="the tests have 0")
    options.add_argument("--quick", action="store_true", help="200 files each, nothing is kept")
    given = options.parse_args()
    from fuzz.driving import fuzz
    from fuzz.mutations import mutated
    from fuzz.readers import READERS

    given.count, given.dry = (200, True) if given.quick else (given.count, given.dry)
    figures, failed = {}, []
    for name in given.readers or READERS:
        reader = READERS[name]
        samples, count = reader.samples(), max(20, int(given.count * reader.share))
        try:
            outcome = fuzz(name, reader.read, samples, count, given.seed)
        except AssertionError as fault:
            failed.append(name)
            print(fault, file=sys.stderr)
            continue
        tracemalloc.start()
        for number in range(min(count, 500)):  # apart, as tracing slows reading down
            data = mutated(samples, f"{name}:{given.seed}:{number}")
            _quietly(reader.read, data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        codes = dict(sorted(outcome.codes.items()))
        figures[name] = {
            "files": count,
            "read": codes.pop("read", 0),
            "refused": codes,
            "slowest_seconds": round(outcome.slowest, 3),
            "cpu_seconds": round(outcome.seconds, 1),
            "peak_bytes_of_500": peak,
        }
        print(f"{name:<22} {count:>7} files, slowest {outcome.slowest:.3f} s", file=sys.stderr)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    write("fuzz", {"readers": figures, "failed": failed, "process_peak_bytes": most}, given)
    return 1 if failed else 0


def _quietly(read: object, data: bytes) -> None:
    from fxpart.errors import FxpartError

    assert callable(read)
    try:
        read(data)
    except FxpartError:
        pass


if __name__ == "__main__":
    sys.exit(main())
