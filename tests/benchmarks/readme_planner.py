"""Tables about planning: large models, rules of other planners, the max-load problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from record import read


def table(head: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> str:
    """A table whose first column alone is left-aligned."""
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", note])


def planner(note: str) -> str:
    """Models by clusters: price, solution, gap."""
    found = read("planner")["figures"]
    rows = [
        [
            f"{row['model']} ({row['parameters'] / 1e9:,.0f} G, {row['blocks']} blocks)",
            f"`{row['cluster']}`",
            f"{row['price_cpu_seconds']:.1f}",
            f"{row['solve_cpu_seconds']:.1f}",
            gap(row["gap"]) if "gap" in row else row["status"],
            seconds(row.get("step_seconds")),
            str(row.get("stages", "-")),
            str(row.get("microbatches", "-")),
        ]
        for row in found["solved"]
    ]
    head = [
        "model", "cluster", "pricing, CPU s", "solving, CPU s", "gap", "step", "stages",
        "microbatches",
    ]  # fmt: skip
    captures = {row["model"]: row["capture_cpu_seconds"] for row in found["solved"]}
    times: dict[str, list[str]] = {}
    for row in found["shell"]:
        times.setdefault(row["model"], []).append(f"{row['plan_cpu_seconds']:.0f}")
    shell = "; ".join(
        f"{name} {', '.join(each)} (capture {captures[name]:.0f})" for name, each in times.items()
    )
    text = f"`fxpart plan` of what can be trained, with capture, in CPU seconds: {shell}. {note}"
    return table(head, rows, text)


def others(note: str) -> str:
    """Plans by the rules of other planners, on the same costs."""
    found = read("baselines")["figures"]
    names = list(found["models"][0]["ratios"])
    rows = [
        [
            row["model"],
            " + ".join(f"{n:,}" for n in row["devices"]),
            seconds(row["step_seconds"]),
            *(ratio(row["ratios"].get(name)) for name in names),
        ]
        for row in found["models"]
    ]
    return table(["model by formula", "devices", "fxpart", *names], rows, note)


def spaces(note: str) -> str:
    """Plans of the whole space and of a narrower one, on the same prices."""
    rows = [
        [
            row["pair"],
            row.get("narrow", row.get("refused", "").partition(":")[0]),
            seconds(row.get("narrow_seconds")),
            row["whole"],
            seconds(row["whole_seconds"]),
            f"{100 * row['gain']:.1f} %" if "gain" in row else "-",
        ]
        for row in read("spaces")["figures"]["rows"]
    ]
    head = ["model", "narrower space", "step", "whole space", "step", "gain"]
    return table(head, rows, note)


def maxload(note: str) -> str:
    """The published instances."""
    result = read("maxload_optima")["figures"]
    rows = []
    for row in result["published"]:
        dp, free = row["dp"], row["any"]
        proven = "proven" if free["status"] == "optimal" else f"at least {free['lower_bound']:.4f}"
        rows.append([
            f"`{row['name']}`", str(row["nodes"]), f"{dp['objective']:.4f}", dp["status"],
            f"{dp['cpu_seconds']:.1f}", f"{row['cp_sat']['cpu_seconds']:.1f}",
            ratio(others_load(row, "people")), ratio(others_load(row, "pipedream")),
            f"{free['objective']:.4f}", proven,
        ])  # fmt: skip
    head = [
        "instance", "nodes", "chain", "", "DP, CPU s", "CP-SAT, CPU s", "human experts",
        "PipeDream's planner", "any", "",
    ]  # fmt: skip
    every = result["all_eight"]
    times = (
        f"All eight chains: {every['dp_cpu_seconds']:.1f} CPU s by the dynamic program,"
        f" {every['cp_sat_cpu_seconds']:.1f} by CP-SAT."
    )
    return table(head, rows, f"{times} {note}")


def others_load(row: Mapping[str, Any], who: str) -> float | None:
    """Another's load over the optimum."""
    return None if row[who] is None else float(row[who]) / float(row["dp"]["objective"])


def gap(share: float) -> str:
    """A gap as a percentage; what is within rounding is none."""
    return "none" if share < 1e-6 else f"{100 * share:.2g} %"


def ratio(value: float | None) -> str:
    """A ratio, or that there is no such plan."""
    return "-" if value is None else f"{value:.2f}"


def seconds(value: float | None) -> str:
    """A step time, or that there is none."""
    return "nothing fits" if value is None else f"{value:.3g} s"
