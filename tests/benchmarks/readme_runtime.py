"""Tables about the runtime. Imported by readme.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import geometric_mean
from typing import Any

from record import read

SCHEDULES = ("gpipe", "1f1b")


def pipelining(made: str) -> str:
    """fxpart over torch.distributed.pipelining, a row for each family of stages."""
    figures = read("pipelining")["figures"]
    lines = [
        "| ranks | stages | cases | throughput over torch, geometric mean | least"
        " | above the ideal, fxpart, at most | torch, at most |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
        *_rows(figures["ranks"], "cases"),
        *_rows(figures["ranks"], "transfers"),
    ]
    found = figures["summary"]
    whole, large = found["throughput_over_torch"], found["throughput_over_torch_8mb"]
    text = (
        f"Throughput over torch: geometric mean {whole['geometric_mean']:.2f}, least"
        f" {whole['least']:.2f}"
    )
    if large:
        text += f"; boundaries of 8 MB and more {large['geometric_mean']:.2f}"
        text += f" and {large['least']:.2f}"
    sent = found["throughput_over_torch_transfers"]
    if sent:
        least, most = sent["share_of_torch"]
        text += (
            f". Hourglass and bottleneck stages send much and compute little: transfers are"
            f" {least:.0%} to {most:.0%} of torch's step"
        )
    text += (
        ". The ideal is the schedule simulated with the measured stage times and free transfers."
        f" Stages of 20 ms and more are at most {found['above_ideal_20ms_most']:.1%} above it."
        f" An action takes at most {found['us_per_action_most']:.0f} µs beside its computation"
        f" ({_shared(figures['ranks']):.0f} µs where ranks do not share a core)."
        f" A generated stage takes at most {found['emitted_over_eager_most']:.3f} times as long"
        " as the original module."
    )
    again = len(list(_again(figures["ranks"])))
    if again:
        text += f" {again} cases with a ratio near 1 were measured again; the last run counts."
    return "\n".join([*lines, "", f"{text} {made}"])


def data_parallel(made: str) -> str:
    """Data parallelism and ZeRO-3 beside torch's, a row for each pair."""
    result = read("data_parallel")
    figures, options = result["figures"], result["options"]
    lines = [
        "| fxpart | torch | ms per step | throughput over torch, median | quartiles of rounds |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for name, ours, theirs, key, other in (
        ("data_parallel", "`dp=2`", "`DistributedDataParallel`", "dp", "ddp"),
        ("zero3", "`dp=2`, ZeRO 3", "`fully_shard`", "zero3", "fully_shard"),
    ):
        found, ms = figures[name], figures["ms"]
        low, high = found["quartiles"]
        lines.append(
            f"| {ours} | {theirs} | {ms[key]:.0f} and {ms[other]:.0f}"
            f" | **{found['throughput_over_torch']:.2f}** | {low:.2f} to {high:.2f} |"
        )
    text = (
        f"{options['rounds']} rounds of {options['steps']} steps each; a GPT of"
        f" {options['layers']} blocks of width {options['width']}, {options['rows']} rows of"
        f" {options['length']} tokens, AdamW."
    )
    return "\n".join([*lines, "", f"{text} {made}"])


def _again(worlds: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the cases that were measured more than once."""
    for world in worlds.values():
        for cases in (*world["cases"].values(), *world["transfers"].values()):
            for case in cases.values():
                yield from (case[name] for name in SCHEDULES if "earlier" in case[name])


def _shared(worlds: Mapping[str, Any]) -> float:
    """Microseconds of an action at most, where ranks do not share a core."""
    tiny = [case for world in worlds.values() for case in world["tiny"].values()]
    return max(float(case["us_per_action_shared_cores"]["fxpart"]) for case in tiny)


def _rows(worlds: Mapping[str, Any], group: str) -> Iterator[str]:
    for ranks, world in worlds.items():
        for family, cases in world.get(group, {}).items():
            found = [case[name] for case in cases.values() for name in SCHEDULES]
            ratios = [one["throughput_over_torch"] for one in found]
            ours = max(one["above_ideal"] for one in found)
            theirs = max(one["torch_above_ideal"] for one in found)
            yield (
                f"| {ranks} | {family} | {len(found)}"
                f" | {geometric_mean(ratios):.2f} | {min(ratios):.2f}"
                f" | {ours:.0%} | {theirs:.0%} |"
            )


def gloo_threads(made: str) -> str:
    """Steps with gloo's threads at normal and at batch priority."""
    lines = [
        "| model | plan | ranks | normal threads | batch threads | ratio |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in read("gloo_threads")["figures"]["rows"]:
        before, now = (f"{1e3 * row['seconds'][policy]:.0f} ms" for policy in ("other", "batch"))
        lines.append(
            f"| {row['model']} | {row['plan']} | {row['ranks']} | {before} | {now}"
            f" | {row['ratio']:.2f} |"
        )
    return "\n".join([*lines, "", made])
