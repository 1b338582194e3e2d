"""What every benchmark writes: its figures, the command, and the machine in words without names.

Imported by the benchmarks beside it, not run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results"

# fxpart as it stands in this checkout, and the tests' models.
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests")]


# Options of the run that say nothing of its results; where it keeps what it has is one.
_UNSAID = ("date", "dry", "json", "keep")


def parser(documentation: str | None) -> argparse.ArgumentParser:
    """Options of every benchmark: the date to write, and whether to write the results at all."""
    made = argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--date", default="", help="YYYY-MM-DD, written into the results as it is")
    made.add_argument("--dry", action="store_true", help="print only, keep the results file")
    return made


def write(name: str, figures: Any, options: argparse.Namespace) -> None:
    """Print the figures as one line of JSON and keep them in ``results/NAME.json``."""
    result = {
        "command": f"python tests/benchmarks/{name}.py",
        "date": options.date,
        "machine": machine(),
        "options": {k: v for k, v in vars(options).items() if k not in _UNSAID},
        "figures": figures,
    }
    sys.stdout.write(json.dumps(result) + "\n")
    if not options.dry:
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps(result, indent=1, sort_keys=True)
        (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def resumed(name: str, options: argparse.Namespace, empty: dict[str, Any]) -> dict[str, Any]:
    """The figures to add to: those that were kept if ``options.resume``, else the empty ones."""
    kept = options.resume and (RESULTS / f"{name}.json").exists()
    found: dict[str, Any] = read(name)["figures"] if kept else empty
    return found


def read(name: str) -> dict[str, Any]:
    """What ``write`` kept."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def machine() -> dict[str, Any]:
    """CPU model, cores, load at this moment, and versions."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def cpu_model() -> str:
    """The model name as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor()
