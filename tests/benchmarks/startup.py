"""How long the command line takes to say something: CPU seconds, median of several runs.

    python tests/benchmarks/startup.py

``fxpart --help`` and ``fxpart explain plan.json``, each in a fresh process; then both once more to
see whether torch was imported. The bare interpreter is measured beside them.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from record import ROOT, parser, write

CHECK = """
import sys
from fxpart import cli
sys.exit(cli.run(sys.argv[1:]) or "torch" in sys.modules)
"""


def seconds(command: list[str]) -> float:
    """CPU seconds of one process, user and system."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure the three commands in turn."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--runs", type=int, default=5)
    options = options_parser.parse_args()
    import sample_plans

    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        sample_plans.plan().dump(plan)
        commands = {
            "python -c pass": ["-c", "pass"],
            "fxpart --help": ["-m", "fxpart", "--help"],
            "fxpart explain plan.json": ["-m", "fxpart", "explain", str(plan)],
        }
        for command in commands.values():
            seconds(command)  # once for the file cache
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(options.runs):
            for name, command in commands.items():
                taken[name].append(seconds(command))
        torch_free = all(
            subprocess.run(
                [sys.executable, "-c", CHECK, *arguments], stdout=subprocess.DEVNULL, cwd=ROOT
            ).returncode == 0
            for arguments in (["--help"], ["explain", str(plan)])
        )  # fmt: skip
    figures = {
        "cpu_seconds": {name: round(statistics.median(t), 3) for name, t in taken.items()},
        "torch_imported": not torch_free,
    }
    write("startup", figures, options)


if __name__ == "__main__":
    main()
