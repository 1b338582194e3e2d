"""What we write is read by torch's own readers and by transformers, and the other way round."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_sources import Numbers
from ranks import Pool
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from fxpart.checkpoint.exchange import huggingface
from fxpart.checkpoint.exchange.conversion import ConversionOptions, convert
from fxpart.checkpoint.exchange.huggingface import KeyPrefixes, SafetensorsFolder
from fxpart.checkpoint.exchange.source import TensorType
from fxpart.checkpoint.reader import Checkpoint

PREFIXES = KeyPrefixes()


def trained() -> tuple[nn.Module, dict[str, Any]]:
    """A model and the optimizer state by name, after two steps of Adam."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3).to(torch.bfloat16))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model[2](model[1](model[0](torch.randn(8, 6))).bfloat16()).sum().backward()
        optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()["state"]
    return model, {"state": {names[i]: held for i, held in state.items()}}


def numbers_of(tensors: dict[str, torch.Tensor]) -> Numbers:
    """The same as a source of ours."""
    outlines = {
        key: TensorType(str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for key, t in tensors.items()
    }
    numbers = Numbers(outlines)
    for key, tensor in tensors.items():
        flat = tensor.detach().contiguous().reshape(-1)
        numbers.data[key] = flat.view(torch.uint8).numpy() if flat.numel() else numbers.data[key]
    return numbers


def by_key(model: nn.Module, optimizer: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for name, held in optimizer["state"].items():
        found |= {f"optimizer/{name}/{slot}": value for slot, value in held.items()}
    return found


def zeros(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return torch.zeros_like(given)
    return {key: zeros(value) for key, value in given.items()}


def equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    return all(equal(found[key], value) for key, value in wanted.items())


@pytest.mark.parametrize("file_bytes", [5_000_000_000, 100])
def test_torch_reads_ours(tmp_path: Path, file_bytes: int) -> None:
    model, optimizer = trained()
    source = numbers_of(by_key(model, optimizer))
    huggingface.write_folder(
        tmp_path / "dcp", source, prefixes=PREFIXES, shards=True, file_bytes=file_bytes
    )
    wanted = {"model": dict(model.state_dict()), "optimizer": optimizer}
    found = zeros(wanted)
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path / "dcp")), no_dist=True)
    assert equal(found, wanted)


@pytest.mark.parametrize("several", [False, True])
def test_ours_reads_torchs(tmp_path: Path, several: bool) -> None:
    model, optimizer = trained()
    state = {"model": dict(model.state_dict()), "optimizer": optimizer}
    tensors = by_key(model, optimizer)
    names = [PREFIXES.name(key) for key in tensors]
    files = {name: i % 3 + 1 for i, name in enumerate(names)} if several else None
    writer = HuggingFaceStorageWriter(str(tmp_path / "dcp"), fqn_to_index_mapping=files)
    dcp.save(state, storage_writer=writer, no_dist=True)
    done = convert(tmp_path / "dcp", tmp_path / "ours", "fxpart")
    assert done.source == "dcp" and not done.left_out
    source = numbers_of(tensors)
    found = Checkpoint.open(done.path)
    assert set(found.manifest.tensors) == set(tensors)
    for key in tensors:
        assert found.read(key).tobytes() == source.data[key].tobytes(), key


def save_sharded(folder: str, consolidate: bool) -> None:
    """On each rank: parts of two tensors, cut along different dims, and one that all hold."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {"model": whole_state()}
    for name, dim in (("a", 0), ("b", 1)):
        state["model"][name] = distribute_tensor(state["model"][name], mesh, [Shard(dim)])
    writer = HuggingFaceStorageWriter(
        folder, save_distributed=True, enable_consolidation=consolidate
    )
    dcp.save(state, storage_writer=writer)


def load_sharded(folder: str) -> bool:
    """On each rank: into DTensors that are cut otherwise."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, init_device_mesh
    from torch.distributed.tensor import zeros as empty

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = whole_state()
    state: dict[str, Any] = {
        "a": empty(*whole["a"].shape, device_mesh=mesh, placements=[Shard(1)]),
        "b": empty(*whole["b"].shape, device_mesh=mesh, placements=[Shard(0)]),
        "c": torch.zeros(3),
    }
    dcp.load({"model": state}, storage_reader=HuggingFaceStorageReader(folder))
    return all(
        torch.equal(t.full_tensor() if name != "c" else t, whole[name])  # type: ignore[attr-defined]
        for name, t in state.items()
    )


def whole_state() -> dict[str, torch.Tensor]:
    """7 rows do not part evenly in two or three."""
    draw = torch.Generator().manual_seed(1)
    shapes = {"a": (7, 4), "b": (3, 7), "c": (3,)}
    return {name: torch.randn(*shape, generator=draw) for name, shape in shapes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("consolidate", [False, True])
def test_what_ranks_saved(tmp_path: Path, pool: Pool, consolidate: bool) -> None:
    folder = tmp_path / "dcp"
    pool.run(save_sharded, str(folder), consolidate, ranks=3)
    found = SafetensorsFolder(folder / "sharded" if consolidate else folder, PREFIXES)
    for name, tensor in whole_state().items():
        assert found.read(f"model/{name}").tobytes() == tensor.numpy().tobytes()
    if consolidate:
        whole = SafetensorsFolder(folder, PREFIXES)
        assert all(whole.read(key).tobytes() == found.read(key).tobytes() for key in whole.tensors)


@pytest.mark.slow
def test_ranks_read_ours(tmp_path: Path, pool: Pool) -> None:
    source = numbers_of({f"model/{name}": t for name, t in whole_state().items()})
    huggingface.write_folder(tmp_path / "dcp", source, prefixes=PREFIXES, shards=True)
    assert pool.run(load_sharded, str(tmp_path / "dcp"), ranks=2) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_ours_and_ours_reads_its(tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=8, tie_word_embeddings=tied
    )
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "theirs")
    done = convert(tmp_path / "theirs", tmp_path / "ours", "fxpart")
    convert(
        done.path, tmp_path / "back", "hf",
        options=ConversionOptions(config=tmp_path / "theirs" / "config.json", file_bytes=5000),
    )  # fmt: skip
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    fresh = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "back")
    wanted, found = model.state_dict(), fresh.state_dict()
    assert set(wanted) == set(found)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert equal(copy.deepcopy(found), wanted)
