"""Tables about the runtime. Imported by readme.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from record import read


def pipelining(made: str) -> str:
    """fxpart over torch.distributed.pipelining, and what a step has above its ideal."""
    figures = read("pipelining")["figures"]
    lines = [
        "| ranks | stages | boundary | schedule | fxpart | torch | throughput over torch"
        " | fxpart above the ideal | torch |",
        "| ---: | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
        *_rows(figures["ranks"], "cases"),
        *_rows(figures["ranks"], "transfers"),
    ]
    found = figures["summary"]
    whole, large = found["throughput_over_torch"], found["throughput_over_torch_8mb"]
    eager = found["emitted_over_eager_most"]
    text = (
        f"Throughput over torch: geometric mean {whole['geometric_mean']:.2f}, least"
        f" {whole['least']:.2f}"
    )
    if large:
        text += f"; with 8 MB and more {large['geometric_mean']:.2f} and {large['least']:.2f}"
    sent = found["throughput_over_torch_transfers"]
    if sent:
        least, most = sent["share_of_torch"]
        text += (
            f"; hourglass and bottleneck, whose stages have much to send and little to compute"
            f" (transfers are {least:.0%} to {most:.0%} of torch's step),"
            f" {sent['geometric_mean']:.2f} and {sent['least']:.2f}"
        )
    text += (
        f". *Above the ideal*: over the schedule simulated with the stage times of the run and free"
        f" transfers; with stages of 20 ms and more at most {found['above_ideal_20ms_most']:.1%}"
        f" (where they have much to send as the table says). An action of"
        f" tiny stages takes at most {found['us_per_action_most']:.0f} µs"
        f" beside its computation ({_shared(figures['ranks']):.0f} where ranks that share a core"
        f" are not expected to compute at once); the emitted module takes at most {eager:.3f} of"
        f" the user's own in eager."
    )
    again = list(_again(figures["ranks"]))
    if again:
        text += f" Measured again, the ratio before, and the one that counts: {'; '.join(again)}."
    text += f" {made}"
    return "\n".join([*lines, "", text])


def _again(worlds: Mapping[str, Any]) -> Iterator[str]:
    """The cases that were measured more than once, and how far the last ratio is known."""
    for ranks, world in worlds.items():
        for family, cases in (*world["cases"].items(), *world["transfers"].items()):
            for size, case in cases.items():
                for schedule in ("gpipe", "1f1b"):
                    one = case[schedule]
                    if "earlier" in one:
                        over = one["throughput_over_torch"]
                        ratios = ", ".join(f"{before:.3f}" for before in one["earlier"])
                        known = f"{over:.3f} ± {over * one['unsure']:.3f}"
                        yield f"{family} {size}, {schedule}, {ranks} ranks {ratios}, {known}"


def _shared(worlds: Mapping[str, Any]) -> float:
    """Microseconds of an action at most, by the ideal on the cores that there are."""
    tiny = [case for world in worlds.values() for case in world["tiny"].values()]
    return max(float(case["us_per_action_shared_cores"]["fxpart"]) for case in tiny)


def _rows(worlds: Mapping[str, Any], group: str) -> Iterator[str]:
    for ranks, world in worlds.items():
        for family, cases in world.get(group, {}).items():
            for size, case in cases.items():
                for schedule in ("gpipe", "1f1b"):
                    one = case[schedule]
                    step = one["step_ms"]
                    yield (
                        f"| {ranks} | {family}, {size} | {case['boundary_mb']:.2f} MB | {schedule}"
                        f" | {step['fxpart']:.1f} ms | {step['torch']:.1f} ms"
                        f" | {one['throughput_over_torch']:.2f}"
                        f" | {one['above_ideal']:.1%} | {one['torch_above_ideal']:.1%} |"
                    )


def gloo_threads(made: str) -> str:
    """Steps with gloo's threads as they come, and as batch threads."""
    lines = [
        "| model | plan | ranks | as they come | batch threads | ratio |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in read("gloo_threads")["figures"]["rows"]:
        before, now = (f"{1e3 * row['seconds'][policy]:.0f} ms" for policy in ("other", "batch"))
        lines.append(
            f"| {row['model']} | {row['plan']} | {row['ranks']} | {before} | {now}"
            f" | {row['ratio']:.2f} |"
        )
    return "\n".join([*lines, "", made])
