"""Tables about heterogeneous devices: clusters, ranks with quotas. Imported by readme.py."""

from __future__ import annotations

from collections import Counter
from statistics import geometric_mean

from heterogeneous_measured import over_best
from record import read

NAME, CLUSTERS, TABLES = "heterogeneous_measured", "heterogeneous", "heterogeneous_tables"
_MORE = 1.005  # of the best of one kind: what counts as faster


def clusters(made: str) -> str:
    """By model, the simulated plan for a whole cluster and the best for each device type."""
    lines = [
        "| model | clusters | slower than one type | as fast | faster | largest gain"
        " | fit no type alone | use one type | planning, CPU s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    found = read(CLUSTERS)["figures"]
    for model in dict.fromkeys(row["model"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["model"] == model and "fault" not in row]
        ratios = [row["over_best"] for row in rows if row["over_best"] is not None]
        faster = [ratio for ratio in ratios if ratio > _MORE]
        worse = sum(name.startswith(f"{model} on ") for name in found["slower_than_one_kind"])
        chosen = Counter(len(set(row["devices"])) == 1 for row in rows)
        seconds = [row["planning_cpu_seconds"] for row in rows]
        lines.append(
            f"| {model} | {len(rows)} | {worse} | {len(ratios) - len(faster) - worse}"
            f" | {len(faster)} | {max(ratios):.2f} | {len(rows) - len(ratios)} | {chosen[True]}"
            f" | {geometric_mean(seconds):.0f}, at most {max(seconds):.0f} |"
        )
    return "\n".join([*lines, "", f"By simulation on rates from data sheets. {made}"])


def queues(made: str) -> str:
    """Seconds of a minibatch by replicas and staleness, simulated and measured."""
    lines = [
        "| replicas of each stage | staleness | simulated | measured | ratio"
        " | round-robin, simulated |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    rows = read("queued")["figures"]["rows"]
    for row in rows:
        copies, stale = (", ".join(map(str, row[key])) for key in ("counts", "staleness"))
        lines.append(
            f"| {copies} | {stale} | {1e3 * row['simulated']:.0f} ms"
            f" | {1e3 * row['measured']:.0f} ms | {row['simulated'] / row['measured']:.2f}"
            f" | {1e3 * row['turns']:.0f} ms |"
        )
    errors = sorted(abs(row["error"]) for row in rows)
    words = (
        f"The median error is {100 * errors[len(errors) // 2]:.0f} %, the worst"
        f" {100 * errors[-1]:.0f} %. {made}"
    )
    return "\n".join([*lines, "", words])


def large_tables(made: str) -> str:
    """By cluster, the selected plan of a recommender and the best plan on devices of one kind."""
    lines = [
        "| ranks of one host, with CPU quotas | selected, predicted | measured"
        " | best plan of one kind | gain over it, predicted | measured |",
        "| --- | ---: | ---: | --- | ---: | ---: |",
    ]
    found = read(TABLES)["figures"]
    for row in found["rows"]:
        chosen = row["plans"]["chosen"]
        gains = {
            label: each for label, each in row["over"].items() if not label.startswith("equal")
        }
        same = {"predicted": 1.0, "measured": 1.0}
        gains |= dict.fromkeys((k for k in row["chosen_is"] if not k.startswith("equal")), same)
        best, gain = min(gains.items(), key=lambda item: item[1]["measured"])
        lines.append(
            f"| {row['cluster']} | {1e3 * chosen['predicted']:.0f} ms"
            f" | {1e3 * chosen['measured']:.0f} ms | {best}{', selected' * (gain is same)}"
            f" | {gain['predicted']:.2f} | **{gain['measured']:.2f}** |"
        )
    loads = " and ".join(f"{row['load']:.0f}" for row in found["rows"])
    words = (
        f"{found['ratios_within_bound']} of {found['ratios']} throughput ratios were predicted"
        f" within 15 %; the worst error of a step is {100 * found['step_worst_error']:.0f} %."
        f" Other work was running, with loads of {loads}."
        f" {made}"
    )
    return "\n".join([*lines, "", words])


def quotas(made: str) -> str:
    """By cluster and model, the selected plan and the best homogeneous plan."""
    lines = [
        "| model | ranks of one host, with CPU quotas | selected, predicted | measured"
        " | gain over the best homogeneous plan, predicted | measured | that plan |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    found = read(NAME)["figures"]
    for row in found["rows"]:
        chosen = row["plans"]["chosen"]
        best, measured = over_best(row)
        predicted = 1.0 if best in row["chosen_is"] else row["over"][best]["predicted"]
        lines.append(
            f"| {row['model']} | {row['cluster']} | {1e3 * chosen['predicted']:.0f} ms"
            f" | {1e3 * chosen['measured']:.0f} ms | {predicted:.2f}"
            f" | **{measured:.2f}** | {best}{', selected' * (best in row['chosen_is'])} |"
        )
    words = (
        f"{found['ratios_within_bound']} of {found['ratios']} throughput ratios were predicted"
        f" within 15 %; median error {100 * found['ratio_median_error']:.0f} %, worst"
        f" {100 * found['ratio_worst_error']:.0f} %. Errors of steps:"
        f" {100 * found['step_median_error']:.0f} % and"
        f" {100 * found['step_worst_error']:.0f} %. Below 1 the planner selected a plan that is"
        f" slower than a homogeneous one. {made}"
    )
    return "\n".join([*lines, "", words])
