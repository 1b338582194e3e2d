"""Ops timed alone: every op of the zoo runs on made-up arguments, once each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fxpart.costmodels import ProfileCostModel, find
from fxpart.costmodels.profile_store import Profile, TimeQuartiles
from fxpart.passes import PREPARE, all_passes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from zoo import ZOO
from zoo_graphs import captured, prepared

from fxpart.capture import capture
from fxpart.cluster.model import Cluster
from fxpart.compiler import PassManager
from fxpart.compiler.tensor_sizes import expression
from fxpart.compiler.tensor_sizes import tensors as tensors_of
from fxpart.pricing.specs import Specs, annotation, layout
from fxpart.pricing.variants import BatchSplit, Sizes
from fxpart.pricing.weights import trained_names
from fxpart.profiling.op_arguments import OpArguments, tensors
from fxpart.profiling.ops import engine_seconds, measure
from fxpart.profiling.sampler import Sampler
from fxpart.profiling.session import get_measurement_environment

CPU = torch.device("cpu")
NAMES = sorted(name for name, entry in ZOO.items() if entry.available)


def rows(name: str) -> Sizes:
    made = captured(name)
    return Sizes(made, BatchSplit(2 if made.symbolic else made.batch_size, 1))


def ops(graph: fx.GraphModule, specs: Specs) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if annotation(n).block is not None and specs.op(n)]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_op_of_the_zoo_runs_alone(name: str) -> None:
    """The results have the shapes, dtypes and layouts that the graph says, and gradients flow."""
    graph, sizes = prepared(name), rows(name)
    specs = Specs(trained_names(captured(name)))
    arguments = OpArguments(graph, specs, sizes, CPU)
    seen: set[Any] = set()
    for node in ops(graph, specs):
        spec = specs.op(node)
        assert spec is not None
        if spec in seen:
            continue
        seen.add(spec)
        call = arguments.call(node)
        results = list(tensors(call.copy()()))
        wanted = [sizes.op(spec).outputs[i] for i in range(len(results))]
        for tensor, one in zip(results, wanted, strict=True):
            assert str(tensor.dtype) == f"torch.{one.dtype}", node
            if not sizes.unknown:
                assert tuple(tensor.shape) == one.shape, node
        assert len(call.wanted) == spec.gradients, node
        grows = [t for t in tensors(call()) if t.requires_grad]
        if spec.gradients:
            assert grows, node
            torch.autograd.grad(
                grows, call.wanted, [torch.ones_like(t) for t in grows], allow_unused=True
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropouts", "recommender"])
def test_nothing_is_measured_twice(name: str, tmp_path: Path) -> None:
    graph, made, sizes = prepared(name), captured(name), [rows(name)]
    here = get_measurement_environment("cpu")
    with Profile(tmp_path / "a.profile", create=True) as profile:
        seen: list[tuple[str, int, int]] = []
        first = measure(
            graph,
            made,
            sizes,
            profile,
            here,
            10.0,
            lambda *now: seen.append(now),
            date="2026-01-01",
        )
        assert first.measured == len(seen) > 3 and not first.left and not first.skipped
        kept = profile.get("ops", here, TimeQuartiles)
        assert all(t.seconds >= 0 and t.low <= t.seconds <= t.high for t in kept.values())
        again = measure(graph, made, sizes, profile, here, 10.0)
        assert (again.measured, again.known) == (0, first.measured)
        assert profile.get("ops", here, TimeQuartiles) == kept
    model = find(tmp_path / "a.profile", Cluster.local(2))
    assert isinstance(model, ProfileCostModel)
    specs, device = Specs(trained_names(made)), Cluster.local(2).devices[0]
    for node in ops(graph, specs):
        op = specs.op(node)
        assert op is not None
        for backward in (False, True) if op.gradients else (False,):
            assert model.op(sizes[0].op(op), device, backward).source == "measured", node


@pytest.mark.slow
def test_repeated_layers_are_measured_once(tmp_path: Path) -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6)))
    made = capture(layers, (torch.randn(4, 8), torch.randn(4, 8)), loss=nn.functional.mse_loss)
    graph = PassManager(all_passes()).run(PREPARE, made.graph)
    with Profile(tmp_path / "a.profile", create=True) as profile:
        here = get_measurement_environment("cpu")
        found = measure(graph, made, [Sizes(made, BatchSplit(4, 1))], profile, here, 5.0)
        # the first linear layer gives its input no gradient; relu; broadcast and the loss
        assert found.measured <= 6
        keys = profile.get("ops", here, TimeQuartiles)
        assert sum("linear" in key and "forward" in key for key in keys) == 2


@pytest.mark.slow
def test_no_time_leaves_everything(tmp_path: Path) -> None:
    with Profile(tmp_path / "a.profile", create=True) as profile:
        found = measure(prepared("mlp"), captured("mlp"), [rows("mlp")], profile,
                        get_measurement_environment("cpu"), 0.0)  # fmt: skip
        assert found.measured == 0 and found.left > 0
        assert not profile.get("ops", get_measurement_environment("cpu"), TimeQuartiles)


def test_a_sampler_counts_up_and_measures_what_takes_longer() -> None:
    seen: list[int] = []
    short = Sampler(CPU).time(seen.append, 0.02)
    assert seen == list(range(len(seen))) and short.runs >= 2
    data = torch.randn(1 << 20)
    assert Sampler(CPU).time(lambda _: data.sin(), 0.05).seconds > short.seconds
    assert engine_seconds(CPU) >= 0


@pytest.mark.slow
def test_copies_are_alike_and_apart() -> None:
    graph = prepared("side_mask")
    specs = Specs(trained_names(captured("side_mask")))
    arguments = OpArguments(graph, specs, rows("side_mask"), CPU)
    for node in ops(graph, specs):
        call = arguments.call(node)
        other = call.copy()
        pairs = list(zip(tensors(call.args), tensors(other.args), strict=True))
        for one, two in pairs:
            assert torch.equal(one, two) and one.stride() == two.stride()
            assert one.data_ptr() != two.data_ptr()
            assert one.requires_grad is two.requires_grad
        assert [t.shape for t in call.wanted] == [t.shape for t in other.wanted]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_layouts_say_how_a_tensor_lies(data: st.DataObject) -> None:
    """Against torch: row-major is "", and a tensor made from the text alone strides as it does."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    tensor = torch.zeros(shape).permute(data.draw(st.permutations(range(len(shape)))))
    for dim in range(tensor.dim()):
        change = data.draw(st.sampled_from(["", "", "narrow", "expand"]))
        if change == "narrow":
            tensor = tensor.narrow(dim, 0, data.draw(st.integers(1, tensor.shape[dim])))
        elif change == "expand" and tensor.shape[dim] == 1:
            tensor = tensor.expand(*(3 if d == dim else -1 for d in range(tensor.dim())))
    text = layout(tuple(tensor.shape), tensor.stride(), tensor.stride())
    assert (text == "") == tensor.is_contiguous()
    if text:
        assert strides(text, tensor.shape) == [
            s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1
        ]


def strides(text: str, shape: torch.Size) -> list[int]:
    """The strides of dims above 1, in order, as the text says."""
    found: dict[int, float] = {}
    step = 1.0
    for part in reversed(text.split(".")):
        if part.startswith("~"):
            found[int(part[1:])] = 0
            continue
        dim, _, longer = part.partition("x")
        top, _, bottom = (longer or "1").partition("/")
        found[int(dim)] = step * int(top) / int(bottom or 1)
        step = found[int(dim)] * shape[int(dim)]
    return [round(found[dim]) for dim in sorted(found)]


@pytest.mark.slow
def test_values_in_graphs_have_the_layout_that_runs_have() -> None:
    """Transposes, pieces and broadcasts of a real graph, run on real tensors."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(6, 18)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.mix(x).chunk(3, -1)
            scores = query.transpose(0, 1) @ key.permute(1, 2, 0)
            return (scores @ value.transpose(0, 1)).unsqueeze(2).expand(-1, -1, 3, -1)

    made = capture(Model(), (torch.randn(4, 5, 6),), loss=None)
    graph = PassManager(all_passes()).run(PREPARE, made.graph)
    specs, sizes = Specs(trained_names(made)), Sizes(made, BatchSplit(4, 1))
    arguments = OpArguments(graph, specs, sizes, CPU)
    found = set()
    for node in ops(graph, specs):
        for real, fake in zip(
            tensors(arguments.call(node)()), tensors_of(node.meta["val"]), strict=True
        ):
            said = specs.tensors(node)[0].layout
            found.add(said)
            assert [sizes.number(n) for n in map(_plain, fake.stride())] == list(real.stride())
    assert {"", "0.1x3.2"} <= found and len(found) > 3


def _plain(size: Any) -> Any:
    return expression(size)
