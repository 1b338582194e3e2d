"""Write the README's generated blocks: what commands print, and tables of results/*.json.

    python tests/benchmarks/readme.py            (all blocks; --tables for the tables alone)

A block stands between ``<!-- output: NAME -->`` and ``<!-- /output -->``. Outputs come from the
command line itself on examples/gpt2_text.py; tables from what the benchmarks kept.
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
from typing import Any

import readme_asynchronous
import readme_costs
import readme_planner
import readme_runtime
import readme_surviving
from record import HERE, ROOT, parser, read

README = ROOT / "README.md"
TARGET = "examples/gpt2_text.py:workload"
BLOCK = re.compile(r"(?s)(<!-- output: (\w+) -->\n)(.*?)(<!-- /output -->)")


def blocks(text: str) -> dict[str, str]:
    """The generated blocks of a page by name."""
    return {found[2]: found[3] for found in BLOCK.finditer(text)}


def replaced(text: str, contents: Mapping[str, str]) -> str:
    """The page with the contents given in place of the blocks of their names."""
    return BLOCK.sub(lambda m: m[1] + contents.get(m[2], m[3]).strip("\n") + "\n" + m[4], text)


# -- what commands print -------------------------------------------------------------------------


def outputs() -> dict[str, str]:
    """The blocks that show commands: explain and verify."""
    with tempfile.TemporaryDirectory() as folder:
        plan, chosen = str(Path(folder) / "plan.json"), str(Path(folder) / "chosen.json")
        fxpart("plan", TARGET, "--cluster", "local:4", "--fix", "stages=4", "-o", plan)
        fxpart("plan", TARGET, "--cluster", "local:4", "-o", chosen)
        question = ("--without", "3", "--bandwidth", "0.5x")
        return {
            "explain": shown("explain plan.json", fxpart("explain", chosen)),
            "whatif": shown(
                f"whatif plan.json {' '.join(question)}", fxpart("whatif", chosen, *question)
            ),
            "schedule": shown(
                "schedule show zb-h1 --stages 3 --microbatches 4",
                fxpart("schedule", "show", "zb-h1", "--stages", "3", "--microbatches", "4"),
            ),
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


def shown(command: str, text: str) -> str:
    """A command and its output as a code block."""
    return f"```console\n$ fxpart {command}\n{text.strip()}\n```"


# -- tables of results ---------------------------------------------------------------------------


def zoo() -> str:
    """The compatibility table."""
    rows = [
        "| model | parameters | captured by | batch | 2 stages | 4 stages | loss against the module"
        " | gradient | what it tries |",
        "| --- | ---: | --- | --- | --- | --- | ---: | ---: | --- |",
    ]
    result = read("compatibility")
    rows += [zoo_row(row) for row in result["figures"]]
    return "\n".join([*rows, "", made_by(result)])


def zoo_row(row: Mapping[str, Any]) -> str:
    """One model."""
    if "fault" in row:
        return f"| `{row['model']}` | | {row['fault']} | | | | | | {row['note']} |"
    verdicts = [
        (f"({row['stages'][k]}) " if row["stages"][k] != int(k) else "")
        + ("bit-equal" if row["equal"][k] else f"within {row['largest']:.0e}")
        for k in ("2", "4")
    ]
    batch = "symbolic" if row["symbolic_batch"] else "fixed"
    cells = [
        f"`{row['model']}`", f"{row['parameters']:,}", row["capture"], batch, *verdicts,
        difference(row["eager_loss"]), difference(row["eager_gradient"]), row["note"],
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def difference(value: float | None) -> str:
    """A relative difference, or that there is none."""
    return "not run" if value is None else "0" if value == 0 else f"{value:.0e}"


def figures() -> str:
    """The table of figures; each row names its command."""
    rows = ["| what | figure | command |", "| --- | --- | --- |"]
    notes = []
    for name, render in FIGURES.items():
        result = read(name)
        rows += [f"| {what} | {figure} | `{name}.py` |" for what, figure in render(result)]
        notes.append(f"`{name}.py`: {conditions(result)}")
    return "\n".join([*rows, "", "Scripts are in `tests/benchmarks/`. " + "; ".join(notes) + "."])


def overhead(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = result["figures"]
    low, high = min(found["ratios"]), max(found["ratios"])
    return [
        (
            "throughput of fxpart's 1F1B over `torch.distributed.pipelining`'s `Schedule1F1B`, the"
            " same two stages, 2 ranks over gloo",
            f"**{found['ratio']:.2f}** (median of {len(found['ratios'])} pairs, {low:.2f} to"
            f" {high:.2f}); {found['ours_ms']:.0f} and {found['theirs_ms']:.0f} ms a step",
        )
    ]


def tensor_overhead(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = result["figures"]
    wall, cpu, calls = found["wall"], found["cpu"], found["collectives"]
    return [
        (
            "time of a tensor-parallel step over that with DTensor's `parallelize_module`, the"
            f" same {result['options']['layers']} small blocks, {calls['ours']} and"
            f" {calls['theirs']} collectives, 2 ranks over gloo",
            f"**{wall['ratio']:.2f}** (median of {len(wall['ratios'])} pairs,"
            f" {min(wall['ratios']):.2f} to {max(wall['ratios']):.2f}); {wall['ours_ms']:.0f} and"
            f" {wall['theirs_ms']:.0f} ms a step, of CPU time {cpu['ours_ms']:.0f} and"
            f" {cpu['theirs_ms']:.0f} ms ({cpu['ratio']:.2f})",
        )
    ]


def zero(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = result["figures"]

    def memory(row: Mapping[str, Any]) -> str:
        kept, peak = row["kept_bytes"] / 1e6, row["peak_bytes"] / 1e6
        return f"{kept:.0f} MB kept, {peak:.0f} at the peak"

    rows = [(level, found[f"zero{level}"]) for level in (1, 2, 3)]
    return [
        (
            "ZeRO beside torch's `fully_shard`"
            f" ({memory(found['fully_shard'])}), the same small GPT, 2 ranks over gloo",
            "; ".join(
                f"ZeRO-{level}: a step takes **{row['ratio']:.2f}** of its time, {memory(row)}"
                for level, row in rows
            ),
        )
    ]


def placement(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for row in result["figures"]:
        solved = [row, *row["tight"]]
        worst = max(each["gap"] for each in solved)
        slowest = max(each["solve_cpu_seconds"] for each in solved)
        rows.append(
            (
                f"choosing placements of 96 layers of GPT-3 on a mesh {row['mesh']},"
                f" {row['microbatches']} microbatches, memory free and tight",
                f"tables **{row['build_cpu_seconds']:.1f} CPU s**, solved in at most"
                f" {slowest:.2f}, gap at most {100 * worst:.2g} %; step"
                f" {row['step_seconds'] / row['megatron_step_seconds']:.3f} of Megatron's"
                " placements' under the same costs",
            )
        )
    return rows


def propagation_speed(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    row = max(result["figures"].values(), key=lambda found: found["nodes"])
    return [
        (
            f"propagating annotations over {row['nodes']:,} nodes, two axes",
            f"**{row['propagate_s']:.1f} CPU s**",
        )
    ]


def large_models(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (
            f"planning {row['model']} ({row['parameters'] / 1e9:.1f} G parameters, {row['ops']:,}"
            f" ops) for {row.get('devices', 128):,} H100, without its weights",
            f"**{row['compile_cpu_seconds']:.0f} CPU s** (capture"
            f" {row['capture_cpu_seconds']:.0f}), peak {row['peak_rss_gib']:.2f} GiB;"
            f" {row['stages']} stages, {row['microbatches']} microbatches, {row['certificate']}",
        )
        for row in result["figures"]
    ]


def startup(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = result["figures"]["cpu_seconds"]
    torch = "with" if result["figures"]["torch_imported"] else "without"
    return [
        (
            f"a fresh process of `{name}`",
            f"{1e3 * found[name]:.0f} CPU ms, {torch} torch (Python alone"
            f" {1e3 * found['python -c pass']:.0f})",
        )
        for name in found
        if name.startswith("fxpart")
    ]


def pipeline_speed(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = result["figures"]
    step = found["step_ms"]
    return [
        (
            "training step of `examples/gpt2_text.py` on 2 ranks of one thread, against the user's"
            " own loop in one process",
            f"{step['partitioned']:.0f} ms; own loop {step['one thread']:.0f} ms with one thread"
            f" (speed-up **{found['speed_up_over_one_thread']:.2f}**),"
            f" {step['two threads']:.0f} ms with two"
            f" (**{found['speed_up_over_two_threads']:.2f}**)",
        ),
        (
            "the same step as predicted from formulas",
            f"{found['predicted_ms']:.0f} ms predicted, {step['partitioned']:.0f} ms measured:"
            f" {found['predicted_ms'] / step['partitioned']:.2f} of it",
        ),
    ]


FIGURES: dict[str, Callable[[Mapping[str, Any]], list[tuple[str, str]]]] = {
    "overhead": overhead,
    "tensor_overhead": tensor_overhead,
    "zero": zero,
    "propagation_speed": propagation_speed,
    "placement": placement,
    "pipeline_speed": pipeline_speed,
    "large_models": large_models,
    "startup": startup,
}
PLANNING = {"planner": "planner", "others": "baselines", "maxload": "maxload"}  # table: result
COSTED = ("communication", "accuracy", "choice", "memory", "profiling")
COSTS = {name: name for name in COSTED}  # table: result


def planning(name: str) -> str:
    """One of the tables about planning."""
    text: str = getattr(readme_planner, name)(made_by(read(PLANNING[name])))
    return text


def costs(name: str) -> str:
    """One of the tables about predictions and what was measured."""
    text: str = getattr(readme_costs, name)(made_by(read(COSTS[name])))
    return text


# Tables of the results of their names.
RUNTIME = {
    "pipelining": readme_runtime.pipelining,
    "asynchronous": readme_asynchronous.asynchronous,
    "slow_links": readme_asynchronous.slow_links,
}


def runtime(name: str) -> str:
    """One of the tables about the runtime."""
    return RUNTIME[name](made_by(read(name)))


TABLES: dict[str, Callable[[], str]] = {
    "zoo": zoo,
    "figures": figures,
    **{name: partial(planning, name) for name in PLANNING},
    **{name: partial(costs, name) for name in COSTS},
    **{name: partial(runtime, name) for name in RUNTIME},
    "surviving": readme_surviving.surviving,
}


def made_by(result: Mapping[str, Any]) -> str:
    """The command of a result and its conditions."""
    return f"Made by `{result['command']}`: {conditions(result)}."


def conditions(result: Mapping[str, Any]) -> str:
    """The machine and versions of a result, in words."""
    machine = result["machine"]
    date = f"{result['date']}, " if result["date"] else ""
    return (
        f"{date}{machine['cores']} cores of {machine['cpu']}, torch {machine['torch']},"
        f" load {machine['load']}"
    )


def main() -> None:
    """Write the README."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--tables", action="store_true", help="the tables alone")
    options = options_parser.parse_args()
    contents = {} if options.tables else outputs()
    have = {path.stem for path in (HERE / "results").glob("*.json")}
    if "compatibility" in have:
        contents["zoo"] = zoo()
    if have >= set(FIGURES):
        contents["figures"] = figures()
    contents |= {name: planning(name) for name, result in PLANNING.items() if result in have}
    contents |= {name: costs(name) for name, result in COSTS.items() if result in have}
    contents |= {name: runtime(name) for name in RUNTIME if name in have}
    if have & set(readme_surviving.ROWS):
        contents["surviving"] = readme_surviving.surviving()
    text = replaced(README.read_text(encoding="utf-8"), contents)
    if options.dry:
        sys.stdout.write(text)
    else:
        README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
