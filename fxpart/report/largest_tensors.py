"""The largest tensors at each rank's predicted peak, as a table."""

from __future__ import annotations

from fxpart.errors import error
from fxpart.plan.model import Plan
from fxpart.units import size


def largest(plan: Plan) -> str:
    """Return the ten largest tensors of each stage; raises FXP109 for a plan without them."""
    rows = [entry for entry in plan.prediction.ranks if entry.top]
    if not rows:
        raise error(
            "FXP109",
            where="--memory",
            why="this plan does not list the tensors that are alive at the peak",
            fix="plan again; plans whose stages are contiguous blocks list them",
        )
    lines: list[str] = []
    for entry in rows:
        first, last = min(entry.ranks), max(entry.ranks)
        ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
        if lines:
            lines.append("")
        lines.append(
            f"Stage {entry.stage} ({ranks}): {size(entry.peak)} at the peak, "
            f"{size(entry.memory.total)} as the sum of the peaks by cause"
        )
        width = max(len(tensor.name) for tensor in entry.top)
        lines += [
            f"  {size(tensor.bytes):>9}  {tensor.name:<{width}}  {tensor.why}"
            for tensor in entry.top
        ]
    return "\n".join(lines)
