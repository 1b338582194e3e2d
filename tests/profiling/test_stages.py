"""Stages timed whole: of every kind of model, equal layers once, with the runtime's own numbers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import pytest
import torch
from fxpart.costmodels.profile_store import StageMeasurement
from queued_batches import adagrad, batch
from queued_programs import model as clicks
from torch import nn
from zoo import ZOO

import fxpart
from fxpart.api import Program
from fxpart.codegen.stage_key import FIRST, canonical, stage_key, symbol_sizes
from fxpart.profiling.outliers import timing
from fxpart.profiling.rotation import Rotation
from fxpart.profiling.stage_benchmark import (
    StageBenchmark,
    StageBenchmarkInput,
    keys_of,
    microbatch,
    microbatches,
)
from fxpart.profiling.stage_run import StageRun

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def compiled(name: str, stages: int, microbatches: int = 2) -> Program:
    built = ZOO[name].build()
    given = "example_kwargs" if isinstance(built.batch, dict) else "example_inputs"
    return fxpart.compile(
        built.model,
        f"local:{stages}",
        loss=built.loss,
        microbatches=microbatches,
        batch_dims=built.batch_dims,
        constraints={"mesh": "none", "stages": stages},
        **{given: built.batch},
    )


def work(program: Program) -> StageBenchmarkInput:
    labels = tuple(stage.label for stage in program.plan.stages)
    return StageBenchmarkInput(program.spec, program.sources, program.plan.microbatches, labels)


def timed(
    program: Program, known: Mapping[str, object] | None = None
) -> dict[str, StageMeasurement]:
    bench = StageBenchmark(program.captured, "adamw", "adamw", CPU)
    bench.turn(work(program), known or {}, seconds=0.0)
    return bench.timings()


# Ties, values that several stages use, masks, embeddings in bags, convolutions with statistics.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "shared_mlp",
        "recommender",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "side_mask", "t5", "unet")),
    ],
)
def test_every_stage_of_a_model_is_timed(name: str) -> None:
    program = compiled(name, 3)
    found = timed(program)
    keys = keys_of(work(program), microbatch(program.captured, program.spec, 2)[1], "adamw")
    assert set(found) == {key + end for key in keys for end in ("", FIRST)}
    for entry in found.values():
        assert entry.forward.seconds > 0 and entry.optimizer.seconds > 0
        assert entry.rows == -(-program.plan.batch_size // 2)
    assert timed(program, found) == {}


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.drop(layer(x)).relu()
        return x


def layers(rows: int = 4) -> Program:
    return fxpart.compile(
        Layers(),
        "local:6",
        example_inputs=(torch.randn(rows, 8), torch.randn(rows, 8)),
        loss=torch.nn.functional.mse_loss,
        microbatches=2,
        constraints={"mesh": "none", "stages": 6, "layout": ""},
    )


@pytest.mark.slow
def test_equal_layers_have_one_key_and_are_timed_once() -> None:
    program = layers()
    sizes = microbatch(program.captured, program.spec, 2)[1]
    keys = keys_of(work(program), sizes, "adamw")
    middle = [
        key
        for key, stage in zip(keys, program.plan.stages, strict=True)
        if stage.first not in (0, program.plan.stages[-1].first)
    ]
    same = max(middle.count(key) for key in middle)
    assert same >= 2
    assert len(timed(program)) == 2 * len(set(keys)) < 2 * len(keys)


@pytest.mark.slow
def test_turns_count_together() -> None:
    """Each stage is timed once a turn, and all samples are one stage's."""
    program = layers()
    bench = StageBenchmark(program.captured, "adamw", "adamw", CPU)
    first = bench.turn(work(program), (), seconds=0.0)
    assert len(first) == len(set(first)) > 1
    runs = {key: one.forward.runs for key, one in bench.timings().items()}
    some = first[:1]
    assert bench.turn(work(program), some, seconds=0.0) == first[1:]
    both = bench.timings()
    assert set(both) == set(runs)
    for key, one in both.items():
        raised = sum(len(turn.forward) for turn in bench._samples[key.removesuffix(FIRST)])
        assert raised == (3 if key.removesuffix(FIRST) in some else 4)
        assert runs[key] <= 3 and one.forward.runs <= raised
    assert bench.turn(work(program), (), left=lambda: 0.0) == []
    assert bench.timings() == both


def test_keys_tell_apart_rows_optimizers_and_code() -> None:
    program = layers()
    spec, source = program.spec, program.sources[1]
    sizes = microbatch(program.captured, spec, 2)[1]
    one = stage_key(source, spec, 1, sizes, "adamw")
    assert one == stage_key(source.replace("relu_1", "other"), spec, 1, sizes, "adamw")
    assert one != stage_key(source, spec, 1, sizes, "sgd")
    assert one != stage_key(source, spec, 1, dict.fromkeys(sizes, 7), "adamw")
    assert one != stage_key(source.replace("aten_relu(", "aten_tanh("), spec, 1, sizes, "adamw")
    assert "layers" not in canonical(source)


@pytest.mark.parametrize(
    "name", ["side_mask", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "t5"))]
)
def test_sizes_without_a_batch_are_those_of_a_microbatch(name: str) -> None:
    """What planning knows of symbols gives the keys that measuring found."""
    program = compiled(name, 2)
    captured = program.captured
    _, sizes, rows = microbatch(captured, program.spec, 2)
    dims = {item.name: item.batch_dim for item in program.spec.inputs}
    assert symbol_sizes(program.spec.symbols, dims, captured.hints, rows) == dict(sizes)


def test_a_run_computes_what_the_runtime_does() -> None:
    """Loss and gradients of one microbatch are those of the trainer, bit for bit."""
    program = compiled("mlp", 1, microbatches=1)
    trainer = program.trainer("sgd")
    assert program.captured.example is not None
    loss = trainer.backward(program.captured.example())
    values, _, _ = microbatch(program.captured, program.spec, 1)
    run = StageRun(program.spec, 0, program.sources[0], program.captured.state, "sgd", CPU)
    cell = run.forward(values, train=True)
    assert run.table.loss is not None
    assert torch.equal(cell.outputs[run.table.loss].detach(), loss)
    run.backward(cell, run.gradients(cell), 1.0)
    names = {state.attribute: state.name for state in program.spec.stages[0].state}
    expected = trainer.gradients()
    for attribute, parameter in run.module.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected[names[attribute]])
    trainer.close()


def of_tables(count: int) -> tuple[fxpart.Program, StageRun, list[dict[str, torch.Tensor]]]:
    """A model with tables on one rank in so many microbatches of twelve rows, ready to be timed."""
    program = fxpart.compile(
        clicks(), "local:1", example_inputs=batch(12), loss=nn.functional.cross_entropy,
        microbatches=count, optimizer=adagrad, constraints={"mesh": "none"},
    )  # fmt: skip
    values, _, rows = microbatches(program.captured, program.spec, count)
    assert rows == 12 // count
    run = StageRun(program.spec, 0, program.sources[0], program.captured.state, adagrad, CPU)
    return program, run, values


def same_weights(program: fxpart.Program, run: StageRun, steps: int) -> None:
    """The run's parameters are those of a trainer after so many steps, bit for bit."""
    trainer, whole = program.trainer(adagrad), batch(12)
    for _ in range(steps):
        trainer.step(whole)
    expected = trainer.state_dict()
    names = {state.attribute: state.name for state in program.spec.stages[0].state}
    for attribute, parameter in run.module.named_parameters():
        assert torch.equal(parameter.detach(), expected[names[attribute]])
    trainer.close()


def test_a_run_updates_tables_as_the_runtime_does() -> None:
    """Two microbatches and an update leave the numbers of the trainer, bit for bit."""
    program, run, values = of_tables(2)
    Rotation([run], values).step()
    assert not torch.equal(*(one[next(iter(one))] for one in values))
    same_weights(program, run, 1)


def test_an_update_after_the_only_microbatch() -> None:
    """It comes once more for a backward that adds; of that the next update knows nothing."""
    program, run, values = of_tables(1)
    assert len(values) == 1
    rotation = Rotation([run], values)
    for _ in range(3):
        (took,) = rotation.step()
        assert len(took.forward) == len(took.backward) == 2
    same_weights(program, run, 3)
    run.update()  # what it had is gone, or a later backward would be merged with it
    assert run._tables and all(table.grad is None for table in run._tables)


def test_microbatches_of_one_size_are_timed() -> None:
    program, _, _ = of_tables(1)
    for count, timed in ((4, 2), (5, 2), (11, 1)):  # rows of 5: 3 3 2 2 2, of 11: 2 1 1 ...
        assert len(microbatches(program.captured, program.spec, count)[0]) == timed


@pytest.mark.parametrize("together", [True, False])
def test_stages_in_rotation_compute_on_what_those_before_made(together: bool) -> None:
    """The last stage's parameters after two microbatches are the trainer's, bit for bit."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.ReLU())]
    model, x, y = nn.Sequential(*layers), torch.randn(8, 8), torch.randn(8, 8)
    program = fxpart.compile(
        model, "local:3", example_inputs=(x, y),
        loss=nn.functional.mse_loss, microbatches=2, optimizer="sgd",
        constraints={"mesh": "none", "stages": 3},
    )  # fmt: skip
    captured, spec, sources = program.captured, program.spec, program.sources
    values, _, _ = microbatches(captured, spec, 2)
    runs = [StageRun(spec, k, sources[k], captured.state, "sgd", CPU) for k in range(3)]
    if together:
        took = Rotation(runs, values).step()
        assert [(len(one.forward), len(one.backward)) for one in took] == [(2, 2)] * 3
        assert all(min(*one.forward, *one.backward, one.update) > 0 for one in took)
    else:
        for run in runs[:2]:
            for one in values:
                run.pass_on(run.forward(one, train=False), one)
        Rotation(runs[2:], values).step()
    trainer = program.trainer("sgd")
    trainer.step((x, y))
    expected = trainer.state_dict()
    names = {state.attribute: state.name for state in spec.stages[2].state}
    for attribute, parameter in runs[2].module.named_parameters():
        assert torch.equal(parameter.detach(), expected[names[attribute]])
        assert not torch.equal(parameter.detach(), captured.state[names[attribute]])
    trainer.close()


def test_outliers_are_dropped() -> None:
    samples = [1.0, 1.01, 0.99, 1.02, 0.98, 30.0]
    found = timing(samples)
    assert found.runs == 5
    assert found.seconds == statistics.median(samples[:5])
    assert found.low <= found.seconds <= found.high < 2
    assert timing([2.0]) == type(found)(2.0, 2.0, 2.0, 1)
