"""Check fxpart on one GPU: numbers, kernels, times, memory; a JSON file of sessions.

    python tests/gpu/check.py [--output FILE] [--seconds N] [--only KIND[:NAME,...]]

Exits with 1 if training differs from plain PyTorch on the device. Checks of numbers share the
device; measurements run alone. FXPART_CHECK_DEVICE=cpu tries the command without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORKERS = 8
Rows = list[dict[str, Any]]


def environment(threads: int) -> dict[str, str]:
    """Return the environment of a child process."""
    own = [str(ROOT), str(HERE), str(ROOT / "tests" / "support")]
    path = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}


def text(output: str | bytes | None) -> str:
    """Return what a stopped process printed."""
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def rows_of(command: Sequence[str], seconds: float, threads: int = 2) -> Rows:
    """Run a command and return the rows that it printed; what it printed last if it failed."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, cwd=ROOT,
            env=environment(threads), check=False,
        )  # fmt: skip
        code, out, problems = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code, out = 124, text(late.stdout)
        problems = f"stopped after {seconds:.0f} s\n" + text(late.stderr)
    found = [json.loads(line[4:]) for line in out.splitlines() if line.startswith("ROW ")]
    if code or not found:
        last = [line for line in (problems + out).splitlines() if "ROW" not in line][-25:]
        found.append(
            {"name": " ".join(command[1:])[-120:], "rc": code, "passed": False, "output": last}
        )
    for row in found:
        print(json.dumps(row)[:1500], flush=True)
    return found


def listed(script: str) -> list[str]:
    """Return the names of a script's checks."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), "--list"], capture_output=True, text=True, check=True,
        env=environment(1), cwd=ROOT,
    )  # fmt: skip
    return done.stdout.split("\n")[:-1]


def share(names: Sequence[str], parts: int) -> Iterator[list[str]]:
    """Divide names over worker processes."""
    yield from (list(names[i::parts]) for i in range(parts))


def command_rows(seconds: float) -> Rows:
    """Run fxpart's commands and jobs under torchrun."""
    fxpart = [sys.executable, "-m", "fxpart"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    found: Rows = []
    for name, command in {
        "env": [*fxpart, "env"],
        "cluster detect": [*fxpart, "cluster", "detect"],
        "torchrun own 1": [*launch, "1", str(HERE / "launched.py"), "own"],
        "torchrun gloo 2": [*launch, "2", str(HERE / "launched.py"), "gloo"],
        "torchrun own 2": [*launch, "2", str(HERE / "launched.py"), "own"],
        "torchrun nccl 2": [*launch, "2", str(HERE / "nccl_ranks.py")],
    }.items():
        begin = time.perf_counter()
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, cwd=ROOT,
                env=environment(2), check=False,
            )  # fmt: skip
            out = (done.stdout + done.stderr).splitlines()
            keep = [
                x for x in out if x.startswith("ROW ") or "FXP" in x or "why" in x or "fix" in x
            ]
            row = {"name": name, "rc": done.returncode, "output": (keep or out)[:25]}
        except subprocess.TimeoutExpired:
            row = {"name": name, "rc": 124, "output": []}
        row["seconds"] = round(time.perf_counter() - begin, 1)
        print(json.dumps(row)[:1800], flush=True)
        found.append(row)
    return found


def machine() -> dict[str, Any]:
    """Describe the device and the software."""
    import torch

    found: dict[str, Any] = {"date": date.today().isoformat(), "torch": torch.__version__}
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        found["device"] = facts.name
        found["memory"] = facts.total_memory
        found["multiprocessors"] = facts.multi_processor_count
        query = [
            "nvidia-smi",
            "--query-gpu=driver_version,clocks.max.sm,power.limit",
            "--format=csv,noheader",
        ]
        found["driver"] = subprocess.run(
            query, capture_output=True, text=True, check=False
        ).stdout.strip()
    return found


def append_session(path: Path, result: dict[str, Any]) -> None:
    """Add the results to a file of sessions, without the longest lists of each row."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    sessions = known.get("sessions", [])
    for kind in ("numbers", "times"):
        for row in result.get(kind, ()):
            for name in ("host", "ops", "longest", "trace"):
                row.pop(name, None)
    text = json.dumps({"sessions": [*sessions, result]}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def main() -> int:
    """Run everything within the time limit and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", default=str(ROOT / "tests/benchmarks/results/gpu.json"))
    parser.add_argument("--seconds", type=float, default=480.0, help="time limit of all checks")
    parser.add_argument(
        "--only", default="", help="numbers, commands or times; names after a colon"
    )
    given = parser.parse_args()
    if os.environ.get("FXPART_CHECK_DEVICE", "cuda") == "cuda" and "device" not in machine():
        print("torch finds no GPU; FXPART_CHECK_DEVICE=cpu tries the checks on CPUs")
        return 1
    end = time.monotonic() + given.seconds
    result: dict[str, Any] = {"machine": machine()}
    kind, _, chosen = given.only.partition(":")
    wanted = [name for name in chosen.split(",") if name]
    if kind in ("", "numbers"):
        names = wanted or listed("equality.py")
        groups = [g for g in share(names, min(WORKERS, len(names))) if g]
        with ThreadPoolExecutor(WORKERS + 1) as pool:
            rest = pool.submit(command_rows, 60.0) if not kind else None
            left = end - time.monotonic()
            parts = pool.map(
                lambda g: rows_of([sys.executable, str(HERE / "equality.py"), *g], left), groups
            )
            result["numbers"] = [row for part in parts for row in part]
            result["commands"] = rest.result() if rest is not None else []
    if kind == "commands":
        result["commands"] = command_rows(60.0)
    if kind in ("", "times"):
        names = wanted or listed("timings.py")
        left = max(end - time.monotonic(), 10.0)
        result["times"] = rows_of([sys.executable, str(HERE / "timings.py"), *names], left, 8)
    failed = [row["name"] for row in result.get("numbers", []) if not row.get("passed")]
    result["failed"] = failed
    append_session(Path(given.output), result)
    print(f"{len(result.get('numbers', []))} checks of numbers, {len(failed)} failed: {failed}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
