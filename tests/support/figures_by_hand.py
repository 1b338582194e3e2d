"""The figures of an explanation, from the plan's JSON alone: the oracle of the report."""

from __future__ import annotations

from typing import Any

# The share of the bubble with as many microbatches as stages or more, and with one microbatch.
FILL = {"gpipe": (1.0, 1.0), "1f1b": (1.0, 1.0), "zb-h1": (1 / 3, 2 / 3), "async": (0.0, 0.0)}
MEMORY = (
    "weights", "gradients", "optimizer", "activations", "buffers", "transfers", "copies", "sums",
)  # fmt: skip
PROCESS = ("process", "allocator", "resident", "host")


def ranks_of(text: str) -> list[int]:
    """Runs as numbers, in other words than the package's."""
    found: list[int] = []
    for part in text.split(","):
        ends = [int(end) for end in part.split("-")]
        found.extend(range(ends[0], ends[-1] + 1))
    return found


def used_devices(raw: dict[str, Any]) -> list[int]:
    """The device of each rank."""
    world = sum(len(ranks_of(stage["ranks"])) for stage in raw["stages"])
    return ranks_of(raw["devices"]) if raw["devices"] else list(range(world))


def recomputed(raw: dict[str, Any]) -> dict[str, Any]:
    """The explanation from the plan's JSON alone."""
    m, prediction, stages = raw["microbatches"], raw["prediction"], raw["stages"]
    pieces = max(max(1, len(s["pieces"])) for s in stages)
    share, alone = FILL.get(raw["schedule"], (1 / pieces, 1.0))
    count = len({entry["stage"] for entry in prediction["ranks"]})
    if m < count:
        share += (alone - share) * (count - m) / (count - 1)
    rows = [row(entry, stages[entry["stage"]], raw) for entry in prediction["ranks"]]
    pace = [(m - share) * r["microbatch_seconds"] + r["step_only_seconds"] for r in rows]
    worst = pace.index(max(pace))
    step = prediction["step_seconds"]
    others = [rejected(o, step) for field in ("alternatives", "changes") for o in raw[field]]
    fitting = [o for o in others if o["closed_form_seconds"] is not None]
    used = [r["total"] / r["limit"] for r in rows]
    fullest = rows[used.index(max(used))]
    entry = prediction["ranks"][used.index(max(used))]
    parts = parts_of(rows[worst], m, step)
    return {
        "model": raw["model"]["name"], "cluster": raw["cluster"]["name"],
        "devices": len(raw["cluster"]["devices"]),
        "ranks": sum(len(ranks_of(s["ranks"])) for s in stages), "stages": len(stages),
        "schedule": raw["schedule"], "virtual": pieces, "microbatches": m,
        "batch_size": raw["batch_size"],
        "step": {
            "step_time": step_time(prediction), "closed_form_seconds": step,
            "source": source(prediction),
            "simulated_seconds": prediction["simulated_seconds"],
            "trial_run_seconds": prediction["rehearsed_seconds"],
            "corrected_seconds": prediction["corrected_seconds"],
            "method": prediction["method"],
            "throughput": throughput(raw, step_time(prediction)),
            "bubble": prediction["bubble"] if prediction["hosts"]  # then by simulation
            else idle(rows, m, prediction["simulated_seconds"]),
            "parts": {"stage": rows[worst]["stage"], **parts},
            "shares": {NAMES[name]: value / step for name, value in parts.items()},
        },
        "bottleneck": bottleneck(rows, pace, parts),
        "fullest": {
            **{key: fullest[key] for key in ("stage", "ranks", "total", "limit", "free")},
            "used": max(used), "parts": fullest["memory"], "workspace": entry["workspace"],
            **{key: fullest[key] for key in ("in_flight", *PROCESS)},
            "host": max(r["host"] for r in rows), "offload": raw.get("offload", "none"),
        },
        "binding": [o for o in others if (o["unfit_slower"] or 0) < 0],
        "next_best": min(fitting, key=lambda o: o["closed_form_seconds"], default=None),
        "rejected": others[: len(raw["alternatives"])],
        "changes": others[len(raw["alternatives"]) :],
        "by_stage": rows, "hosts": [crowded(load) for load in prediction["hosts"]],
        "modes": raw.get("modes", []),
        "asynchrony": asynchrony(raw, rows), "queues": queues(raw, rows),
        "certificate": raw["certificate"], "degrees": raw["degrees"],
        "not_runnable": not_runnable(raw),
    }  # fmt: skip


def queues(raw: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Of one copy alone, which is never without work: as long as its microbatches take in turn."""
    if not raw["staleness"]:
        return None
    (only,) = rows
    assert only["stage"] == 0 and not raw["replicas"]
    seconds = raw["microbatches"] * only["microbatch_seconds"] + only["step_only_seconds"]
    own = raw["staleness"][0]
    return {
        "staleness": [own], "seconds": seconds, "missed": [own],
        "others": {str(s): seconds for s in range(3) if s != own}, "round_robin_seconds": seconds,
    }  # fmt: skip


NAMES = {
    "compute": "computation", "collectives": "collectives within stages",
    "transfers": "transfers between stages", "gathers": "weight all-gather (ZeRO 3)",
    "sums": "gradient reduction", "ties": "tied-parameter gradient reduction",
    "optimizer": "optimizer step",
    "overhead": "runtime overhead", "predictions": "weight prediction", "bubble": "idle",
}  # fmt: skip


def step_time(prediction: dict[str, Any]) -> float:
    """A trial run, or else the corrected simulation, or else the simulation."""
    names = ("rehearsed_seconds", "corrected_seconds", "simulated_seconds")
    return float(next(filter(None, (prediction[name] for name in names)), 0.0))


def source(prediction: dict[str, Any]) -> str:
    """Where the step time comes from."""
    if prediction["rehearsed_seconds"]:
        return "measured in a trial run"
    if prediction["corrected_seconds"]:
        return "simulation, corrected by trial runs of other plans"
    return str(prediction["method"])


def throughput(raw: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Samples/s; where the first input is [batch, sequence] of integers also tokens/s and MFU."""
    rate, inputs, work = raw["batch_size"] / seconds, raw["model"]["inputs"], raw["model"]["work"]
    found: dict[str, Any] = {
        "samples_per_second": rate, "tokens_per_second": None,
        "model_flops": None, "tflops_per_device": None, "mfu": None, "notes": [],
    }  # fmt: skip
    if not inputs or inputs[0]["dtype"] != "int64" or len(inputs[0]["shape"]) != 2:
        return found
    length = inputs[0]["shape"][1]
    if isinstance(length, str) and (work is None or length not in work["sizes"]):
        unknown = f"the sequence length of {inputs[0]['name']} is the symbol {length}."
        found["notes"].append(f"tokens/s is not known: {unknown}")
    else:
        found["tokens_per_second"] = rate * (
            length if work is None else work["sizes"].get(length, length)
        )
    if work is None:
        found["notes"].append(
            "MFU is not known: an earlier version of fxpart made the plan; plan again to count the "
            "model's FLOPs."
        )
        return found
    flops = work["flops"] * raw["batch_size"]
    devices = [raw["cluster"]["devices"][rank] for rank in used_devices(raw)]
    peaks = [device["flops"].get(work["dtype"]) for device in devices]
    found["model_flops"], found["tflops_per_device"] = flops, flops / seconds / len(devices) / 1e12
    if all(peaks):
        found["mfu"] = flops / seconds / sum(peaks)
    else:
        unknown = ", ".join(
            sorted({d["model"] for d, peak in zip(devices, peaks, strict=True) if not peak})
        )
        found["notes"].append(
            f"MFU is not known: {unknown} has no peak FLOP/s for {work['dtype']}."
        )
    return found


def row(entry: dict[str, Any], stage: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """A stage's figures."""
    names = ("forward", "backward", "collective", "gather", "transfer", "sync", "tie", "optimizer",
             "overhead", "predict")  # fmt: skip
    seconds = {f"{name}_seconds": entry[f"{name}_seconds"] for name in names}
    total = sum(entry["memory"][name] for name in MEMORY)
    spans = stage["pieces"] or [[stage["first"], stage["last"]]]
    used = used_devices(raw)
    devices = [raw["cluster"]["devices"][used[rank]] for rank in ranks_of(entry["ranks"])]
    models = sorted({d["model"] for d in devices})
    one = devices[0]["name"] if len(devices) == 1 else f"{len(devices)} {'+'.join(models)}"
    kept = ("data_parallel", "tensor_parallel", "expert_parallel", "context_parallel", "zero",
            "recompute", "label", "parameters")  # fmt: skip
    per = ("forward", "backward", "gather", "transfer")
    return {
        "stage": entry["stage"], "blocks": ",".join(f"{a}-{b}" for a, b in spans),
        "ranks": entry["ranks"], "devices": one, **{name: stage.get(name, 1) for name in kept},
        "shard_degree": stage.get("shard_degree", 0),
        **seconds,
        "microbatch_seconds": sum(entry[f"{name}_seconds"] for name in per),
        "step_only_seconds": sum(
            entry[f"{name}_seconds"] for name in ("sync", "tie", "optimizer", "overhead", "predict")
        ),
        "memory": entry["memory"], "total": total, "limit": entry["memory_limit"],
        "free": entry["memory_limit"] - total,
        **{name: entry.get(name, 0) for name in ("in_flight", "process", "allocator", "host")},
        "resident": resident(entry, total),
    }  # fmt: skip


def resident(entry: dict[str, Any], total: int) -> int:
    """A process with its tensors, of which an update may have more than a pass; 0 if not known."""
    if not entry["process"]:
        return 0
    return int(entry["process"] + entry["allocator"] + max(total, entry["update"]))


def asynchrony(raw: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What a stream gains and costs; None for a plan that drains."""
    if raw["schedule"] != "async":
        return None
    given, m = raw["prediction"], raw["microbatches"]
    seconds, flushed = given["simulated_seconds"], given["flushed_seconds"]
    names = ("stage", "in_flight", "staleness", "predict_seconds")
    return {
        "weights": raw["weights"], "simulated_seconds": seconds, "flushed_seconds": flushed,
        "speedup": flushed / seconds if flushed else None,
        "speedup_bound": (m + max(r["in_flight"] for r in rows) - 1) / m,
        "by_stage": [
            {**{name: entry[name] for name in names}, "copies": entry["memory"]["copies"]}
            for entry in given["ranks"]
        ],
    }  # fmt: skip


def crowded(load: dict[str, Any]) -> dict[str, Any]:
    """A host's curve at as many ranks as the plan has there, and at what its seconds are for.

    A rank sees itself, and of each other one the part of the time that a quota leaves it.
    """
    curve, ranks = load["slowdown"], len(ranks_of(load["ranks"]))
    shares = load["shares"] or [1.0] * ranks
    mean = sum(shares) / ranks

    def at(count: float) -> float:
        last, below = len(curve), int(count)
        if count >= last:
            return curve[-1] * count / last
        return curve[below - 1] + (count - below) * (curve[below] - curve[below - 1])

    return {
        "ranks": load["ranks"], "slowdown": [at(1 + k * mean) for k in range(ranks)],
        "transfer": load["transfer"], "assumed": at(1 + (load["full"] or sum(shares)) - mean),
    }  # fmt: skip


def parts_of(one: dict[str, Any], m: int, step: float) -> dict[str, float]:
    """What the step consists of on the bottleneck."""
    own = one["forward_seconds"] + one["backward_seconds"] - one["collective_seconds"]
    parts = {
        "compute": m * own, "collectives": m * one["collective_seconds"],
        "transfers": m * one["transfer_seconds"], "gathers": m * one["gather_seconds"],
        "sums": one["sync_seconds"], "ties": one["tie_seconds"],
        "optimizer": one["optimizer_seconds"], "overhead": one["overhead_seconds"],
        "predictions": one["predict_seconds"],
    }  # fmt: skip
    return {**parts, "bubble": step - sum(parts.values())}


def idle(rows: list[dict[str, Any]], m: int, step: float) -> float:
    """The share of the ranks' time that is neither computation nor sums."""
    busy = count = 0.0
    for one in rows:
        lanes = len(ranks_of(one["ranks"]))
        work = one["forward_seconds"] + one["backward_seconds"] + one["gather_seconds"]
        busy += lanes * (m * work + one["step_only_seconds"])
        count += lanes
    return max(0.0, 1 - busy / (count * step))


def bottleneck(
    rows: list[dict[str, Any]], pace: list[float], parts: dict[str, float]
) -> dict[str, Any]:
    """The stage that sets the pace."""
    worst = pace.index(max(pace))
    spent = {NAMES[name]: value for name, value in parts.items() if name != "bubble"}
    largest = max(spent, key=lambda name: spent[name])
    rest = [k for k in range(len(rows)) if pace[k] < 0.999 * pace[worst]]
    second = max(rest, key=lambda k: pace[k], default=None)
    return {
        "stage": rows[worst]["stage"], "blocks": rows[worst]["blocks"],
        "ranks": rows[worst]["ranks"], "microbatch_seconds": rows[worst]["microbatch_seconds"],
        "step_only_seconds": rows[worst]["step_only_seconds"], "bound_seconds": pace[worst],
        "balance": max(r["microbatch_seconds"] for r in rows) * len(rows)
        / sum(r["microbatch_seconds"] for r in rows),
        "largest": largest, "largest_share": spent[largest] / sum(spent.values()),
        "as_slow": len(rows) - 1 - len(rest),
        "second": None if second is None else rows[second]["stage"],
        "second_bound_seconds": None if second is None else pace[second],
    }  # fmt: skip


def rejected(other: dict[str, Any], step: float) -> dict[str, Any]:
    """A rejected choice with by how much it is slower."""

    def slower(seconds: float | None) -> float | None:
        return None if seconds is None else seconds / step - 1

    return {
        **{key: value for key, value in other.items() if key != "step_seconds"},
        "closed_form_seconds": other["step_seconds"],
        "slower": slower(other["step_seconds"]),
        "unfit_slower": slower(other["unfit_seconds"]),
    }


def not_runnable(raw: dict[str, Any]) -> list[Any]:
    """One reason for each kind of decision that does not run."""
    degrees = ("data_parallel", "expert_parallel", "zero")
    whole = [len(ranks_of(s["ranks"])) for s in raw["stages"]]
    tensor = {s["tensor_parallel"] for s in raw["stages"]}
    unequal = len(tensor) > 1
    return [
        reason
        for reason, holds in (
            ("differ", len({tuple(s[d] for d in degrees) for s in raw["stages"]}) > 1),
            ("must be 1", unequal and (len(tensor) > 2 or 1 not in tensor)),
            ("equal tensor degrees", unequal and raw["schedule"] == "async"),
            ("virtual stages", unequal and raw.get("virtual", 1) > 1),
            ("replicas", unequal and bool(raw.get("replicas"))),
            ("ZeRO: ", unequal and any(s["zero"] for s in raw["stages"])),
            ("offloading", unequal and raw.get("offload", "none") != "none"),
            ("ZeRO", raw["schedule"] == "async" and any(s["zero"] for s in raw["stages"])),
            ("share", raw["sharding"] is None and max(whole) > 1),
        )
        if holds
    ]
