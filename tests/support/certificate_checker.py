"""Costs and bounds of joint problems recomputed from their JSON, without the package's formulas.

A problem is small enough that all its choices are enumerated here. Weights of an asynchronous
pipeline are stashed: a stage keeps every version that a microbatch in flight has used.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from math import ceil, comb, inf
from typing import Any

Json = dict[str, Any]
# Bubble with at least as many microbatches as stages, and with one: shares of the sum of times.
FILL = {"gpipe": (1, 1), "1f1b": (1, 1), "zb-h1": (1 / 3, 2 / 3), "async": (0, 0)}
ZERO = {"optimizer": 1, "gradient": 2, "weight": 3}  # the level that divides each kind of bytes


def recompute(problem: Json, choice: Json) -> tuple[float, list[int]] | None:
    """Return the step time and the peak bytes of each stage; None for a choice without costs."""
    count, m, virtual = len(choice["options"]), choice["microbatches"], choice["virtual"]
    starts, blocks = choice["starts"], len(problem["blocks"])
    pieces = [range(a, b) for a, b in zip(starts, [*starts[1:], blocks], strict=True)]
    stages = []
    for s, index in enumerate(choice["options"]):
        option = problem["options"][index]
        rows = -(-problem["batch"] // (m * option["data"])) if m * option["data"] <= (
            problem["batch"]
        ) else 0  # fmt: skip
        work = next(
            (
                work for work in problem["works"]
                if all(work[key] == option[key] for key in ("pool", "layout", "recompute"))
                and work["rows"] == rows
            ),
            None,
        )  # fmt: skip
        if work is None:
            return None
        flying = in_flight(choice["schedule"], m, count, s, virtual)
        copies = stashed(m, count - s) if choice["schedule"] == "async" else 0
        stages.append(stage(problem, option, work, pieces[s::count], m, flying, copies))
    fill, alone = FILL.get(choice["schedule"], (1 / virtual, 1))
    if fill and m < count:
        fill += (alone - fill) * (count - m) / (count - 1)
    seconds = fill * sum(t for t, _, _ in stages)
    seconds += max((m - fill) * t + once for t, once, _ in stages)
    return seconds, [total for _, _, total in stages]


def in_flight(schedule: str, m: int, count: int, s: int, virtual: int) -> int:
    """Return the microbatches of which a stage stores activations at once."""
    left = count - s
    if schedule == "async":
        return left
    if schedule == "interleaved":
        return min(m, ceil((2 * (left - 1) + (virtual - 1) * count + 1) / virtual))
    return {"gpipe": m, "1f1b": min(m, left), "zb-h1": min(m, count)}[schedule]


def stashed(m: int, left: int) -> int:
    """Return the most versions besides the newest, of ``left`` microbatches in flight.

    Microbatch j runs forward after j - left + 1 backwards, each m of which make a version.
    """

    def version(j: int) -> int:
        return max(0, j - left + 1) // m

    most = 0
    for j in range(4 * m * (left + 1)):
        flying = {version(k) for k in range(max(0, j - left + 1), j + 1)}
        most = max(most, len(flying | {version(j)}) - 1)
    return most


def stage(
    problem: Json, option: Json, work: Json, pieces: list[range], m: int, flying: int, copies: int
) -> tuple[float, float, int]:
    """Return seconds per microbatch, seconds per step and peak bytes of one stage."""
    layout, pool = problem["layouts"][option["layout"]], problem["pools"][option["pool"]]
    blocks = [block for piece in pieces for block in piece]
    kinds = [problem["kinds"][block] for block in blocks]
    own = [t for t, tie in enumerate(problem["ties"]) if set(tie["blocks"]) & set(blocks)]
    shards = option.get("shard_degree", 0)
    groups = [(layout["dense"], shards or option["data"], "reduce", "gather", own)]
    if layout["experts"]:
        shared = option["data"] // layout["expert"]
        groups.append((layout["experts"], shared, "reduce_experts", "gather_experts", []))
    kept = dict.fromkeys(ZERO, 0)
    reduce = gather = optimizer = 0.0
    for state, replicas, reducing, gathering, ties in groups:
        size = {
            name: sum(state[name][k] for k in kinds) + sum(layout[f"tie_{name}"][t] for t in ties)
            for name in ZERO
        }
        for name, level in ZERO.items():
            kept[name] += ceil(size[name] / (replicas if option["zero"] >= level else 1))
        unsent = sum(state["unsent"][k] for k in kinds) if state["unsent"] else 0
        reduce += line(option[reducing], size["gradient"] - unsent)
        if option["zero"] == 3 or size["gradient"]:
            gather += line(option[gathering], size["weight"])
        step = sum(state["step"][option["pool"]][k] for k in kinds)
        optimizer += step / (replicas if option["zero"] else 1)
    moved, stored, computed = messages(problem, pieces, work["rows"])
    per_microbatch = sum(work["forward"][k] + work["backward"][k] for k in kinds)
    per_microbatch += sum(times * line(pool["transfer"], size) for size, times in moved)
    per_microbatch += 2 * gather if option["zero"] == 3 else 0.0
    apart = [t for t in own if not set(problem["ties"][t]["blocks"]) <= set(blocks)]
    once = reduce + optimizer + (gather if option["zero"] in (1, 2) else 0.0)
    once += (m + 1) * sum(line(pool["transfer"], layout["tie_gradient"][t]) for t in apart)
    work_space = max(work["workspace"][k] for k in kinds)
    if option["zero"] == 3:
        work_space += max(sum(state["weight"][k] for state, *_ in groups) for k in kinds)
    total = kept["weight"] * (1 + copies) + kept["gradient"] + kept["optimizer"]
    total += flying * (sum(work["activation"][k] for k in kinds) + computed + stored)
    total += work_space + sum(layout["buffer"][k] for k in kinds)
    return per_microbatch, once, total


def line(cost: Json, size: int) -> float:
    """Return the seconds of a message."""
    return float(cost["latency"] + cost["inverse"] * size) if size > 0 else 0.0


def messages(
    problem: Json, pieces: list[range], rows: int
) -> tuple[list[tuple[int, int]], int, int]:
    """Return (bytes, times) of received values, and bytes stored: sent ones, and computed again."""
    moved, stored, computed = [], 0, 0
    for piece, value in product(pieces, problem["boundaries"]):
        size = value["row_bytes"] * rows + value["fixed_bytes"]
        used = any(block in piece for block in value["consumers"])
        if value["producer"] < piece.start and used:
            if value["sent"]:
                moved.append((size, 2 if value["gradient"] else 1))
                stored += size * value["widened"]
            else:
                computed += size
        elif value["producer"] in piece and value["consumers"][-1] >= piece.stop:
            stored += 0 if value["saved"] else size * value["widened"]
    return moved, stored, computed


def is_allowed(problem: Json, choice: Json) -> bool:
    """Return whether a choice satisfies all constraints but memory."""
    starts, options, count = choice["starts"], choice["options"], len(choice["options"])
    cuts = {start - 1 for start in starts[1:]}
    used = [0] * len(problem["pools"])
    kinds = set()
    for option in (problem["options"][index] for index in options):
        layout = problem["layouts"][option["layout"]]
        used[option["pool"]] += option["data"] * layout["tensor"]
        tensor = layout["tensor"] // layout["context"]
        shards = option.get("shard_degree", 0)
        kinds.add(
            (option["data"], tensor, layout["expert"], option["zero"], layout["context"], shards)
        )
    homes = [
        (sum(start <= b for start in starts) - 1) % count for b in range(len(problem["blocks"]))
    ]
    return (
        all(n <= pool["devices"] for n, pool in zip(used, problem["pools"], strict=True))
        and not cuts & set(problem["no_cut_after"])
        and cuts >= set(problem["cut_after"])
        and (len(kinds) == 1 or not problem["uniform"])
        and all(
            homes[block] == pin["stage"] % count and -count <= pin["stage"] < count
            for pin in problem["pins"]
            for block in range(pin["first"], pin["last"] + 1)
        )
    )


def list_choices(problem: Json) -> Iterator[Json]:
    """Yield every choice of a problem, allowed or not."""
    blocks = len(problem["blocks"])
    for schedule in problem["schedules"]:
        for virtual in problem["virtual"] if schedule == "interleaved" else (1,):
            for count in range(problem["min_stages"], problem["max_stages"] + 1):
                for cuts, options, m in product(
                    combinations(range(1, blocks), count * virtual - 1),
                    product(range(len(problem["options"])), repeat=count),
                    problem["microbatches"],
                ):
                    yield {
                        "schedule": schedule, "virtual": virtual, "microbatches": m,
                        "starts": [0, *cuts], "options": list(options),
                    }  # fmt: skip


def count_choices(problem: Json) -> int:
    """Return how many choices there are."""
    blocks, options = len(problem["blocks"]), len(problem["options"])
    return len(problem["microbatches"]) * sum(
        comb(blocks - 1, count * virtual - 1) * options**count
        for schedule in problem["schedules"]
        for virtual in (problem["virtual"] if schedule == "interleaved" else (1,))
        for count in range(problem["min_stages"], problem["max_stages"] + 1)
    )


def fits(problem: Json, choice: Json, totals: list[int]) -> bool:
    """Return whether each stage fits its device."""
    pools = (problem["pools"][problem["options"][o]["pool"]] for o in choice["options"])
    return all(total <= pool["memory"] for total, pool in zip(totals, pools, strict=True))


def find_optimum(problem: Json) -> float:
    """Return the shortest step of all choices; infinity where none fits."""
    best = inf
    for choice in filter(lambda one: is_allowed(problem, one), list_choices(problem)):
        found = recompute(problem, choice)
        if found is not None and found[0] < best and fits(problem, choice, found[1]):
            best = found[0]
    return best
