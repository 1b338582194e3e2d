"""The table of GPU runs, from results/gpu.json of `make gpu`. Imported by readme.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from record import RESULTS

WAYS = ("eager", "torch.compile", "fsdp2", "fxpart", "fxpart compiled")
JOBS = {
    "llama": "Llama, 0.9 billion parameters, bf16, 4 x 2,048 tokens",
    "small": "Llama, 3 million parameters, bf16, 8 x 128 tokens",
}


def table() -> str:
    """Return the newest time of each way to train, and what was checked."""
    sessions = json.loads((RESULTS / "gpu.json").read_text(encoding="utf-8"))["sessions"]
    machine = sessions[-1]["machine"]
    times = _newest(sessions, "times")
    lines = [
        f"{machine['device']}, torch {machine['torch']}, {machine['date']}; ms per step (AdamW):",
        "",
        f"| model | {' | '.join(WAYS)} | peak memory, GiB | predicted |",
        f"| --- |{' ---: |' * (len(WAYS) + 2)}",
    ]
    for job, label in JOBS.items():
        found = [times.get(f"{job} {way}", {}).get("ms") for way in WAYS]
        row = times[f"{job} fxpart"]
        predicted = sum(row["predicted_gib"].values())
        cells = ["" if ms is None else f"{ms:.1f}" for ms in found]
        lines.append(f"| {label} | {' | '.join(cells)} | {row['peak_gib']:.2f} | {predicted:.2f} |")
    eager = [row["ms"] for s in sessions for row in s["times"] if row["name"] == "llama eager"]
    note = (
        "Each way has its newest time; those of a row are from two sessions on machines of one "
        f"kind, where eager took {' and '.join(f'{ms:.1f}' for ms in eager)} ms for the first."
    )
    return "\n".join([*lines, "", f"{note} {counts(sessions)}"])


def line() -> str:
    """Return the result for the larger model in one sentence."""
    sessions = json.loads((RESULTS / "gpu.json").read_text(encoding="utf-8"))["sessions"]
    machine, times = sessions[-1]["machine"], _newest(sessions, "times")
    found = {way: times[f"llama {way}"]["ms"] for way in WAYS}
    row = times["llama fxpart"]
    return (
        f"On one {machine['device']} (torch {machine['torch']}, {machine['date']}) a step of a "
        f"Llama of 0.9 billion parameters takes **{found['fxpart']:.0f} ms** (eager "
        f"{found['eager']:.0f}, FSDP2 {found['fsdp2']:.0f}), compiled "
        f"**{found['fxpart compiled']:.0f} ms** (torch.compile "
        f"{found['torch.compile']:.0f}); its peak memory is {row['peak_gib']:.1f} GiB, predicted "
        f"{sum(row['predicted_gib'].values()):.1f}. {counts(sessions)}"
    )


def counts(sessions: list[Mapping[str, Any]]) -> str:
    """Return how many checks of numbers passed, of the newest run of each."""
    rows = list(_newest(sessions, "numbers").values())
    models = [row for row in rows if row["name"].startswith("zoo ")]
    same = sum(row.get("loss") == row.get("weights") == 0.0 for row in models)
    passed = sum(bool(row["passed"]) for row in rows)
    return (
        f"{passed} of {len(rows)} checks against plain PyTorch on the same GPU pass; {same} of "
        f"{len(models)} architectures have the same bits in every loss and weight."
    )


def _newest(sessions: list[Mapping[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    rows = [row for session in sessions for row in session.get(kind, ()) if "error" not in row]
    return {row["name"]: row for row in rows}
