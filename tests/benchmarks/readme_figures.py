"""Tables of models, and of single figures with their commands. Imported by readme.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from record import read


def made_by(result: Mapping[str, Any]) -> str:
    """The command of a result and its conditions."""
    return f"Made by `{result['command']}`: {conditions(result)}."


def conditions(result: Mapping[str, Any]) -> str:
    """The machine and versions of a result."""
    machine = result["machine"]
    date = f"{result['date']}, " if result["date"] else ""
    return (
        f"{date}{machine['cores']} cores of {machine['cpu']}, torch {machine['torch']},"
        f" load {machine['load']}"
    )


def zoo() -> str:
    """The compatibility table."""
    rows = [
        "| model | parameters | batch | 2 stages | 4 stages | loss against the module"
        " | gradient | what it covers |",
        "| --- | ---: | --- | --- | --- | ---: | ---: | --- |",
    ]
    result = read("compatibility")
    rows += [zoo_row(row) for row in result["figures"]]
    return "\n".join([*rows, "", made_by(result)])


def zoo_row(row: Mapping[str, Any]) -> str:
    """One model."""
    if "fault" in row:
        return f"| `{row['model']}` | | {row['fault']} | | | | | {row['note']} |"
    verdicts = [
        (f"({row['stages'][k]}) " if row["stages"][k] != int(k) else "")
        + ("identical" if row["equal"][k] else f"within {row['largest']:.0e}")
        for k in ("2", "4")
    ]
    batch = "symbolic" if row["symbolic_batch"] else "fixed"
    cells = [
        f"`{row['model']}`", f"{row['parameters']:,}", batch, *verdicts,
        difference(row["eager_loss"]), difference(row["eager_gradient"]), row["note"],
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def difference(value: float | None) -> str:
    """Format a relative difference, if there is one."""
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


def module_check(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    *small, large = sorted(result["figures"], key=lambda row: "124M" in row["model"])
    ratios = sorted(row["check_over_rest"] for row in small)
    slowest = max(small, key=lambda row: row["check_over_rest"])["model"]
    return [
        (
            "time of the check of the captured program against the module, relative to the other"
            " work of `compile()`, for each model of the zoo",
            f"median **{median(ratios):.2f}**, at most {ratios[-1]:.2f} ({slowest})",
        ),
        (
            "the same check of GPT-2 small (124M parameters)",
            f"**{large['check_seconds']:.1f} s**, ratio {large['check_over_rest']:.2f}",
        ),
    ]


def overhead(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = result["figures"]
    low, high = min(found["ratios"]), max(found["ratios"])
    return [
        (
            "throughput of fxpart's 1F1B over `torch.distributed.pipelining`'s `Schedule1F1B`, the"
            " same two stages, 2 ranks over gloo",
            f"**{found['ratio']:.2f}** (median of {len(found['ratios'])} pairs, {low:.2f} to"
            f" {high:.2f}); {found['ours_ms']:.0f} and {found['theirs_ms']:.0f} ms per step",
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
            f" {wall['theirs_ms']:.0f} ms per step, CPU time {cpu['ours_ms']:.0f} and"
            f" {cpu['theirs_ms']:.0f} ms ({cpu['ratio']:.2f})",
        )
    ]


def zero(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = result["figures"]

    def memory(row: Mapping[str, Any]) -> str:
        kept, peak = row["kept_bytes"] / 1e6, row["peak_bytes"] / 1e6
        return f"{kept:.0f} MB resident, {peak:.0f} peak"

    rows = [(level, found[f"zero{level}"]) for level in (1, 2, 3)]
    return [
        (
            "ZeRO compared with torch's `fully_shard`"
            f" ({memory(found['fully_shard'])}), the same small GPT, 2 ranks over gloo",
            "; ".join(
                f"ZeRO {level}: **{row['ratio']:.2f}** of its step time, {memory(row)}"
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
                f"placements of 96 layers of GPT-3 on a mesh {row['mesh']},"
                f" {row['microbatches']} microbatches, ample and tight memory",
                f"problem **{row['build_cpu_seconds']:.1f} CPU s**, solved in at most"
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
            "training step of `examples/gpt2_text.py` on 2 ranks with one thread each, compared"
            " with a plain loop in one process",
            f"{step['partitioned']:.0f} ms; plain loop {step['one thread']:.0f} ms with one thread"
            f" (speed-up **{found['speed_up_over_one_thread']:.2f}**),"
            f" {step['two threads']:.0f} ms with two"
            f" (**{found['speed_up_over_two_threads']:.2f}**)",
        ),
        (
            "the same step, predicted from formulas",
            f"{found['predicted_ms']:.0f} ms predicted, {step['partitioned']:.0f} ms measured:"
            f" ratio {found['predicted_ms'] / step['partitioned']:.2f}",
        ),
    ]


FIGURES: dict[str, Callable[[Mapping[str, Any]], list[tuple[str, str]]]] = {
    "module_check": module_check,
    "overhead": overhead,
    "tensor_overhead": tensor_overhead,
    "zero": zero,
    "propagation_speed": propagation_speed,
    "placement": placement,
    "pipeline_speed": pipeline_speed,
    "large_models": large_models,
    "startup": startup,
}
