"""Weights from live tensors, safetensors and init functions; every fault at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from stage_runs import Stages, assigned, captured_of, prepared, tensors
from torch import nn

from fxpart.codegen.materialization import constants_of, materialize
from fxpart.codegen.stage_loader import load_stage
from fxpart.compiler import BLOCKS_KEY
from fxpart.errors import FxpartError


class Small(nn.Module):
    """A tie, a buffer that is not saved, a frozen layer, a lifted constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("steps", torch.tensor([1.0, 2.0, 3.0, 4.0]), persistent=False)
        self.register_buffer("saved", torch.ones(4))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x)) * self.steps
        x = torch.relu(self.middle(x)) + self.saved + torch.tensor([0.5, 1.0, 1.5, 2.0])
        return self.last(x)


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.fixture(scope="module")
def built() -> Stages:
    torch.manual_seed(0)
    captured = captured_of(Small(), (torch.randn(4, 4),), mean, batch_size=4)
    graph = prepared(captured)
    return Stages(captured, assigned(graph, range(min(3, len(graph.meta[BLOCKS_KEY])))))


def empty(built: Stages) -> list[nn.Module]:
    pairs = zip(built.sources, built.spec.stages, strict=True)
    return [load_stage(text, stage) for text, stage in pairs]


def fill(built: Stages, source: Any, **options: Any) -> list[nn.Module]:
    modules = empty(built)
    for module in modules:
        materialize(module, built.spec, source, **options)
    return modules


def same(built: Stages, modules: list[nn.Module]) -> None:
    for stage, module in zip(built.spec.stages, modules, strict=True):
        for state in stage.state:
            tensor = getattr(module, state.attribute)
            assert torch.equal(tensor, built.captured.state[state.name]), state.name
            assert tensor.requires_grad == state.requires_grad
            assert isinstance(tensor, nn.Parameter) == (state.kind == "parameter")
            assert tensor.data_ptr() != built.captured.state[state.name].data_ptr()


@pytest.mark.slow
def test_stages_are_empty_until_filled(built: Stages) -> None:
    for module in empty(built):
        for tensor in (*module.parameters(), *module.buffers()):
            assert tensor.is_meta


@pytest.mark.slow
def test_live_tensors_are_copied(built: Stages) -> None:
    same(built, fill(built, built.captured.state))


def test_the_description(built: Stages) -> None:
    states = {s.name: s for stage in built.spec.stages for s in stage.state}
    assert not states["middle.weight"].requires_grad
    assert not states["steps"].persistent
    assert states["saved"].persistent
    assert {s.kind for s in states.values()} == {"parameter", "buffer", "constant"}
    assert set(built.spec.unused) == {"unused.weight", "unused.bias"}
    assert built.spec.ties == {"first.weight": (0, 2)}


def test_checkpoint_file(built: Stages, tmp_path: Path) -> None:
    model = Small()
    checkpoint = {n: t.clone().contiguous() for n, t in built.captured.state.items()}
    checkpoint = {n: t for n, t in checkpoint.items() if n in model.state_dict()}
    # Only the other name of the tie is stored, as transformers does.
    checkpoint["last.weight"] = checkpoint.pop("first.weight")
    save_file(checkpoint, tmp_path / "model.safetensors")
    constants = constants_of(built.spec, built.captured.state)
    assert "steps" in constants
    assert "saved" not in constants
    same(built, fill(built, tmp_path / "model.safetensors", constants=constants))
    same(built, fill(built, tmp_path, constants=constants))


def test_only_the_stages_tensors_are_read(built: Stages) -> None:
    class Watched(dict[str, torch.Tensor]):
        read: ClassVar[set[str]] = set()

        def __getitem__(self, name: str) -> torch.Tensor:
            self.read.add(name)
            return super().__getitem__(name)

    source = Watched(built.captured.state)
    module = empty(built)[1]
    materialize(module, built.spec, source)
    assert Watched.read == {s.name for s in built.spec.stages[1].state}


def test_init_function(built: Stages) -> None:
    def init(name: str, meta: torch.Tensor) -> torch.Tensor:
        assert meta.is_meta
        generator = torch.Generator().manual_seed(len(name))
        return torch.randn(meta.shape, generator=generator, dtype=meta.dtype)

    modules = fill(built, init, constants=constants_of(built.spec, built.captured.state))
    first, last = built.spec.stages[0].state, built.spec.stages[2].state
    a = next(getattr(modules[0], s.attribute) for s in first if s.name == "first.weight")
    b = next(getattr(modules[2], s.attribute) for s in last if s.name == "first.weight")
    assert torch.equal(a, b)
    steps = next(getattr(modules[0], s.attribute) for s in first if s.name == "steps")
    assert torch.equal(steps, built.captured.state["steps"])


def test_all_faults_at_once_and_nothing_changed(built: Stages) -> None:
    source = dict(built.captured.state)
    del source["first.bias"]
    source["first.weight"] = torch.zeros(3, 4)
    source["steps"] = torch.zeros(4, dtype=torch.int64)
    source["stranger"] = torch.zeros(1)
    module = empty(built)[0]
    with pytest.raises(FxpartError) as caught:
        materialize(module, built.spec, source)
    text = str(caught.value)
    assert {p.code for p in caught.value.problems} == {"FXP110"}
    for part in ("first.bias", "[3, 4]", "torch.int64", "stranger"):
        assert part in text
    assert all(t.is_meta for t in (*module.parameters(), *module.buffers()))
    del source["stranger"]
    with pytest.raises(FxpartError) as caught:
        materialize(module, built.spec, source, strict=False)
    assert len(caught.value.problems) == 3


def test_meta_tensors_are_no_weights(built: Stages) -> None:
    source = {n: t.to("meta") for n, t in built.captured.state.items()}
    with pytest.raises(FxpartError, match="no data"):
        fill(built, source)


def test_floating_weights_are_converted(built: Stages) -> None:
    source = {
        n: t.double() if t.is_floating_point() else t for n, t in built.captured.state.items()
    }
    same(built, fill(built, source))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: None,
        lambda path: (path / "model.safetensors").write_bytes(b"not at all"),
        lambda path: (path / "model.safetensors").mkdir(),
    ],
)
def test_broken_files(built: Stages, tmp_path: Path, write: Callable[[Path], Any]) -> None:
    write(tmp_path)
    with pytest.raises(FxpartError) as caught:
        fill(built, tmp_path)
    assert caught.value.code == "FXP110"
    with pytest.raises(FxpartError):
        fill(built, tmp_path / "nothing.safetensors")


def test_two_files_with_one_name(built: Stages, tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"first.bias": torch.zeros(4)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(FxpartError, match="also in another file"):
        fill(built, tmp_path)


def test_filled_stages_compute(built: Stages) -> None:
    inputs = tensors(built.captured, (torch.randn(4, 4),))
    assert torch.isfinite(built.run(inputs, 0)[built.spec.loss])
