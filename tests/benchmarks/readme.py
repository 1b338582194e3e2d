"""Write the generated blocks of README and pages: outputs of commands, tables of results/*.json.

    python tests/benchmarks/readme.py            (all blocks; --tables for the tables alone)

A block stands between ``<!-- output: NAME -->`` and ``<!-- /output -->`` on one of :data:`PAGES`.
Outputs come from the command line on examples/gpt2_text.py, tables from the results of the
benchmarks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import readme_asynchronous
import readme_costs
import readme_failures
import readme_figures
import readme_gpu
import readme_heterogeneous
import readme_planner
import readme_runtime
import readme_summary
from readme_figures import made_by
from record import HERE, ROOT, parser, read

PAGES = (ROOT / "README.md", ROOT / "fxpart" / "docs" / "benchmarks.md", HERE / "RESULTS.md")
TARGET = "examples/gpt2_text.py:workload"
BLOCK = re.compile(r"(?s)(<!-- output: (\w+) -->\n)(.*?)(<!-- /output -->)")


def blocks(text: str) -> dict[str, str]:
    """The generated blocks of a page by name."""
    return {found[2]: found[3] for found in BLOCK.finditer(text)}


def replaced(text: str, contents: Mapping[str, str]) -> str:
    """The page with the contents given in place of the blocks of their names."""
    return BLOCK.sub(lambda m: m[1] + contents.get(m[2], m[3]).strip("\n") + "\n" + m[4], text)


# -- outputs of commands -------------------------------------------------------------------------


def outputs() -> dict[str, str]:
    """The blocks that show outputs of commands: explain and verify."""
    with tempfile.TemporaryDirectory() as folder:
        plan, chosen = str(Path(folder) / "plan.json"), str(Path(folder) / "chosen.json")
        fxpart("plan", TARGET, "--cluster", "local:4", "--fix", "stages=4", "-o", plan)
        fxpart("plan", TARGET, "--cluster", "local:4", "-o", chosen)
        return {
            "explain": shown("explain plan.json", some(fxpart("explain", chosen))),
            "verify": shown(
                f"verify {TARGET} --plan plan.json", fxpart("verify", TARGET, "--plan", plan)
            ),
        }


def fxpart(*arguments: str) -> str:
    """stdout of the command line, 100 columns wide."""
    environment = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "fxpart", *arguments], cwd=ROOT, env=environment, check=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return done.stdout


# Headings of the sections of `fxpart explain` that the README shows.
_SOME = ("Stages",)


def some(text: str) -> str:
    """The beginning of the output of explain, and some of its sections."""
    first, *parts = text.strip().split("\n\n")
    return "\n\n".join([first, *(part for part in parts if part.startswith(_SOME))])


def shown(command: str, text: str) -> str:
    """A command and its output as a code block."""
    return f"```console\n$ fxpart {command}\n{text.strip()}\n```"


# -- tables of results ---------------------------------------------------------------------------


PLANNING = {
    "planner": "planner",
    "others": "baselines",
    "spaces": "spaces",
    "maxload": "maxload_optima",
}  # table: result
COSTED = ("communication", "accuracy", "choice", "memory", "memory_layouts", "profiling")
COSTS = {name: name for name in COSTED}  # table: result


def planning(name: str) -> str:
    """One of the tables about planning."""
    text: str = getattr(readme_planner, name)(made_by(read(PLANNING[name])))
    return text


def costs(name: str) -> str:
    """One of the tables about predictions and measurements."""
    text: str = getattr(readme_costs, name)(made_by(read(COSTS[name])))
    return text


# Tables of the results of their names.
RUNTIME = {
    "pipelining": readme_runtime.pipelining,
    "data_parallel": readme_runtime.data_parallel,
    "gloo_threads": readme_runtime.gloo_threads,
    "asynchronous": readme_asynchronous.asynchronous,
    "slow_links": readme_asynchronous.slow_links,
}


def runtime(name: str) -> str:
    """One of the tables about the runtime."""
    return RUNTIME[name](made_by(read(name)))


TABLES: dict[str, Callable[[], str]] = {
    "zoo": readme_figures.zoo,
    "figures": readme_figures.figures,
    **{name: partial(planning, name) for name in PLANNING},
    **{name: partial(costs, name) for name in COSTS},
    **{name: partial(runtime, name) for name in RUNTIME},
    "failures": readme_failures.failures,
    "quotas": lambda: readme_heterogeneous.quotas(made_by(read(readme_heterogeneous.NAME))),
    "clusters": lambda: readme_heterogeneous.clusters(made_by(read(readme_heterogeneous.CLUSTERS))),
    "large_tables": lambda: readme_heterogeneous.large_tables(
        made_by(read(readme_heterogeneous.TABLES))
    ),
    "queued": lambda: readme_heterogeneous.queues(made_by(read("queued"))),
    "gpu": readme_gpu.table,
    "gpu_line": readme_gpu.line,
    "summary": readme_summary.summary,
}


def tables() -> dict[str, str]:
    """The tables of the results that exist."""
    have = {path.stem for path in (HERE / "results").glob("*.json")}
    needs = {
        "zoo": {"compatibility"}, "figures": set(readme_figures.FIGURES),
        **{name: {result} for name, result in (PLANNING | COSTS).items()},
        **{name: {name} for name in RUNTIME}, "quotas": {readme_heterogeneous.NAME},
        "clusters": {readme_heterogeneous.CLUSTERS}, "queued": {"queued"}, "gpu": {"gpu"},
        "large_tables": {readme_heterogeneous.TABLES},
        "gpu_line": {"gpu"},
    }  # fmt: skip
    return {name: make() for name, make in TABLES.items() if needs.get(name, set()) <= have}


def main() -> None:
    """Write the pages."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--tables", action="store_true", help="the tables alone")
    options = options_parser.parse_args()
    contents = tables() | ({} if options.tables else outputs())
    for page in PAGES:
        text = replaced(page.read_text(encoding="utf-8"), contents)
        if options.dry:
            sys.stdout.write(text)
        else:
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
