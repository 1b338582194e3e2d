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

from record import parser, write

MIB = 2**20
RANKS = 4


@dataclass(frozen=True)
class MemoryLayout:
    """What is trained, and how. rows: of the batch. options: of the trainer."""

    name: str
    model: str
    devices: int
    microbatches: int
    constraints: dict[str, Any]
    rows: int = 16
    options: dict[str, Any] = field(default_factory=dict)
    annotated: tuple[str, ...] = ()
    optimizer: str = "adamw"


def _layout(
    name: str, model: str, devices: int, microbatches: int, /, *, rows: int = 16,
    options: dict[str, Any] | None = None, annotated: str = "", optimizer: str = "adamw",
    **constraints: Any,
) -> MemoryLayout:  # fmt: skip
    return MemoryLayout(
        name, model, devices, microbatches, constraints, rows, options or {},
        tuple(annotated.split()), optimizer,
    )  # fmt: skip


_ONE = {"mesh": "none"}
LAYOUTS = (
    _layout("one rank", "gpt2", 1, 2, stages=1, **_ONE),
    _layout("1F1B", "llama", 4, 8, stages=4, schedule="1f1b", **_ONE),
    _layout("GPipe", "bert", 2, 4, stages=2, schedule="gpipe", **_ONE),
    _layout("two branches", "t5", 3, 4, stages=3, schedule="1f1b", **_ONE),
    _layout("full recomputation", "gpt2", 2, 4, stages=2, schedule="1f1b", recompute="full", **_ONE),
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
    return fxpart.compile(
        work.model, f"local:{layout.devices}", loss=work.loss, microbatches=layout.microbatches,
        constraints=constraints, check="off", optimizer=layout.optimizer,
        batch_coupling="per-microbatch", **example,
    )  # fmt: skip


def measure(layout: MemoryLayout, trials: Any) -> list[dict[str, Any]]:
    """Return a row for each rank of a layout."""
    program = compiled(layout)
    plan = program.plan
    trials.options = layout.options
    peaks = trials.run(plan, program.parts, steps=1).peaks
    assert len(peaks) == layout.devices, f"{layout.name}: {len(peaks)} ranks"
    rows = []
    for entry in plan.prediction.ranks:
        for rank in entry.ranks:
            predicted = entry.peak or entry.tensors
            rows.append({
                "layout": layout.name, "model": layout.model, "rank": rank, "stage": entry.stage,
                "predicted": predicted, "bound": entry.tensors, "measured": peaks[rank],
                "error": predicted / peaks[rank] - 1,
                "parts": {k: getattr(entry.memory, k) for k in entry.memory.__struct_fields__},
                "update": entry.update, "in_flight": entry.in_flight,
                "workspace": entry.workspace,
            })  # fmt: skip
    return sorted(rows, key=lambda row: row["rank"])


def say(row: dict[str, Any]) -> None:
    """One line for a person."""
    parts = " ".join(f"{k[:4]}={v / MIB:.1f}" for k, v in row["parts"].items() if v)
    sys.stderr.write(
        f"{row['layout'][:40]:40s} {row['model']:11s} rank {row['rank']}: measured "
        f"{row['measured'] / MIB:7.2f} predicted {row['predicted'] / MIB:7.2f} {row['error']:+.1%}"
        f" bound {row['bound'] / MIB:.2f} update {row['update'] / MIB:.2f} "
        f"fl={row['in_flight']} ws={row['workspace'] / MIB:.2f} {parts}\n"
    )


def main() -> None:
    """All layouts, or those whose names contain a text."""
    made = parser(__doc__)
    made.add_argument("--layouts", default="", help="parts of names, separated by commas")
    options = made.parse_args()
    from storage_ranks import counted_ranks

    wanted = options.layouts.split(",")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, counted_ranks(RANKS, Path(folder)) as trials:
        for layout in LAYOUTS:
            if any(part in layout.name for part in wanted):
                try:
                    found = measure(layout, trials)
                except Exception as e:
                    sys.stderr.write(f"{layout.name}: {type(e).__name__} {str(e)[:600]}\n")
                    continue
                for row in found:
                    say(row)
                rows += found
    write("memory_layouts", {"rows": rows}, options)


if __name__ == "__main__":
    main()
