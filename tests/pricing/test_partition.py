"""Prices against what torch really does: FLOPs, saved bytes, transfers, weights, optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import pytest
import torch
from fxpart.costmodels import find
from fxpart.costmodels.op_work import flops
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_runs import Stages, assigned, prepared, tensors
from torch import fx
from torch.utils.flop_counter import FlopCounterMode
from zoo import ZOO, Built

from fxpart.capture import CapturedModel, capture
from fxpart.cluster.devices import Link
from fxpart.cluster.model import Cluster
from fxpart.compat.optimizer_choice import choose, state_bytes, tensors_in
from fxpart.errors import FxpartError
from fxpart.pricing.device_limits import RESERVE, group_by_kind, limits
from fxpart.pricing.partition import price
from fxpart.pricing.specs import Specs
from fxpart.pricing.variants import BatchSplit, Sizes, splits
from fxpart.pricing.weights import trained_names
from fxpart.solver.objective import StageCost, evaluate
from fxpart.solver.problem import PartitionChoice, PartitionProblem

MODELS = ["gpt2", "llama", "bert", "t5", "resnet50", "shared_mlp", "frozen", "dropouts"]


@dataclass(frozen=True)
class Case:
    """A zoo model, captured and prepared."""

    built: Built
    captured: CapturedModel
    graph: fx.GraphModule

    @property
    def rows(self) -> int:
        return self.captured.batch_size

    def price(self, **options: object) -> PartitionProblem:
        given: dict[str, object] = {"batch_size": self.rows}
        return price(self.graph, self.captured, Cluster.local(4), **(given | options))[0]  # type: ignore[arg-type]

    def inputs(self, rows: int) -> list[torch.Tensor]:
        """The example's inputs, cut to the first rows."""
        whole = tensors(self.captured, self.built.batch)
        dims = [spec.batch_dim for spec in self.captured.inputs]
        pairs = zip(whole, dims, strict=True)
        return [t if d is None else t.narrow(d, 0, rows).contiguous() for t, d in pairs]


@pytest.fixture(params=MODELS, scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    if not ZOO[request.param].available:
        pytest.skip(f"{request.param} needs {ZOO[request.param].needs}")
    built = ZOO[request.param].build()
    captured = capture(
        built.model,
        built.batch,
        loss=built.loss,
        batch_size=built.batch_size,
        batch_dims=built.batch_dims,
    )
    return Case(built, captured, prepared(captured))


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, None])
def test_flops_equal_torchs_counter(case: Case, rows: int | None) -> None:
    """Forward and backward of the whole model, at the captured batch and at another one."""
    rows = rows if rows and case.captured.symbolic else case.rows
    specs = Specs(trained_names(case.captured))
    sizes = Sizes(case.captured, BatchSplit(rows, 1))
    found = [op for node in case.graph.graph.nodes if (op := specs.op(node)) is not None]
    ops = [sizes.op(op) for op in found]
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with math, torch.backends.mkldnn.flags(enabled=False):
        with FlopCounterMode(display=False) as forward:
            loss = case.graph(0, *case.inputs(rows))[0]
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    # fused attention computes its scores again in the backward
    attention = [op for op in ops if op.key == "scaled_dot_product_attention" and op.gradients]
    again = sum(flops(op) // 2 for op in attention)
    assert all(op.inputs[0].shape[-1] == op.inputs[2].shape[-1] for op in attention)
    assert sum(flops(op) for op in ops) == forward.get_total_flops()
    assert sum(flops(op, True) for op in ops) == backward.get_total_flops() + again


@dataclass(frozen=True)
class Held:
    """Bytes that a stage really holds after its forward.

    microbatch: what autograd saved, what was received and what is to be sent, each storage once.
    expanded: how much more the sent values have than their storages (broadcast masks).
    """

    microbatch: int
    parameters: int
    buffers: int
    state: int
    expanded: int = 0


def really_held(case: Case, starts: tuple[int, ...], rows: int) -> Iterator[Held]:
    """Run the stages one after another and count."""
    stages = Stages(case.captured, assigned(case.graph, starts))
    names = [spec.name for spec in stages.spec.inputs]
    values = dict(zip(names, case.inputs(rows), strict=True))
    alive: list[torch.UntypedStorage] = []
    for spec, module in zip(stages.spec.stages, stages.modules, strict=True):
        arguments, received = [], []
        for value, source in zip(spec.inputs, spec.sources, strict=True):
            tensor = values[value.name]
            if source >= 0:
                tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
                received.append(tensor.requires_grad_(value.requires_grad))
            arguments.append(tensor)
        state = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
        kept = {t.untyped_storage().data_ptr(): nbytes(t) for t in received}

        def pack(t: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            storage = t.untyped_storage()
            alive.append(storage)
            kept[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            results = module(0, *arguments)
        values |= {v.name: t for v, t in zip(spec.outputs, results, strict=True)}
        expanded = 0
        for result, targets in zip(results, spec.targets, strict=True):
            if targets:
                pack(result)
                expanded += max(0, nbytes(result) - result.untyped_storage().nbytes())
        trained = [p for p in module.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer = torch.optim.AdamW(trained) if trained else None
        if optimizer is not None:
            optimizer.step()
        yield Held(
            sum(size for address, size in kept.items() if address not in state),
            sum(map(nbytes, module.parameters())),
            sum(map(nbytes, module.buffers())),
            sum(map(nbytes, tensors_in(optimizer.state if optimizer else {}))),
            expanded,
        )


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_memory_equals_what_stages_really_hold(case: Case, count: int) -> None:
    """Saved tensors, received values, weights and AdamW's state of each stage, to the byte."""
    problem = case.price(microbatches=1)
    blocks = len(problem.blocks)
    starts = tuple(sorted({i * blocks // count for i in range(count)}))
    predicted = evaluate(problem, PartitionChoice(variant=0, schedule="1f1b", starts=starts)).stages

    def parts(stage: StageCost) -> Held:
        memory = stage.memory
        assert memory.gradients <= memory.weights
        held = memory.activations - stage.workspace + memory.transfers
        return Held(held, memory.weights, memory.buffers, memory.optimizer)

    rows = problem.variants[0].microbatch_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        real = list(really_held(case, starts, rows))
    for stage, held in zip(predicted, real, strict=True):
        found = parts(stage)
        assert 0 <= found.microbatch - held.microbatch <= held.expanded
        assert found == replace(held, microbatch=found.microbatch, expanded=0)


@pytest.mark.slow
def test_problem_is_sound(case: Case) -> None:
    problem, sources = price(
        case.graph, case.captured, Cluster.parse("2x2xa100"), batch_size=case.rows
    )
    again, _ = price(case.graph, case.captured, Cluster.parse("2x2xa100"), batch_size=case.rows)
    assert msgspec.json.encode(problem) == msgspec.json.encode(again)
    assert msgspec.json.decode(msgspec.json.encode(problem), type=PartitionProblem) == problem
    assert {"compute", "devices", "links", "memory", "optimizer"} <= set(sources)
    for variant in problem.variants:
        assert variant.microbatches * variant.microbatch_size >= case.rows
        assert sum(map(sum, variant.forward)) > 0 < sum(map(sum, variant.backward))
    times = [sum(v.forward[0]) for v in problem.variants]
    kept = [sum(v.activation) for v in problem.variants]
    assert times == sorted(times, reverse=True) and kept == sorted(kept, reverse=True)
    held = [weight for weight in problem.weights if not weight.buffer]
    assert {w.name for w in held} <= set(case.captured.parameters)
    for weight in problem.weights:
        real = case.captured.state[weight.name]
        assert weight.weight == nbytes(real)
        assert (weight.gradient > 0) == (weight.optimizer > 0) == real.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp"])
def test_arguments_that_are_wrong(model: str) -> None:
    built = ZOO[model].build()
    captured = capture(built.model, built.batch, loss=built.loss, batch_size=built.batch_size)
    graph = prepared(captured)
    call = partial(price, graph, captured, Cluster.local(2))

    def code(**options: object) -> str:
        with pytest.raises(FxpartError) as caught:
            call(**({"batch_size": 8} | options))
        return caught.value.code

    assert code(batch_size=0) == code(microbatches=9) == code(microbatches=0) == "FXP105"
    assert code(optimizer="no-such") == code(optimizer=3) == "FXP109"
    assert code(cost_model="no-such") == code(schedules=("zigzag",)) == "FXP109"
    with pytest.raises(FxpartError, match="FXP201"):
        price(captured.graph, captured, Cluster.local(2), batch_size=8)
    apart = msgspec.structs.replace(Cluster.local(2), links=())
    with pytest.raises(FxpartError, match="local/cpu:0 -> local/cpu:1"):
        price(graph, captured, apart, batch_size=8)


@pytest.mark.slow
def test_the_optimizer_decides_the_state() -> None:
    built = ZOO["mlp"].build()
    captured = capture(built.model, built.batch, loss=built.loss, batch_size=built.batch_size)
    graph = prepared(captured)

    def state(optimizer: object) -> tuple[int, int]:
        problem, _ = price(
            graph, captured, Cluster.local(2), batch_size=8, optimizer=optimizer, microbatches=2
        )
        return sum(w.optimizer for w in problem.weights), sum(w.gradient for w in problem.weights)

    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    assert state("sgd")[0] == 0
    assert state(momentum)[0] == state(momentum)[1]
    count = sum(1 for p in built.model.parameters())
    assert state("adamw")[0] == 2 * state("adamw")[1] + 4 * count


# variants


@pytest.mark.slow
@given(st.integers(1, 300), st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_splits_are_those_of_tensor_split(batch: int, stages: int) -> None:
    found = splits(batch, stages)
    assert 1 <= len(found) <= 16
    assert found[0] == BatchSplit(batch, 1) and found[-1] == BatchSplit(1, batch)
    for split in found:
        pieces = torch.arange(batch).tensor_split(split.microbatches)
        assert max(map(len, pieces)) == split.size and min(map(len, pieces)) >= 1
        # fewest microbatches of this size
        assert split.microbatches == 1 or -(-batch // (split.microbatches - 1)) > split.size
    assert len({split.size for split in found}) == len(found)
    everything = splits(batch, stages, limit=10**6)
    assert {s.size for s in everything} == {-(-batch // m) for m in range(1, batch + 1)}


def test_a_large_batch_is_not_enumerated() -> None:
    found = splits(10**9, 12)
    assert len(found) <= 16
    assert found[0].microbatches == 1 and found[-1].size == 1


# devices


def test_limits_against_all_pairs() -> None:
    base = Cluster.parse("3x3xa100")
    names = [d.name for d in base.devices]
    slow = Link(source=names[1], target=names[5], latency=1.0, bandwidth=1e6, kind="net")
    odd = Link(source="host0", target="host2", latency=2.0, bandwidth=1e12, kind="net")
    model = find("auto")
    for links in (base.links, (*base.links, slow), (*base.links, odd, slow)):
        cluster = msgspec.structs.replace(base, links=links)
        for index, limit in enumerate(limits(cluster, model)):
            pairs = [
                (cluster.link(names[k], names[index]), cluster.link(names[index], names[k]))
                for k in range(index)
            ]  # there and back: hidden states and their gradients
            latencies = [(x.latency + y.latency) / 2 for x, y in pairs]
            assert limit.latency == max(latencies, default=0)
            inverses = [(1 / x.bandwidth + 1 / y.bandwidth) / 2 for x, y in pairs]
            assert limit.inverse_bandwidth == pytest.approx(max(inverses, default=0))
            assert limit.memory == int(85.097e9 * (1 - RESERVE))


@pytest.mark.slow
def test_limits_of_many_devices_are_quick() -> None:
    cluster = Cluster.parse("512x8xh100")
    assert len(limits(cluster, find("auto"))) == 4096


def test_kinds() -> None:
    mixed = msgspec.structs.replace(
        Cluster.parse("2xa100"),
        devices=(*Cluster.parse("2xa100").devices, *Cluster.parse("2xt4").devices),
    )
    samples, types = group_by_kind(mixed)
    assert types == (0, 0, 1, 1)
    assert [d.model for d in samples] == ["a100-sxm-80gb", "t4"]


# optimizers


def one_step(make: object, shapes: list[tuple[int, ...]]) -> list[int]:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make(parameters)  # type: ignore[operator]
    optimizer.step()
    return [sum(map(nbytes, tensors_in(optimizer.state.get(p, {})))) for p in parameters]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["adamw", "adam", "sgd", "adafactor", "rmsprop", "adagrad", "nadam", "asgd", "rprop"]
)
def test_state_equals_that_of_a_real_step(name: str) -> None:
    shapes = [(7, 5), (5,), (3, 4, 2, 2), (1, 6), (2000, 700), (1500, 3, 400)]
    kept = state_bytes(choose(name), [(shape, torch.float32) for shape in shapes])
    assert kept == one_step(choose(name).make, shapes)


def test_ways_to_name_an_optimizer() -> None:
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    parameter = torch.nn.Parameter(torch.zeros(3))
    ways = [momentum, momentum([parameter]), lambda ps: momentum(ps), choose(momentum)]
    assert [one_step(choose(way).make, [(4, 5)]) for way in ways] == [[80]] * 4
    assert [choose(way).name for way in ways] == ["sgd", "sgd", "lambda", "sgd"]
    assert choose(torch.optim.AdamW).name == choose("AdamW").name == choose().name == "adamw"


def test_optimizers_that_cannot_be_stepped() -> None:
    shapes = [((4, 4), torch.float32)]
    for wrong in ("lbfgs", lambda ps: list(ps), lambda: None):
        with pytest.raises(FxpartError, match="FXP109"):
            state_bytes(choose(wrong), shapes)
    assert state_bytes(choose("sparseadam"), shapes) == [2 * 64], "it takes sparse gradients alone"
    assert list(itertools.islice(tensors_in({}), 1)) == []
