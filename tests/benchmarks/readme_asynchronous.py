"""Tables about asynchronous training. Imported by readme.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from record import RESULTS, read


def asynchronous(made: str) -> str:
    """Asynchronous over synchronous 1F1B, and the share of weight prediction."""
    figures = read("asynchronous")["figures"]
    found = figures["summary"]
    lines = [
        "| stages | microbatches | synchronous | SpecTrain | throughput | (M+K-1)/M | of it"
        " | of what the machine allows | naive, stash | prediction |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(row for case in figures["cases"].items() for row in _steps(*case)),
    ]
    text = (
        f"Two ranks, momentum SGD. Stages of 20 ms or more reach at least"
        f" {found['of_bound_least']:.2f} of the bound, and"
        f" {found['of_allowed_least']:.2f} of what two ranks with shared caches and memory allow."
        f" Weight prediction takes at most {found['prediction_share_most']:.1%} of a step, and"
        f" {found['prediction_beside_naive_most']:.1%} compared with `naive`. {made}{_again()}"
    )
    return "\n".join([*lines, "", text])


def _again() -> str:
    """The result of another run on the same machine while its host was busier, if stored."""
    if not (RESULTS / "asynchronous_busy.json").exists():
        return ""
    cases = read("asynchronous_busy")["figures"]["cases"]
    shares = [row["of_bound"] for rows in cases.values() for row in rows.values()]
    return (
        f" Another run, while the shared host was busier, reached"
        f" {min(shares):.0%} to {max(shares):.0%} of the bound."
    )


def _steps(family: str, rows: Mapping[str, Any]) -> Iterator[str]:
    for microbatches, row in rows.items():
        step, over = row["step_ms"], row["over_sync"]
        stages = "/".join(f"{ms:.0f}" for ms in row["stage_ms"])
        yield (
            f"| {family}, {stages} ms | {microbatches} | {step['flush']:.0f} ms"
            f" | {step['spectrain']:.0f} ms | {over['spectrain']:.2f} | {row['bound']:.2f}"
            f" | {row['of_bound']:.1%} | {row['of_allowed']:.1%}"
            f" | {over['naive']:.2f}, {over['stash']:.2f}"
            f" | {row['prediction']['share']:.1%} |"
        )


def slow_links(made: str) -> str:
    """The asynchronous pipeline against DistributedDataParallel over shaped links."""
    lines = [
        "| processes | links | model | parameters | data parallel | pipeline | speed-up"
        " | f | 1/(1-f) |",
        "| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for ranks, rates in read("slow_links")["figures"].items():
        for rate, found in sorted(rates.items(), key=lambda item: item[1]["mbit"]):
            rows = {name: row for name, row in found.items() if isinstance(row, dict)}
            lines += [_against(ranks, rate, name, row) for name, row in rows.items()]
    text = (
        "*f* is the share of a data-parallel step that only communicates. A balanced pipeline that"
        f" hides all its communication gains at most 1/(1-f). {made}"
    )
    return "\n".join([*lines, "", text])


def _against(ranks: str, rate: str, name: str, row: Mapping[str, Any]) -> str:
    step = row["step_ms"]
    return (
        f"| {ranks} | {rate} | {name} | {row['parameters_mb']:.0f} MB | {step['ddp']:.0f} ms"
        f" | {step['pipeline']:.0f} ms | **{row['speedup']:.2f}** | {row['exposed']:.0%}"
        f" | {row['bound']:.2f} |"
    )
