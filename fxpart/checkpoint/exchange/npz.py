"""NumPy's .npz files without pickles: uncompressed arrays in a zip file."""

from __future__ import annotations

import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from fxpart.checkpoint import files
from fxpart.checkpoint.dtypes import DTYPES
from fxpart.checkpoint.exchange.source import TensorType, as_view, make_foreign_file_error
from fxpart.checkpoint.regions import Bytes

_TIME = (1980, 1, 1, 0, 0, 0)  # fixed, so that equal input gives equal bytes
_END = ".npy"
_FAULTS = (
    OSError, ValueError, TypeError, KeyError, EOFError, SyntaxError, RecursionError, MemoryError,
    NotImplementedError, RuntimeError, struct.error, tokenize.TokenError, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip
# NumPy has no bfloat16: PaddlePaddle, which has no uint16, stores its bits as uint16.
BITS = "bfloat16"


def holds(dtype: str) -> bool:
    """Return whether such a file supports a dtype, in PaddlePaddle's convention."""
    return dtype == BITS or (dtype != "uint16" and dtype in _KINDS)


class NpzArrays:
    """The arrays of an .npz file, read one at a time; FXP110 for other files.

    Only uncompressed arrays are read, so no array needs more memory than the file.
    """

    def __init__(self, path: Path) -> None:
        """Read the table and each array's header."""
        self._path = path
        self.tensor_types: dict[str, TensorType] = {}
        self._entries: dict[str, tuple[str, int]] = {}
        try:
            with (
                files.open_for_reading(Path(os.path.realpath(path))) as (raw, size),
                zipfile.ZipFile(raw) as table,
            ):
                for entry in table.infolist():
                    self._add_entry(table, entry, size)
        except _FAULTS as cause:
            raise self._make_error(cause) from cause

    def read(self, name: str) -> Bytes:
        """Return an array's bytes in row-major order, 1-d."""
        entry, start = self._entries[name]
        tensor_type = self.tensor_types[name]
        data = np.empty(tensor_type.size, np.uint8)
        try:
            with (
                files.open_for_reading(Path(os.path.realpath(self._path))) as (raw, _),
                zipfile.ZipFile(raw) as table,
                table.open(entry) as file,
            ):
                dtype, shape, fortran = _read_header(file)
                if file.tell() != start:
                    raise ValueError("it was modified while it was read")
                _fill(file, data)
        except _FAULTS as cause:
            raise self._make_error(cause) from cause
        array = data.view(dtype)
        if dtype.byteorder == ">":
            array = array.astype(dtype.newbyteorder("<"))
        if fortran:
            array = np.ascontiguousarray(array.reshape(shape, order="F"))
        return array.reshape(-1).view(np.uint8)

    def _add_entry(self, table: zipfile.ZipFile, entry: zipfile.ZipInfo, size: int) -> None:
        name = entry.filename.removesuffix(_END)
        if name == entry.filename or name in self.tensor_types:
            raise ValueError(f"{entry.filename[:80]!r} is not an array, or a duplicate")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError("it is compressed; write it with numpy.savez")
        if entry.file_size > size:
            raise ValueError(f"{name[:80]!r} is longer than the file")
        with table.open(entry) as file:
            dtype, shape, _ = _read_header(file)
            start = file.tell()
        kind = _NAMES.get(dtype.newbyteorder("=").str.lstrip("<>|="))
        if kind is None:
            raise ValueError(f"{name[:80]!r} has the dtype {dtype}, which torch does not support")
        if entry.file_size - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the size of {name[:80]!r} does not match its shape {shape}")
        self.tensor_types[name] = TensorType(kind, shape)
        self._entries[name] = (entry.filename, start)

    def _make_error(self, cause: BaseException) -> Exception:
        why = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        return make_foreign_file_error(
            str(self._path), f"it is not a complete .npz file: {why[:200]}"
        )


def write_arrays(
    path: Path, tensor_types: Mapping[str, TensorType], read: Callable[[str], Bytes]
) -> None:
    """Write a new .npz file as numpy.savez does, synced to disk; OSError.

    read: returns an array's bytes, called in order.
    """
    with files.create_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as table:
        for name, tensor_type in tensor_types.items():
            info = zipfile.ZipInfo(name + _END, _TIME)
            info.external_attr = 0o600 << 16
            with table.open(info, "w", force_zip64=True) as entry:
                kind = np.dtype(
                    _KINDS["uint16" if tensor_type.dtype == BITS else tensor_type.dtype]
                )
                header = {"descr": kind.str, "fortran_order": False, "shape": tensor_type.shape}
                npy.write_array_header_1_0(entry, header)
                data = read(name)
                assert data.nbytes == tensor_type.size, name
                entry.write(as_view(data))


def _read_header(file: Any) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Return the dtype, shape and order of an array; ValueError."""
    version = npy.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = npy.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, fortran, dtype = npy.read_array_header_2_0(file)
    else:
        raise ValueError(f"version {version} of NumPy's format is not supported")
    if dtype.hasobject or dtype.fields is not None or dtype.subdtype is not None:
        raise ValueError("it contains pickled objects")
    if len(shape) > 64 or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError("its shape is invalid")
    return dtype, shape, fortran


def _fill(file: Any, data: Bytes) -> None:
    remaining = as_view(data)
    while remaining:
        part = file.read(min(len(remaining), 1 << 24))
        if not part:
            raise EOFError("it is truncated")
        remaining[: len(part)] = part
        remaining = remaining[len(part) :]


_KINDS = {
    "float64": "f8", "float32": "f4", "float16": "f2", "complex64": "c8", "complex128": "c16",
    "int64": "i8", "int32": "i4", "int16": "i2", "int8": "i1", "uint16": "u2", "uint8": "u1",
    "uint32": "u4", "uint64": "u8", "bool": "b1",
}  # fmt: skip
assert set(_KINDS) <= set(DTYPES)
_NAMES = {kind: BITS if name == "uint16" else name for name, kind in _KINDS.items()}
