"""Ten cycles of 4, 3, 2 and 4 ranks in one run: bits, losses, and what a change takes.

    python tests/benchmarks/elastic.py          (--quick: one cycle)

`fxpart train --nproc 2:4 --run DIR` trains, `fxpart scale` asks for each next number. After each
change the ranks save what they have loaded, which is compared with the checkpoint byte by byte
(parameters and optimizer state); all losses of the run are compared with plain torch in one
process. Seconds: of a new plan (found in advance), and from the wish to the first step after it,
processes' start and `import torch` included. Prints one line of JSON.
"""

from __future__ import annotations

import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import HERE, ROOT, write
from record import parser as benchmark_parser

from fxpart.checkpoint.run_directory import RunDir
from fxpart.checkpoint.run_lock import read_launcher_record
from fxpart.elastic.progress import read_ledger_step
from fxpart.elastic.scale_request import request_rank_count
from fxpart.runtime.training_run import ledger

LIMIT = 120.0  # seconds that any change may take on a busy machine
_CHANGE = re.compile(r"(\d+) -> (\d+) ranks in ([\d.]+) s: plan from the cache")


def until(what: str, done: Callable[[], bool], process: subprocess.Popen[str]) -> float:
    """Seconds until it is so."""
    began = time.monotonic()
    while not done():
        if time.monotonic() - began > LIMIT or process.poll() is not None:
            raise SystemExit(f"{what}: not within {LIMIT:g} s; exit status {process.poll()}")
        time.sleep(0.02)
    return time.monotonic() - began


def generations(run: RunDir) -> list[dict[str, Any]]:
    """The lines of generations that began."""
    if not run.generations.exists():
        return []
    lines = [json.loads(x) for x in run.generations.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["line"] == "began"]


def drive(run: RunDir, process: subprocess.Popen[str], cycles: int, each: int) -> list[float]:
    """Change the ranks; the seconds from each wish to the first step after it."""
    until("the first step", lambda: read_ledger_step(run) >= each, process)
    until("plans in advance", lambda: len(list(run.plans.glob("*-*.json"))) == 3, process)
    seconds = []
    for ranks in [3, 2, 4] * cycles:
        before = len(generations(run))
        began = time.monotonic()
        request_rank_count(run, ranks)
        until("a change", lambda before=before: len(generations(run)) > before, process)  # type: ignore[misc]
        line = generations(run)[-1]
        assert line["world"] == ranks, line
        until("a step after a change", lambda at=line["step"]: read_ledger_step(run) > at, process)  # type: ignore[misc]
        seconds.append(time.monotonic() - began)
        until("some steps", lambda at=line["step"]: read_ledger_step(run) >= at + each, process)  # type: ignore[misc]
    return seconds


def measure(cycles: int, each: int, folder: Path) -> dict[str, Any]:
    """One run, and what came of it."""
    import elastic_programs as programs

    run = RunDir(folder / "run")
    command = [
        sys.executable, "-m", "fxpart", "train", f"{HERE / 'elastic_target.py'}:net",
        "--nproc", "2:4", "--run", str(run.path), "--every", "1000000", "--steps", "1000000",
        "-m", "4", "--cost-model", "roofline",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    lines: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        seconds = drive(run, process, cycles, each)
        process.send_signal(signal.SIGTERM)
        status = process.wait(LIMIT)
    except BaseException:
        sys.stderr.write("".join(lines))
        raise
    finally:
        process.kill()
        process.wait()
    reader.join(10)
    assert status == 0 and read_launcher_record(run) is None, (status, lines[-5:])
    plans = [float(found[3]) for line in lines if (found := _CHANGE.search(line))]
    bits = [json.loads(x) for x in (run.path / "bits.jsonl").read_text().splitlines()]
    told = ledger.check_ledger(run.ledger)
    losses = [update.number for update in ledger.read_updates(run.ledger)]
    expected = programs.one_process(len(losses), programs.EPOCH)
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    return {
        "changes": len(seconds),
        "steps": len(losses),
        "ledger_problems": list(told.problems),
        "tensors_compared": sum(line["tensors"] for line in bits),
        "tensors_that_differ": sum(len(line["wrong"]) for line in bits),
        "largest_loss_difference": apart,
        "plans_found_in_advance": len(plans),
        "plan_seconds_most": max(plans, default=None),
        "change_seconds_median": statistics.median(seconds),
        "change_seconds_most": max(seconds),
    }


def main() -> None:
    """Measure and write."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--each", type=int, default=8, help="steps between two changes, at least")
    parser.add_argument("--quick", action="store_true", help="one cycle, and no results file")
    options = parser.parse_args()
    if options.quick:
        options.cycles, options.dry = 1, True
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options.cycles, options.each, Path(folder))
    write("elastic", figures, options)
    good = not figures["tensors_that_differ"] and not figures["ledger_problems"]
    if not good or figures["largest_loss_difference"] > 1e-5:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
