"""Step time of measured runs from their layers' profiles: the composition without the op model."""

from __future__ import annotations

from math import log2
from typing import Any

GRADIENT_BYTES = 4  # everything was float32


class Network:
    """Bandwidth of links as fitted by the source: a polynomial in log2(bytes / 1e6), in GB/s."""

    def __init__(self, data: dict[str, Any]) -> None:
        """data: "network" of the file."""
        self._data = data

    def bandwidth(self, size: float, coefficients: list[Any]) -> float:
        """Return bytes/s of a message of ``size`` bytes."""
        (c2, c1, c0), most = coefficients
        x = log2(max(size, 1.0) / 1e6)
        # a parabola beyond its fitted range would turn: bounded by the largest measured value
        return float(min(max((c2 * x * x + c1 * x + c0) * 1e9, 1e7), most))

    def between(self, gpu: str, ranks: int) -> list[Any]:
        """Return the coefficients of links between hosts of this kind, several ranks at once."""
        table = self._data["all"]["inter"].get(gpu) or {}
        fits = sorted(table, key=lambda n: (abs(int(n) - ranks), n))
        return list(table[fits[0]])


def reason_to_skip(run: dict[str, Any], data: dict[str, Any]) -> str:
    """Return why a run cannot be predicted; "" if it can."""
    try:
        return _reason(run, data)
    except (AttributeError, LookupError, TypeError, ValueError) as unknown:
        return f"the run cannot be read: {type(unknown).__name__}"


def _reason(run: dict[str, Any], data: dict[str, Any]) -> str:
    places = [at for stage in run["stages"] for at in stage["replicas"]]
    kinds = {at["gpu"] for at in places}
    if run["model"] == "GPT-Neo-2.7" and "GH-96" in kinds:
        return "its profile is a copy of another model's (anomaly a of the file)"
    if sum(stage["layers"] for stage in run["stages"]) != _layers(run, data):
        return "its stages do not have the layers of the model"
    if len({stage["dp"] for stage in run["stages"]}) > 1:
        return "its stages have unequal numbers of replicas"
    for at in places:
        sizes = data["layers"].get(run["model"], {}).get(at["gpu"], {})
        if not any(int(n) >= run["microbatch"] and str(at["tp"]) in t for n, t in sizes.items()):
            return f"no profile of {run['model']} on {at['tp']} {at['gpu']}"
        if len(places) > 1 and not data["network"]["all"]["inter"].get(at["gpu"]):
            return f"no network of {at['gpu']}"
    return ""


def _layers(run: dict[str, Any], data: dict[str, Any]) -> int:
    """Return the layers of a model with its embedding and head."""
    tables = data["layers"].get(run["model"], {}).values()
    found = [one["layers"] for sizes in tables for t in sizes.values() for one in t.values()]
    return max(found, default=sum(stage["layers"] for stage in run["stages"]))


def predict(run: dict[str, Any], data: dict[str, Any]) -> float:
    """Return the predicted step time of a 1F1B pipeline of replicas, without ZeRO."""
    network = Network(data["network"])
    model, size = run["model"], run["microbatch"]
    config = data["models"][model]
    dp = run["stages"][0]["dp"]
    microbatches = run["global_batch"] // (size * dp)
    hidden = config["hidden_size"]
    message = float(size * config["sequence_length"] * hidden * 4)
    stages = len(run["stages"])
    pipelines: list[float] = []
    for replica in range(dp):
        times = [
            _stage(run, data, index, replica, index == 0, index == stages - 1)
            for index in range(stages)
        ]
        moves = [  # each rank of a tensor group sends its part, all over the host's card
            message / network.bandwidth(message, network.between(a["gpu"], a["tp"]))
            for a in (stage["replicas"][replica] for stage in run["stages"][:-1])
        ]
        slowest = max(f + b for f, b in times)
        fill = sum(f + b for f, b in times) + 2 * sum(moves)
        waits = 2 * max(moves, default=0.0)
        pipelines.append(fill + (microbatches - 1) * (slowest + waits))
    last = max(_synchronize(run, data, index, network) for index in range(stages))
    return max(pipelines) + last


def _stage(
    run: dict[str, Any], data: dict[str, Any], index: int, replica: int, first: bool, last: bool
) -> tuple[float, float]:
    """Return the forward and backward seconds of a stage's microbatch in one replica."""
    stage = run["stages"][index]
    at = stage["replicas"][replica]
    found = _profile(run, data, at)
    blocks = stage["layers"] - first - last
    ahead, back, _ = (blocks * t for t in found["block_median"])
    for part in ("embedding",) * first + ("head",) * last:
        ahead, back = ahead + found[part][0], back + found[part][1]
    return ahead, back


def _profile(run: dict[str, Any], data: dict[str, Any], at: dict[str, Any]) -> dict[str, Any]:
    """Return the profile at the run's microbatch.

    Where a larger microbatch took less, the measurement is noise or waits for the host, which the
    profile's hooks slow down: the line through the next two sizes replaces it, if it is less.
    """
    table = data["layers"][run["model"]][at["gpu"]]
    sizes = sorted((int(n) for n, found in table.items() if str(at["tp"]) in found))
    larger = [n for n in sizes if n >= run["microbatch"]]
    rows = [table[str(n)][str(at["tp"])] for n in larger]
    return {
        part: [_smooth(larger, times) for times in zip(*(r[part] for r in rows), strict=True)]
        for part in ("embedding", "block_median", "head")
    }


def _smooth(sizes: list[int], times: tuple[float, ...]) -> float:
    """Return the first size's time."""
    least = min(times)
    if len(sizes) < 3 or times[0] <= least or times[2] <= times[1]:
        return least
    slope = (times[2] - times[1]) / (sizes[2] - sizes[1])
    return min(least, max(0.0, times[1] - slope * (sizes[1] - sizes[0])))


def _synchronize(run: dict[str, Any], data: dict[str, Any], index: int, network: Network) -> float:
    """Return the seconds of a stage's gradient all-reduce between hosts, and of its update."""
    stage = run["stages"][index]
    config = data["models"][run["model"]]
    hidden = config["hidden_size"]
    dp = stage["dp"]
    update = max(
        stage["layers"] * _profile(run, data, at)["block_median"][2] for at in stage["replicas"]
    )
    if dp == 1:
        return update
    ends = (index == 0) + (index == len(run["stages"]) - 1)
    weights = (stage["layers"] - ends) * 12 * hidden * hidden
    weights += min(1, ends) * config["vocab_size"] * hidden
    took = []
    for at in stage["replicas"]:
        # the bandwidth is that of all ranks of the host together, each with its own part
        piece = weights * GRADIENT_BYTES / at["tp"] / dp
        rate = network.bandwidth(piece, network.between(at["gpu"], at["tp"])) / at["tp"]
        took.append(2 * (dp - 1) * piece / rate)
    return update + max(took)
