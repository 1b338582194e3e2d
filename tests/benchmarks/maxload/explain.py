"""Why there is no assignment, as an error for the user."""

from __future__ import annotations

from fxpart.errors import FxpartError, error

from .blocks import make_blocks
from .instance import Instance, MaxLoadAnswer, Mode
from .reduce import fuse_circles


def no_answer(
    instance: Instance, mode: Mode, answer: MaxLoadAnswer, where: str, time_limit: float
) -> FxpartError:
    """FXP204 for an instance that has none, with the cause where it is simple; FXP205 for time."""
    if answer.status != "infeasible":
        return error(
            "FXP205",
            where=f"{where}: {len(instance.nodes)} nodes on {len(instance.devices)} devices",
            why=f"{time_limit:g} seconds were not enough to find a split that fits",
            fix="a longer --time-limit",
        )
    why, fix = _cause(instance, mode)
    return error("FXP204", where=f"{where}, mode {mode}", why=why, fix=fix)


def _cause(instance: Instance, mode: Mode) -> tuple[str, str]:
    blocks = fuse_circles(make_blocks(instance, mode))
    if not instance.cpus:
        unable = [node.id for node in instance.nodes if not node.runs]
        if unable:
            return f"node {unable[0]} runs on CPU cores only, and there is none", "--cpus 1"
        largest = int(blocks.size.argmax())
        if blocks.size[largest] > instance.memory:
            ids = [instance.nodes[i].id for i in blocks.members[largest]]
            named = ", ".join(map(str, ids[:5])) + (", ..." if len(ids) > 5 else "")
            return (
                f"nodes {named} have to lie together: {blocks.size[largest]:.6g} bytes, "
                f"an accelerator has {instance.memory:.6g}",
                f"--memory {blocks.size[largest]:.6g}",
            )
        total, there = float(blocks.size.sum()), instance.accelerators * instance.memory
        if total > there:
            return (
                f"{total:.6g} bytes in all, {there:.6g} on all accelerators",
                f"at least {-int(-total // max(instance.memory, 1e-300))} accelerators",
            )
    loose = "; or --mode any" if mode == "chain" else ""
    return (
        "no split fits the memory of the devices (every one was ruled out)",
        f"more --memory or --devices{loose}",
    )
