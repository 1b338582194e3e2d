"""Statistics of gradients and activations: those of torch in one process, on every layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Pool
from torch import nn

import fxpart
from fxpart.errors import FxpartError
from fxpart.runtime import Callback, Event, JsonLines, PrometheusFile, Statistics
from fxpart.runtime.monitor.tensor_statistics import TensorStatistics, join_rows, sum_elements

LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"mesh": "none", "stages": 2},
    "tensor": {"mesh": "tp=2", "stages": 1},
    "zero 1": {"mesh": "dp=2", "stages": 1, "zero": 1},
    "zero 3": {"mesh": "dp=2", "stages": 1, "zero": 3},
}


class Block(nn.Module):
    """An activation with zeros, a module that passes its input on, and two outputs."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.act, self.drop = nn.Linear(size, 12), nn.ReLU(), nn.Dropout(0.5)
        self.down = nn.Linear(12, size)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = self.drop(self.act(self.up(x)))
        return inner, x + self.down(inner)


class Model(nn.Module):
    """A tied embedding, a list of blocks, a frozen layer; positions without a batch dim."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(13, 7), nn.Embedding(6, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(2))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, total = self.table(ids) + self.places(torch.arange(ids.shape[1])), 0.0
        for block in self.blocks:
            inner, x = block(x)
            total = total + inner.mean(-1, keepdim=True)
        return (self.head(self.frozen(x)) + total).mT


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(step: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(13, (rows, 5), generator=torch.Generator().manual_seed(step))
    return ids, ids.roll(1, 1)


def make_trainer(constraints: dict[str, Any], model: nn.Module | None = None, **more: Any) -> Any:
    ranks = constraints["stages"] * (2 if "=2" in constraints["mesh"] else 1)
    program = fxpart.compile(
        make_model() if model is None else model, f"local:{ranks}", example_inputs=batch(0),
        loss=nn.functional.cross_entropy, microbatches=2, constraints=constraints, check="off",
    )  # fmt: skip
    return program.trainer(torch.optim.SGD, **more)


def of_tensor(tensor: torch.Tensor) -> TensorStatistics:
    """By torch, in float64."""
    x = tensor.detach().double()
    kept = x[x.isfinite()]
    return TensorStatistics(
        float(kept.norm()), float(kept.mean()), float(kept.abs().max()),
        float((x == 0).double().mean()), int((~x.isfinite()).sum()), x.numel(),
    )  # fmt: skip


def assert_equal(found: dict[str, TensorStatistics], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        other = of_tensor(tensor)
        for figure in ("norm", "mean", "largest"):
            value = getattr(other, figure)
            assert getattr(found[name], figure) == pytest.approx(value, rel=1e-4, abs=1e-7), name
        assert found[name].zeros == pytest.approx(other.zeros, abs=1e-9), name
        assert (found[name].nonfinite, found[name].count) == (other.nonfinite, other.count), name


def plain_activations(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What forward hooks see in evaluation mode, several outputs as ``name.0``, ``name.1``."""
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str, out: Any) -> None:
        for index, each in enumerate(out if isinstance(out, tuple) else [out]):
            seen[f"{name}.{index}" if isinstance(out, tuple) else name] = each

    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: keep(name, out))
        for name, module in model.named_modules()
        if name
    ]
    with torch.no_grad():
        model.eval()(ids)
    for hook in hooks:
        hook.remove()
    return seen


def run(constraints: dict[str, Any]) -> list[str]:
    model, plain = make_model(), make_model()
    for each in (model, plain):
        each.blocks.apply(lambda m: setattr(m, "p", 0.0) if isinstance(m, nn.Dropout) else None)
    trainer = make_trainer(constraints, model, clip_norm=1e-3)
    trainer.log_gradient_statistics = True
    trainer.step(batch(0), accumulate=True)
    trainer.step(batch(1))
    for step in (0, 1):
        ids, targets = batch(step)
        (nn.functional.cross_entropy(plain(ids), targets) / 2).backward()
    gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert_equal(trainer.last_gradient_statistics, gradients)  # type: ignore[arg-type]
    plain.load_state_dict(trainer.state_dict())
    for rows in (4, 3):
        ids, targets = batch(5, rows)
        found = trainer.activation_statistics((ids, targets))
        assert_equal(found, plain_activations(plain, ids))
    return sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics_are_those_of_one_process(layout: str, pool: Pool) -> None:
    """Before clipping; modules of all stages, of a list, and with two outputs."""
    one, other = pool.run(run, LAYOUTS[layout])
    assert one == other and {"blocks.0.0", "blocks.1.1", "places", "blocks.0.act"} <= set(one)


@pytest.mark.slow
def test_modules_in_autocast() -> None:
    """The names of float32, and values as near as bfloat16 is."""
    found = [
        make_trainer({**LAYOUTS["pipeline"], "precision": precision}).activation_statistics(
            batch(5)
        )
        for precision in ("fp32", "bf16")
    ]
    assert set(found[0]) == set(found[1]) and len(found[0]) > 10
    for name, statistics in found[0].items():
        assert found[1][name].norm == pytest.approx(statistics.norm, rel=0.02), name


class Events(Callback):
    def __init__(self) -> None:
        self.found: list[Event] = []

    def on_event(self, event: Event) -> None:
        if event.kind == "statistics":
            self.found.append(event)


@pytest.mark.slow
def test_a_run_reports_them_to_its_loggers(tmp_path: Path) -> None:
    """Every second update; the run itself is unchanged."""
    events, weights = Events(), []
    for statistics in (None, 2):
        trainer = make_trainer(LAYOUTS["pipeline"])
        prometheus = PrometheusFile(tmp_path / "run.prom", labels={"run": "a"})
        trainer.fit(
            [batch(step) for step in range(5)], statistics=statistics,
            callbacks=[events, JsonLines(tmp_path / "run.jsonl"), prometheus],
        )  # fmt: skip
        assert not trainer.log_gradient_statistics
        weights.append(trainer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*(w.values() for w in weights), strict=True))
    assert [event.step for event in events.found] == [2, 4]
    values = events.found[-1].values
    assert {"gradient_norm/table.weight", "activation_zeros/blocks.0.act"} <= set(values)
    assert 0 < values["activation_zeros/blocks.0.act"] < 1
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    logged = [line["values"] for line in lines if line.get("event") == "statistics"]
    assert logged[-1] == values
    text = (tmp_path / "run.prom").read_text()
    assert 'fxpart_gradient_norm{run="a",rank="0",name="table.weight"}' in text


@pytest.mark.slow
def test_one_kind_only_and_what_is_refused() -> None:
    trainer, events = make_trainer(LAYOUTS["pipeline"]), Events()
    only = Statistics(every=1, activations=False)
    trainer.fit([batch(0)], statistics=only, callbacks=[events])
    assert all(name.startswith("gradient_") for name in events.found[0].values)
    with pytest.raises(FxpartError, match="statistics must be at least 1"):
        trainer.fit([batch(0)], statistics=0)
    asynchronous = make_trainer({**LAYOUTS["pipeline"], "mode": "async"})
    with pytest.raises(FxpartError, match=r"fit\(statistics=\)"):
        asynchronous.fit([batch(0)], statistics=1)


def test_elements_that_are_not_finite() -> None:
    x = torch.tensor([[1.0, -3.0, 0.0, math.inf], [math.nan, 0.0, 2.0, -math.inf]])
    found = join_rows(sum_elements(x))
    assert found == TensorStatistics(
        pytest.approx(math.sqrt(14)), 0.0, 3.0, zeros=0.25, nonfinite=3, count=8
    )
    assert TensorStatistics.of([0.0] * 6) == TensorStatistics(0.0, 0.0, 0.0, 0.0, 0, 0)
    assert join_rows(sum_elements(torch.empty(2, 0))).count == 0


def test_elements_beyond_single_precision() -> None:
    """Squares of float32 and elements of float64; more elements than float32 counts one by one."""
    assert join_rows(sum_elements(torch.full((4,), 1e20))).norm == pytest.approx(2e20)
    found = join_rows(sum_elements(torch.tensor([1e300, -1e300], dtype=torch.float64)))
    assert found.largest == 1e300 and found.nonfinite == 0
    assert (
        join_rows(sum_elements(torch.zeros((1 << 24) + 3, dtype=torch.int8))).count == (1 << 24) + 3
    )
