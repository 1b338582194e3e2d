"""Autocast follows the devices that run the program, not the device that captured it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fxpart.passes import PREPARE, all_passes
from torch import fx, nn
from zoo import ZOO

import fxpart.compiler.autocast_region as autocast_region
from fxpart.capture import capture
from fxpart.capture.flat_batch import flatten_batch
from fxpart.compiler import PassManager

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(5))


class Normalized(nn.Module):
    """A linear layer, layer norm and softmax: lists of both devices differ in the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).softmax(-1).sum()


class Own(nn.Module):
    """An autocast region for GPUs in the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            y = self.linear(x)
        return y.float().sum()


def graph(model: nn.Module, device_type: str | None, precision: str = "bf16") -> fx.GraphModule:
    captured = capture(model, (BATCH,), precision=precision, device_type=device_type)
    return PassManager(all_passes()).run(PREPARE, captured.graph)


def dtypes(graph: fx.GraphModule, name: str) -> Iterator[torch.dtype]:
    for node in graph.graph.nodes:
        if node.op == "call_function" and name in str(node.target):
            yield node.meta["val"].dtype


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device_type", "norm"),
    [("cpu", torch.bfloat16), ("cuda", torch.float32), (None, torch.bfloat16)],
)
def test_layer_norm_has_the_dtype_of_the_device(device_type: str | None, norm: torch.dtype) -> None:
    made = graph(Normalized(), device_type)
    assert list(dtypes(made, "aten.linear")) == [torch.bfloat16]
    assert list(dtypes(made, "layer_norm")) == [norm]


@pytest.mark.parametrize(
    ("device_type", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)]
)
def test_a_region_for_gpus_applies_on_gpus_only(device_type: str, dtype: torch.dtype) -> None:
    made = graph(Own(), device_type, precision="fp32")
    assert list(dtypes(made, "aten.linear")) == [dtype]


@pytest.mark.slow
def test_an_op_that_needs_numbers_is_observed_with_those_of_the_example(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = graph(Normalized(), "cpu").code
    watch = autocast_region._watch

    def refuse_symbols(region, op, args, kwargs, mode):  # type: ignore[no-untyped-def]
        sizes = [s for a in args if isinstance(a, torch.Tensor) for s in a.shape]
        if any(isinstance(size, torch.SymInt) for size in sizes):
            raise RuntimeError("Cannot call numel() on tensor with symbolic sizes/strides")
        return watch(region, op, args, kwargs, mode)

    monkeypatch.setattr(autocast_region, "_watch", refuse_symbols)
    assert graph(Normalized(), "cpu").code == wanted


class Checked(fx.Interpreter):
    """Runs a graph on real tensors and compares each dtype with the recorded one."""

    def run_node(self, n: fx.Node) -> object:
        found = super().run_node(n)
        known = n.meta.get("val")
        if isinstance(found, torch.Tensor) and isinstance(known, torch.Tensor):
            assert found.dtype == known.dtype, n.format_node()
        return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit", "transformer"])
def test_recorded_dtypes_are_those_of_a_run(name: str) -> None:
    built = ZOO[name].build()
    captured = capture(
        built.model, built.batch, loss=built.loss, batch_dims=built.batch_dims,
        precision="bf16", device_type="cuda",
    )  # fmt: skip
    made = PassManager(all_passes()).run(PREPARE, captured.graph)
    given = flatten_batch(captured.example()).tensors
    with torch.random.fork_rng():
        loss = Checked(made, garbage_collect_values=False).run(17, *given)[0]
    loss.backward()
    assert torch.isfinite(loss)


class ReadsDtype(nn.Module):
    """The code of the model reads a dtype, as normalization layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.layer_norm(x @ self.weight, (8,), self.scale)
        return y.float().square().to(y.dtype).sum()


@pytest.mark.slow
def test_a_dtype_that_code_reads_is_that_of_the_captured_device() -> None:
    """A limit that numerical_equivalence.md states: on a GPU it would be float32."""
    made = graph(ReadsDtype(), "cuda")
    (square,) = [n for n in made.graph.nodes if "aten.square" in str(n.target)]
    assert [user.meta["val"].dtype for user in square.users] == [torch.bfloat16]
