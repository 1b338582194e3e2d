"""Dtypes in checkpoints: bytes per element and safetensors name."""

from __future__ import annotations

# By torch's name: bytes, and the safetensors name; None: stored as bytes with another dim.
DTYPES: dict[str, tuple[int, str | None]] = {
    "float64": (8, "F64"),
    "float32": (4, "F32"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e8m0fnu": (1, "F8_E8M0"),
    "float8_e4m3fnuz": (1, None),
    "float8_e5m2fnuz": (1, None),
    "complex128": (16, None),
    "complex64": (8, None),
    "complex32": (4, None),
    "int64": (8, "I64"),
    "int32": (4, "I32"),
    "int16": (2, "I16"),
    "int8": (1, "I8"),
    "uint64": (8, "U64"),
    "uint32": (4, "U32"),
    "uint16": (2, "U16"),
    "uint8": (1, "U8"),
    "bool": (1, "BOOL"),
}
NAMES = {word: name for name, (_, word) in DTYPES.items() if word is not None}  # Torch's.


def itemsize(dtype: str) -> int:
    """Return the bytes per element; KeyError for an unsupported dtype."""
    return DTYPES[dtype][0]


def to_header_entry(dtype: str, sizes: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and shape in a safetensors header for an array."""
    size, name_ = DTYPES[dtype]
    return (name_, sizes) if name_ is not None else ("U8", (*sizes, size))
