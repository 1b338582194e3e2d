"""Weights, exported programs and reproducers."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path

from fuzz.mutations import Sample
from fuzz.reading import plain, scratch

# Weights and programs


def with_length(header: bytes) -> bytes:
    """A safetensors file with this header and the 26 bytes of HEADER's tensors."""
    return struct.pack("<Q", len(header)) + header + bytes(26)


HEADER = (
    b'{"__metadata__":{"format":"pt"},"a.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
    b'"b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}}'
)


def read_weights(path: Path) -> object:
    from fxpart.codegen.tensor_files import TensorFiles

    files = TensorFiles(path)
    return [files.read(name) for name in files.names()]


def weights() -> list[Sample]:
    return [Sample(HEADER, "json", with_length), *plain("binary", with_length(HEADER))]


def read_index(data: bytes) -> object:
    from fxpart.checkpoint.safetensors_index import INDEX
    from fxpart.codegen.tensor_files import TensorFiles

    folder = scratch() / "indexed"
    folder.mkdir(exist_ok=True)
    (folder / INDEX).write_bytes(data)
    (folder / "one.safetensors").write_bytes(with_length(HEADER))
    return TensorFiles(folder).names()


def index() -> list[Sample]:
    return plain(
        "json", '{"metadata":{},"weight_map":{"a.weight":"one.safetensors","b":"one.safetensors"}}'
    )


@cache
def program() -> dict[str, bytes]:
    """The files of an exported program of two stages, the manifest left out."""
    import torch
    from stage_runs import Stages, assigned, captured_of, prepared

    from fxpart.codegen.materialization import constants_of
    from fxpart.codegen.program_archive import export

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
    captured = captured_of(model, (torch.randn(4, 3),), torch.mean, batch_size=4)
    built = Stages(captured, assigned(prepared(captured), (0, 1)))
    export(
        scratch() / "exported", plan="{}\n", spec=built.spec, sources=built.sources,
        actions=["0F0\n", "1F0\n"], constants=constants_of(built.spec, built.captured.state),
    )  # fmt: skip
    files = {p.name: p.read_bytes() for p in (scratch() / "exported").iterdir()}
    del files["manifest.json"]
    return files


def manifest(files: dict[str, bytes]) -> bytes:
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    return json.dumps({"format": "fxpart-program", "version": 2, "files": digests}).encode()


def read_program(name: str) -> Callable[[bytes], object]:
    """A program of which one file is changed; its digest is right, so that the file is read."""

    def read(data: bytes) -> object:
        from fxpart.codegen.program_archive import load_exported

        folder = scratch() / f"program-{name}"
        if not folder.exists():
            folder.mkdir()
            for other, held in program().items():
                (folder / other).write_bytes(held)
        files = {**program(), name: data}
        (folder / name).write_bytes(data)
        if name != "manifest.json":
            (folder / "manifest.json").write_bytes(manifest(files))
        found = load_exported(folder, stages=())  # the stages' own text would be run
        return [found.mesh_rank_program(mesh_rank) for mesh_rank in range(2)]

    return read


def programs(name: str) -> Callable[[], list[Sample]]:
    return lambda: plain(
        "json", manifest(program()) if name == "manifest.json" else program()["program.json"]
    )


def constants() -> list[Sample]:
    """Tensors that go with a program, which fill their file."""

    def sealed(header: bytes) -> bytes:
        return struct.pack("<Q", len(header)) + header + bytes(26)

    return [Sample(HEADER, "json", sealed), *plain("binary", sealed(HEADER))]


@cache
def reproducer() -> dict[str, bytes]:
    """The files that a failing pass leaves."""
    import torch
    from stage_runs import captured_of

    from fxpart.compiler.reproducer import write_reproducer

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
    captured = captured_of(model, (torch.randn(4, 3),), torch.mean, batch_size=4)
    folder = write_reproducer(scratch(), captured.graph, "simplify", "it failed")
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def read_reproducer(name: str) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        from fxpart.compiler.reproducer import read_reproducer

        folder = scratch() / "reproducer"
        folder.mkdir(exist_ok=True)
        for other, held in {**reproducer(), name: data}.items():
            (folder / other).write_bytes(held)
        return read_reproducer(folder)

    return read


def reproducers(name: str) -> Callable[[], list[Sample]]:
    return lambda: plain("json", reproducer()[name])
