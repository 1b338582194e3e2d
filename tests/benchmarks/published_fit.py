"""Fit the efficiencies that come from training runs, and leave one source out of the fit.

The others of ``costmodels/architectures.toml`` come from kernel measurements and stay. The ranges
are those that kernel measurements allow; the search starts in their middle, so that a parameter
that no run tells anything of stays there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import log
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

from fxpart.costmodels import efficiency
from published_clusters import describe
from published_run import PublishedRun
from published_step import predict_seconds

from fxpart.cluster.presets import device_data

# Least and greatest fractions: matmul and float8 between a half and the best products
# (mamf-finder, kernels.json); attention as far as measured kernels differ.
RANGES = {
    "matmul": (0.5, 0.87), "float8": (0.5, 0.87), "attention_backward": (0.2, 0.6),
    "flash1": (0.2, 0.8), "flash2": (0.4, 1.0),
}  # fmt: skip
STEPS, SWEEPS = 6, 2
Values = dict[str, float]


def predict(runs: Iterable[PublishedRun], values: Mapping[str, Values]) -> list[float]:
    """Return predicted over published time with these efficiencies by architecture."""

    @cache
    def find(model: str) -> efficiency.Efficiency | None:
        found = efficiency.find_efficiency(model)
        if found is None:
            return None
        return replace(found, **values.get(architecture(model), {}))

    with patch("fxpart.costmodels.roofline.find_efficiency", find):
        return [predict_seconds(run) / run.row["measured"]["step_seconds"] for run in runs]


def architecture(model: str) -> str:
    """Return the architecture of a device model."""
    return str(device_data(model)["architecture"])


def fit(runs: Sequence[PublishedRun], name: str) -> Values:
    """Return an architecture's efficiencies with the least mean error, each source counted once.

    A parameter that has no effect on the runs keeps the middle of its range.
    """
    values = {key: (low + high) / 2 for key, (low, high) in RANGES.items()}

    def error(key: str, value: float) -> float:
        return _error(runs, {name: values | {key: value}})

    spans = {
        key: span for key, span in RANGES.items() if error(key, span[0]) != error(key, span[1])
    }
    for sweep in range(SWEEPS):
        for key, (low, high) in spans.items():
            if sweep:  # closer to the value found
                width = (high - low) / STEPS
                low, high = max(low, values[key] - width), min(high, values[key] + width)
            tried = [low + (high - low) * step / STEPS for step in range(STEPS + 1)]
            errors = {value: error(key, value) for value in (values[key], *tried)}
            values[key] = min(errors, key=lambda value: errors[value])
    return values


def _error(runs: Sequence[PublishedRun], values: Mapping[str, Values]) -> float:
    """Return the mean over sources of the mean |log(predicted / published)|."""
    errors: dict[str, list[float]] = defaultdict(list)
    for run, ratio in zip(runs, predict(runs, values), strict=True):
        errors[run.row["source"]].append(abs(log(ratio)))
    return fmean(fmean(found) for found in errors.values()) if errors else 0.0


def leave_one_out(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each source what the fit to the others predicts; first for a fit to all.

    rows: those whose seconds may be compared.
    """
    groups: dict[str, list[PublishedRun]] = defaultdict(list)
    for run in map(describe, rows):
        groups[architecture(run.device.model)].append(run)
    runs = [run for group in groups.values() for run in group]
    whole = {name: fit(group, name) for name, group in sorted(groups.items())}
    found = []
    for source in ("", *dict.fromkeys(run.row["source"] for run in runs)):
        values = dict(whole)
        for name, group in groups.items():
            others = [run for run in group if run.row["source"] != source]
            if len(others) < len(group):
                values[name] = fit(others, name) if others else {}
        ratios = predict(runs, values)
        own = [r for r, run in zip(ratios, runs, strict=True) if run.row["source"] == source]
        found.append(
            {
                "left_out": source,
                "median_error": round(median(abs(r - 1) for r in ratios), 4),
                "own_median": round(median(own) - 1, 4) if own else None,
                "values": values,
            }
        )
    return found
