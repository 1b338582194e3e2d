"""Predicted and measured peaks of tensors, rank by rank, for layouts of all kinds.

    python tests/benchmarks/memory_layouts.py      (--layouts zero,t5 for some; --dry for a try)

Each layout trains some steps in up to four processes over gloo. A preloaded library counts every
byte of torch's allocator, in all threads, with what ops need inside; the plan's prediction was made
before. Nothing is timed: the machine need not be idle. A C compiler is needed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from record import parser, write

MIB = 2**20
RANKS = 4
OVER, UNDER = 0.10, 0.03  # by which a peak may be below its prediction, and above it


@dataclass(frozen=True)
class MemoryLayout:
    """What is trained, and how. rows: of the batch. options: of the trainer.

    annotated: kinds of annotations of layout_models.
    """

    name: str
    model: str
    devices: int
    microbatches: int
    constraints: dict[str, Any]
    rows: int = 16
    options: dict[str, Any] = field(default_factory=dict)
    annotated: tuple[str, ...] = ()


def _layout(
    name: str, model: str, devices: int, microbatches: int, /, *, rows: int = 16,
    options: dict[str, Any] | None = None, annotated: str = "",
    **constraints: Any,
) -> MemoryLayout:  # fmt: skip
    return MemoryLayout(
        name, model, devices, microbatches, constraints, rows, options or {},
        tuple(annotated.split()),
    )  # fmt: skip


_ONE = {"mesh": "none"}
LAYOUTS = (
    _layout("one rank", "gpt2", 1, 2, stages=1, **_ONE),
    _layout("1F1B", "llama", 4, 8, stages=4, schedule="1f1b", **_ONE),
    _layout("GPipe", "bert", 2, 4, stages=2, schedule="gpipe", **_ONE),
    _layout("two branches", "t5", 3, 4, stages=3, schedule="1f1b", **_ONE),
    _layout(
        "full recomputation", "gpt2", 2, 4, stages=2, schedule="1f1b", recompute="full", **_ONE
    ),
    _layout(
        "selective recomputation", "bert", 2, 4, stages=2, schedule="1f1b", recompute="selective",
        **_ONE,
    ),
    _layout("data parallel", "vit", 2, 2, mesh="dp=2", stages=1),
    _layout("data parallel, convolutions", "unet", 2, 2, mesh="dp=2", stages=1),
    _layout("data parallel, tables", "recommender", 2, 2, rows=512, mesh="dp=2", stages=1),
    _layout("tensor parallel", "gpt2", 2, 2, annotated="tensor", mesh="tp=2", stages=1),
    _layout(
        "sequence parallel", "llama", 2, 2, annotated="tensor sequence", mesh="tp=2", stages=1
    ),
    _layout("tensor parallel, solver's placements", "bert", 4, 2, mesh="tp=4", stages=1),
    _layout("context parallel", "llama", 2, 2, mesh="cp=2", stages=1),
    _layout("context and data parallel", "gpt2", 4, 2, mesh="dp=2,cp=2", stages=1),
    _layout("expert parallel", "mixtral", 2, 2, annotated="experts", mesh="ep=2", stages=1),
    _layout(
        "experts over data parallel ranks", "deepseek", 2, 2, mesh="dp=2", ep=2, stages=1
    ),
    _layout("ZeRO 1", "gpt2", 2, 2, mesh="dp=2", stages=1, zero=1),
    _layout("ZeRO 2", "gpt2", 4, 2, mesh="dp=4", stages=1, zero=2),
    _layout("ZeRO 3", "gpt2", 4, 2, mesh="dp=4", stages=1, zero=3),
    _layout(
        "ZeRO 3 gathering ahead", "gpt2", 4, 2, mesh="dp=4", stages=1, zero=3,
        options={"gather_ahead": 1},
    ),
    _layout("hybrid sharding", "llama", 4, 2, mesh="dp=4", stages=1, zero=3, shard_degree=2),
    _layout("ZeRO 1 with recomputation", "llama", 2, 2, mesh="dp=2", stages=1, zero=1,
            recompute="full"),
    _layout("1F1B of data parallel stages", "llama", 4, 4, mesh="dp=2", stages=2, zero=1,
            schedule="1f1b"),
    _layout("1F1B of tensor parallel stages", "gpt2", 4, 4, annotated="tensor", mesh="tp=2",
            stages=2, schedule="1f1b"),
    _layout("ZB-H1", "llama", 2, 4, stages=2, schedule="zb-h1", **_ONE),
    _layout("ZB-H1 of tensor parallel stages", "llama", 4, 4, annotated="tensor", mesh="tp=2",
            stages=2, schedule="zb-h1"),
    _layout("interleaved 1F1B", "gpt2", 2, 4, stages=2, schedule="interleaved", virtual=2, **_ONE),
    _layout("interleaved 1F1B of data parallel stages", "gpt2", 4, 4, mesh="dp=2", stages=2,
            schedule="interleaved", virtual=2),
    _layout("tensor degrees by stage", "llama", 3, 4, tp="1|2", stages=2),
    _layout("replicated stages", "llama", 3, 6, copies="always", stages=2),
    _layout("replicas of data parallel stages", "gpt2", 4, 4, copies="always", stages=1,
            mesh="dp=2", ranks=4),
    _layout("offloaded optimizer", "gpt2", 2, 2, mesh="dp=2", stages=1, zero=1,
            offload="optimizer"),
    _layout("offloaded activations", "llama", 2, 4, stages=2, schedule="1f1b",
            offload="activations", **_ONE),
    _layout("asynchronous", "gpt2", 2, 4, stages=2, mode="async", weights="stash", **_ONE),
    _layout("asynchronous, data parallel stages", "llama", 4, 2, stages=2, mode="async",
            weights="stash", mesh="dp=2"),
    _layout("asynchronous, tensor parallel stages", "llama", 4, 2, stages=2, mode="async",
            weights="spectrain", annotated="tensor", mesh="tp=2"),
)  # fmt: skip


def compiled(layout: MemoryLayout) -> Any:
    """Return the layout's program."""
    import cpu_models
    from layout_models import MODELS as ANNOTATED

    import fxpart

    work = cpu_models.MODELS[layout.model](layout.rows)
    constraints = dict(layout.constraints)
    if layout.annotated:
        found: dict[str, str] = {}
        for kind in layout.annotated:
            found |= getattr(ANNOTATED[layout.model], kind)
        found = {key: text.replace("AXIS", "ep") for key, text in found.items()}
        constraints["annotations"] = json.dumps({"annotations": found})
    given = "example_kwargs" if isinstance(work.example, dict) else "example_inputs"
    example: Any = {given: work.example}
    ahead = layout.options.get("gather_ahead", 0)  # a plan assumes the default, 0 on CPUs
    with mock.patch("fxpart.pricing.live_tensors.blocks_ahead", lambda _: ahead):
        return fxpart.compile(
            work.model, f"local:{layout.devices}", loss=work.loss, check="off",
            microbatches=layout.microbatches, constraints=constraints,
            batch_coupling="per-microbatch", **example,
        )  # fmt: skip


def measure(layout: MemoryLayout, trials: Any, kept: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each rank of a layout. kept: peaks of earlier runs, to which it is added.

    They are used where the ranks of the plan have the same weights.
    """
    program = compiled(layout)
    plan = program.plan
    weights = {str(r): e.memory.weights for e in plan.prediction.ranks for r in e.ranks}
    if kept.get(layout.name, {}).get("weights") != weights:
        trials.options = layout.options
        peaks = trials.run(plan, program.parts, steps=1).peaks
        kept[layout.name] = {"weights": weights, "peaks": peaks}
    peaks = kept[layout.name]["peaks"]
    assert len(peaks) == layout.devices, f"{layout.name}: {len(peaks)} ranks"
    rows = [
        {
            "layout": layout.name, "model": layout.model, "rank": rank, "measured": peaks[rank],
            "predicted": entry.peak or entry.tensors, "bound": entry.tensors,
            "ratio": peaks[rank] / (entry.peak or entry.tensors),
        }
        for entry in plan.prediction.ranks
        for rank in entry.ranks
    ]  # fmt: skip
    return sorted(rows, key=lambda row: row["rank"])


def is_within(row: dict[str, Any]) -> bool:
    """Whether a rank's peak is close to its prediction, and hardly above it."""
    return bool(1 - OVER <= row["ratio"] <= 1 + UNDER)


def main() -> None:
    """All layouts, or those whose names contain a text."""
    made = parser(__doc__)
    made.add_argument("--layouts", default="", help="parts of names, separated by commas")
    made.add_argument("--keep", default="", help="a file of rows, to go on from")
    options = made.parse_args()
    from storage_ranks import counted_ranks

    file = Path(options.keep) if options.keep else None
    kept = json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else {}
    wanted = options.layouts.split(",")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, counted_ranks(RANKS, Path(folder)) as trials:
        for layout in LAYOUTS:
            if not any(part in layout.name for part in wanted):
                continue
            if "rows" not in kept.get(layout.name, {}):
                found = measure(layout, trials, kept)
                kept[layout.name]["rows"] = found
            found = kept[layout.name]["rows"]
            if file:
                file.write_text(json.dumps(kept), encoding="utf-8")
            for row in found:
                sizes = [
                    f"{key} {row[key] / MIB:.2f}" for key in ("measured", "predicted", "bound")
                ]
                line = (
                    f"{row['layout']}, {row['model']}, rank {row['rank']}: {', '.join(sizes)} MiB"
                )
                sys.stderr.write(f"{line}, measured / predicted {row['ratio']:.3f}\n")
            rows += found
    ratios = [row["ratio"] for row in rows]
    names = {row["layout"] for row in rows}
    figures = {
        "rows": rows,
        "layouts": len(names),
        "within": len(names - {row["layout"] for row in rows if not is_within(row)}),
        "least": min(ratios),
        "most": max(ratios),
    }
    write("memory_layouts", figures, options)


if __name__ == "__main__":
    main()
