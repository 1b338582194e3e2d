"""Every reader of files over 100,000 changed files each: what they say, how long and how much.

The figures are, for each reader, how many files were read and refused, the most seconds of the
processor that one took, the most bytes that Python held for reading one of 500, and the most bytes
of the process. A traceback, a second, or more memory than tests/fuzz/driving.py allows ends a
reader with the smallest file that fails. Readers that are named take the place of what was kept of
them; the others stay.

    python tests/benchmarks/fuzz.py [--quick] [--seed N] [--jobs N] [READER ...]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from record import RESULTS, parser, read, write


def main() -> int:
    """Fuzz all readers, or those that are named, each in a process of its own."""
    options = parser(__doc__)
    options.add_argument("readers", nargs="*", help="all by default")
    options.add_argument("--count", type=int, default=100_000, help="files of each reader")
    options.add_argument("--seed", type=int, default=1, help="the tests have 0")
    options.add_argument("--jobs", type=int, default=1, help="readers at once")
    options.add_argument("--quick", action="store_true", help="200 files each, nothing is kept")
    options.add_argument("--own", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    given.count, given.dry = (200, True) if given.quick else (given.count, given.dry)
    if given.own:
        sys.stdout.write(json.dumps(fuzzed(given.readers[0], given.count, given.seed)) + "\n")
        return 0
    from fuzz.readers import READERS

    figures = kept(given, list(READERS))
    del given.own
    names = given.readers or list(READERS)
    with ThreadPoolExecutor(given.jobs) as pool:
        for name, found in zip(names, pool.map(lambda n: child(n, given), names), strict=True):
            # Others may be at the other readers meanwhile.
            figures = kept(given, list(READERS)) if given.readers and not given.dry else figures
            figures["failed"] = sorted({*figures["failed"], name} - ({name} if found else set()))
            figures["readers"].pop(name, None)
            if found:
                figures["readers"][name] = found
                slowest = found["slowest_seconds"]
                print(f"{name:<22} {found['files']:>7} files, {slowest:.3f} s", file=sys.stderr)
            with redirect_stdout(StringIO()):
                write("fuzz", figures, given)  # as far as it has come
    write("fuzz", figures, given)
    return 1 if figures["failed"] else 0


def kept(given: argparse.Namespace, known: Sequence[str]) -> dict[str, Any]:
    """The figures of the readers that are not named, where they are of as many files."""
    figures: dict[str, Any] = {"readers": {}, "failed": []}
    if given.readers and (RESULTS / "fuzz.json").exists():
        before = read("fuzz")
        if all(before["options"][key] == getattr(given, key) for key in ("count", "seed")):
            figures["failed"] = [name for name in before["figures"]["failed"] if name in known]
            found = before["figures"]["readers"]
            figures["readers"] = {name: row for name, row in found.items() if name in known}
    return figures


def child(name: str, given: argparse.Namespace) -> dict[str, Any] | None:
    """A reader's figures from a process of its own; None where it failed, which it said."""
    command = [sys.executable, __file__, "--own", "--dry", name]
    command += ["--count", str(given.count), "--seed", str(given.seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"{name}: failed, exit status {done.returncode}", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def fuzzed(name: str, count: int, seed: int) -> dict[str, Any]:
    """One reader's figures; AssertionError with the smallest file that it fails on."""
    from fuzz.driving import fuzz
    from fuzz.mutations import mutated
    from fuzz.readers import READERS

    reader = READERS[name]
    samples = reader.samples()
    for sample in samples:  # loads what it needs, which would count else
        reader.read(sample.seal(sample.data) if sample.seal else sample.data)
    outcome = fuzz(name, reader.read, samples, count, seed)
    tracemalloc.start()
    for number in range(min(count, 500)):  # apart, as tracing slows reading down
        data = mutated(samples, f"{name}:{seed}:{number}")
        _quietly(reader.read, data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    codes = dict(sorted(outcome.codes.items()))
    return {
        "files": count,
        "read": codes.pop("read", 0),
        "refused": codes,
        "slowest_seconds": round(outcome.slowest, 3),
        "cpu_seconds": round(outcome.seconds, 1),
        "peak_bytes_of_500": peak,
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _quietly(read: object, data: bytes) -> None:
    from fxpart.errors import FxpartError

    assert callable(read)
    try:
        read(data)
    except FxpartError:
        pass


if __name__ == "__main__":
    sys.exit(main())
