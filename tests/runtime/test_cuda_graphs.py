"""Recorded stages without a GPU: what is copied, the numbers, and what is refused.

``record`` stands in for torch.cuda.graph: a replay calls the function again and writes its results
into the memory of the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fxpart
from fxpart.errors import FxpartError
from fxpart.runtime import trainer_parts
from fxpart.runtime.executor import cuda_graphs
from fxpart.runtime.executor.cuda_graphs import GraphedForward, graph_stages

GPU = torch.device("cuda")


def record(run: Callable[[], Any]) -> tuple[Any, Callable[[], object]]:
    first = run()

    def replay() -> None:
        for own, new in zip(first, run(), strict=True):
            if own is not None:
                own.detach().copy_(new.detach())

    return first, replay


class Net(nn.Module):
    """A skip over two blocks, a tied weight; with a norm, buffers that training changes."""

    def __init__(self, dropout: float = 0.0, *, norm: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.third.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6) if norm else nn.LayerNorm(6)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        z = self.drop(self.norm(torch.tanh(self.second(y))))
        return self.third(z) + y


def batch(rows: int = 16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, 6, generator=generator) for _ in range(2))
    return x, y


def compiled(stages: int = 2, **options: Any) -> fxpart.Program:
    torch.manual_seed(0)
    model = Net(options.pop("dropout", 0.0), norm=options.pop("norm", False))
    constraints = {"mesh": "none", "stages": stages, **options.pop("constraints", {})}
    return fxpart.compile(
        model, f"local:{max(2, stages)}", example_inputs=batch(), microbatches=4,
        loss=nn.functional.mse_loss, constraints=constraints,
        batch_coupling="per-microbatch", **options,
    )  # fmt: skip


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let trainers record on the CPU."""

    def graph(mesh_ranks: Any, devices: Any, **how: Any) -> list[GraphedForward]:
        del devices
        return graph_stages(mesh_ranks, [GPU], record=record, **how)

    monkeypatch.setattr(trainer_parts, "graph_stages", graph)
    yield


def steps(trainer: Any, rows: tuple[int, ...] = (16, 16, 12, 16)) -> list[Any]:
    """Losses and weights; the batch of twelve rows has microbatches of other sizes."""
    losses = [float(trainer.step(batch(count, seed=k))) for k, count in enumerate(rows)]
    losses.append(float(trainer.eval_step(batch())))
    return [losses, {n: t.tolist() for n, t in trainer.state_dict().items()}]


def graphs_of(trainer: Any) -> list[GraphedForward]:
    modules = [m for own in trainer.parts.mesh_ranks for m in own.modules.values()]
    return [vars(m)["forward"] for m in modules]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [1, 2])
def test_the_same_numbers(recorded: None, stages: int, schedule: str) -> None:
    constraints = {"schedule": schedule} if stages > 1 else {}
    program = compiled(stages, constraints=constraints)
    optimizer = partial(torch.optim.AdamW, lr=0.1)
    wanted = steps(program.trainer(optimizer, clip_norm=0.5))
    trainer = program.trainer(optimizer, clip_norm=0.5, cuda_graphs=True)
    assert steps(trainer) == wanted
    # A recording for each microbatch in flight, used again in every step.
    flight = {"1f1b": [2, 1], "gpipe": [4, 4]}[schedule] if stages > 1 else [1]
    assert [len(g.recordings) for g in graphs_of(trainer)] == flight


@pytest.mark.slow
def test_buffers_change_as_often_as_microbatches_run(recorded: None) -> None:
    program = compiled(stages=1, norm=True)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    wanted = steps(program.trainer(optimizer))
    assert steps(program.trainer(optimizer, cuda_graphs=True)) == wanted


def test_gradients_are_copied_out() -> None:
    """The first gradient of a parameter is not the memory into which the next replay writes."""
    module = nn.Linear(3, 3)
    own, parameters = GraphedForward(_Stage(module), (), record), list(module.parameters())
    given = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    outputs = [own(0, x)[0] for x in given]
    for output in outputs:
        output.sum().backward()
    wanted = torch.autograd.grad(sum(module(x).sum() for x in given), [*parameters, *given])
    for tensor, gradient in zip([*parameters, *given], wanted, strict=True):
        torch.testing.assert_close(tensor.grad, gradient)
    assert len(own.recordings) == 2  # both were in flight
    again = own(0, given[0])[0]
    assert len(own.recordings) == 2
    assert again.data_ptr() != outputs[1].data_ptr()
    del again
    assert len(own._free) == 2  # dropped without a backward


class _Stage(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, key: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.inner(x), x.detach().argmax(-1)


def test_outputs_without_gradient_and_unused_ones() -> None:
    module = _Stage(nn.Linear(3, 3))
    own = GraphedForward(module, (), record)
    output, index = own(0, torch.randn(2, 3))
    assert output.requires_grad and not index.requires_grad and index.dtype == torch.int64
    output[0, 0].backward()
    assert module.inner.weight.grad is not None
    with torch.no_grad():
        assert not own(0, torch.randn(2, 3))[0].requires_grad
    assert len(own.recordings) == 1


def test_a_stage_that_reads_a_value_on_the_host_is_refused() -> None:
    def refuse(run: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(FxpartError, match="not permitted when stream is capturing") as found:
        GraphedForward(_Stage(nn.Linear(3, 3)), (), refuse)(0, torch.randn(2, 3))
    assert "FXP109" in str(found.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "trainer", "why"),
    [
        ({"dropout": 0.1}, {}, "draw random numbers"),
        ({"constraints": {"schedule": "zb-h1"}}, {}, "splits backwards"),
        ({}, {"recompute": "full"}, "recomputes its activations"),
        ({"stages": 1, "constraints": {"mesh": "dp=2"}}, {}, "collectives inside"),
        ({}, {}, "compute on cpu"),
    ],
)  # fmt: skip
def test_what_is_refused(options: dict[str, Any], trainer: dict[str, Any], why: str) -> None:
    program = compiled(**options)
    with pytest.raises(FxpartError, match=why) as found:
        program.trainer(torch.optim.SGD, cuda_graphs=True, **trainer)
    assert {p.code for p in found.value.problems} == {"FXP109"}


@pytest.mark.slow
def test_all_reasons_at_once() -> None:
    program = compiled(dropout=0.1)
    with pytest.raises(FxpartError) as found:
        program.trainer(torch.optim.SGD, cuda_graphs=True, compile_stages="eager")
    assert len(found.value.problems) == 3
    assert cuda_graphs.WARM_UP > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"mode": "async"}, {"mode": "queue", "stages": 1}])
def test_trainers_with_versions_of_weights_refuse(recorded: None, options: dict[str, Any]) -> None:
    with pytest.raises(FxpartError, match="does not support CUDA graphs"):
        compiled(**options).trainer(torch.optim.SGD, cuda_graphs=True)
