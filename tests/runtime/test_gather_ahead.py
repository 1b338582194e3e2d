"""ZeRO-3 gathers a block ahead and reduces behind it: what starts when, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from ranks import Pool
from torch import nn

import fxpart
from fxpart.collectives.gather_prefetch import UNDER_WAY, BackwardScatters
from fxpart.errors import FxpartError

WIDTH, BLOCKS, ROWS = 8, 4, 8


class Block(nn.Module):
    """One parameter, used by one op."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(nn.functional.linear(x, self.weight))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(BLOCKS)])


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
    return x, y


@cache
def program(microbatches: int = 1) -> fxpart.Program:
    return fxpart.compile(
        net(), "local:2", example_inputs=batch(), loss=nn.functional.mse_loss,
        microbatches=microbatches, constraints={"mesh": "dp=2", "zero": 3, "stages": 1},
    )  # fmt: skip


def trained(ahead: int, microbatches: int = 2) -> list[Any]:
    """Losses of a few steps, and the weights."""
    trainer = program(microbatches).trainer(torch.optim.AdamW, gather_ahead=ahead, clip_norm=0.5)
    losses = [float(trainer.step(batch())) for _ in range(3)]
    weights = {n: t.flatten().tolist() for n, t in trainer.state_dict().items()}
    return [losses, float(trainer.eval_step(batch())), weights]


@pytest.mark.slow
def test_the_program_names_the_gathers_of_each_block() -> None:
    found = program().sources[0]
    lines = [line.strip() for line in found.splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith("GATHERS"))
    wanted = [f'(("p_{k}_weight", "dp", 0, {WIDTH}, 1),),' for k in range(BLOCKS)]
    assert lines[at + 1 : at + 1 + BLOCKS] == wanted


def recorded(ahead: int) -> str:
    """What the first mesh rank does in a step: gather, multiply in forward, reduce and scatter."""
    trainer = program().trainer(torch.optim.SGD, gather_ahead=ahead)
    module = trainer.parts.mesh_ranks[0].modules[0]
    seen: list[str] = []

    def watch(kind: str, start: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*given: Any) -> Any:
            seen.append({"all_gather": "g", "reduce_scatter": "s"}.get(kind, ""))
            return start(*given)

        return begin

    scope = type(module).forward.__globals__
    multiply = scope["aten_linear"]

    def compute(*given: Any) -> torch.Tensor:
        seen.append("m")
        found: torch.Tensor = multiply(*given)
        return found

    module.mesh.watch(watch)
    scope["aten_linear"] = compute
    try:
        trainer.step(batch())
    finally:
        scope["aten_linear"] = multiply
        module.mesh.watch(None)
    return "".join(seen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ahead", "forward", "backward"),
    [
        (0, "gm gm gm gm", "gs gs gs s"),  # The first block's input has no gradient.
        (1, "ggm gm gm m", "ggs gs s s"),
        (2, "gggm gm m m", "gggs s s s"),
        (9, "ggggm m m m", "gggs s s s"),
    ],
)
def test_gathers_start_before_the_blocks_before(ahead: int, forward: str, backward: str) -> None:
    assert recorded(ahead) == (forward + backward).replace(" ", "")


def test_reductions_end_behind_the_next_blocks() -> None:
    """A reduction is awaited once there are many, and all at the end of the backward."""
    ended: list[int] = []
    scatters, parameter = BackwardScatters(), nn.Parameter(torch.zeros(2))

    def end(index: int) -> torch.Tensor:
        ended.append(index)
        return torch.full((2,), float(index))

    for index in range(UNDER_WAY + 2):
        scatters.add(parameter, partial(end, index))
        assert ended == list(range(max(0, index + 1 - UNDER_WAY)))
    scatters.close()
    assert ended == list(range(UNDER_WAY + 2))
    assert parameter.grad is not None and parameter.grad.tolist() == [float(sum(ended))] * 2


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [1, 2, 9])
def test_the_same_numbers(ahead: int) -> None:
    assert trained(ahead) == trained(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "recompute"), [("1f1b", "none"), ("1f1b", "full"), ("zb-h1", "none")]
)
def test_the_same_numbers_in_a_pipeline(schedule: str, recompute: str) -> None:
    """Several microbatches in flight, recomputation, and split backwards."""
    made = fxpart.compile(
        net(), "local:4", example_inputs=batch(), loss=nn.functional.mse_loss, microbatches=4,
        constraints={"mesh": "dp=2", "zero": 3, "stages": 2, "schedule": schedule},
    )  # fmt: skip
    found = []
    for ahead in (0, 1):
        trainer = made.trainer(torch.optim.AdamW, gather_ahead=ahead, recompute=recompute)
        losses = [float(trainer.step(batch())) for _ in range(3)]
        found.append([losses, {n: t.tolist() for n, t in trainer.state_dict().items()}])
    assert found[0] == found[1]


@pytest.mark.slow
def test_the_same_numbers_over_gloo(pool: Pool) -> None:
    for found in pool.run(trained, 1):
        assert found == trained(0)


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(FxpartError, match="gather_ahead=-1"):
        program().trainer(torch.optim.SGD, gather_ahead=-1)
