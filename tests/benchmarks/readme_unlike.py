"""The table about unlike devices: ranks under CPU quotas. Imported by readme.py."""

from __future__ import annotations

from record import read

NAME = "heterogeneous_measured"


def unlike(made: str) -> str:
    """Of each cluster and model the chosen plan beside the best that treats its ranks alike."""
    lines = [
        "| model | ranks of one host, under quotas | chosen, predicted | measured"
        " | over the best homogeneous plan, predicted | measured | that plan |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    found = read(NAME)["figures"]
    for row in found["rows"]:
        chosen = row["plans"]["chosen"]
        best, over = min(row["over"].items(), key=lambda item: float(item[1]["measured"]))
        lines.append(
            f"| {row['model']} | {row['cluster']} | {1e3 * chosen['predicted']:.0f} ms"
            f" | {1e3 * chosen['measured']:.0f} ms | {over['predicted']:.2f}"
            f" | **{over['measured']:.2f}** | {best} |"
        )
    words = (
        f"Of {found['ratios']} ratios of throughput over homogeneous plans"
        f" {found['ratios_within_bound']} were predicted within 15 %; the median error of a ratio"
        f" is {100 * found['ratio_median_error']:.0f} %, the worst"
        f" {100 * found['ratio_worst_error']:.0f} %. Below 1: the planner chose a plan that is"
        f" slower than one which treats the ranks alike. {made}"
    )
    return "\n".join([*lines, "", words])
