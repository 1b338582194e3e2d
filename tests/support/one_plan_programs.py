"""Ranks whose planners find different plans: what a user's script does, told as JSON lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import fxpart
from fxpart.api import program as program_module
from fxpart.errors import FxpartError, error
from fxpart.planner.plan_agreement import plan_independently

BATCH = (torch.arange(32.0).reshape(8, 4) / 32, torch.arange(8) % 4)
_weigh = program_module.select_mode


def _rank() -> int:
    return int(os.environ["RANK"])


@contextmanager
def planners(*words: str) -> Iterator[list[int]]:
    """Planners with another cut on each rank and in each life; gives the cuts of this one's calls.

    As a search that is out of time may have it. "refused": they raise FXP204; "broken": ValueError.
    """
    calls: list[int] = []

    def weigh(front: Any, *rest: Any) -> Any:
        cut = 1 + (_rank() + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))) % 3
        calls.append(cut)
        if "refused" in words:
            raise error("FXP204", where=f"rank {_rank()}", why="too large", fix="less")
        if "broken" in words:
            raise ValueError("of the planner's own")
        wish = {**front.request.constraints, "stage": f"layers.{cut}=1"}
        return _weigh(replace(front, request=replace(front.request, constraints=wish)), *rest)

    with patch.object(program_module, "select_mode", weigh):
        yield calls


class Net(nn.Module):
    """Layers to cut between."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def compiled(*words: str) -> Any:
    """A program in two stages; "other": of another model on rank 1."""
    torch.manual_seed(0)
    net = Net(5 if "other" in words and _rank() == 1 else 4)
    return fxpart.compile(
        net, "auto", example_inputs=BATCH, loss=F.cross_entropy, microbatches=2,
        constraints={"stages": 2, "mesh": "none"},
    )  # fmt: skip


def found(*words: str) -> dict[str, Any]:
    """What a rank has in the end, or its error. Words say what it does; see below."""
    with planners(*words) as calls:
        try:
            what = _done(*words)
        except FxpartError as fault:
            what = {"error": str(fault)}
        return {"rank": _rank(), "planned": len(calls), **what}


def _done(*words: str) -> dict[str, Any]:
    if "only-0" in words and _rank():
        return {}
    what: dict[str, Any] = {}
    if "each" in words:
        with plan_independently():
            what["own"] = compiled().plan.dumps()
    program = compiled(*words)
    what["plan"] = program.plan.dumps()
    if "again" in words:
        again = program.replan("auto", constraints={"stages": 2, "mesh": "none"})
        what["again"] = again.plan.dumps()
    if "after" in words:
        dist.init_process_group("gloo")
    if "train" in words:
        trainer = program.trainer(torch.optim.SGD)
        what["losses"] = [float(trainer.step(BATCH)).hex() for _ in range(2)]
        trainer.close()
    return what


def main(*words: str) -> int:
    """A process of torchrun's, or one that was started by hand."""
    if words[-1].startswith("file:"):
        world = int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=words[-1], rank=_rank(), world_size=world)
    what = found(*words)
    os.write(1, (json.dumps(what) + "\n").encode())  # at once: all write into one pipe
    if "fail" in words and _rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        return 1
    return 5 if "error" in what else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
