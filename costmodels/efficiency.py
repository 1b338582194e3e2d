"""Fractions of a data sheet that kernels reach, by GPU architecture (architectures.toml).

A kernel takes start + (a² + b²)^½ with a = FLOPs / achieved FLOP/s and b = bytes / achieved
bytes/s: near the corner of the roofline neither resource is used fully. On an H100 this predicts
the matrix products of 30 shapes with a median error of 6 % (tests/costmodels/test_efficiency.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import hypot
from typing import TYPE_CHECKING

from fxpart.cluster.presets import architecture_data

from .op_classes import op_class

if TYPE_CHECKING:
    from fxpart.cluster.devices import Device
    from fxpart.costs import OpSpec

START = 2e-6  # seconds between two kernels while the host is ahead
_WIDE = ("float32", "float64")
_ROW_BYTES = 16  # rows of tensor-core operands start at multiples of this


@dataclass(frozen=True)
class Efficiency:
    """Achieved fractions of one architecture; see architectures.toml."""

    matmul: float
    float8: float
    float32: float
    attention: float
    attention_backward: float
    flash1: float
    flash2: float
    unaligned: float
    memory: float
    normalization: float
    update: float
    sustained: float = 1.0

    def arithmetic(self, op: OpSpec, dtype: str, backward: bool) -> float:
        """Return the fraction of the peak FLOP/s that the op reaches where arithmetic limits it.

        A device with little power reaches less of it than its architecture. FLOPs of a causal mask
        are counted in full, so that skipping half of them doubles it.
        """
        return self.sustained * self._architecture(op, dtype, backward)

    def _architecture(self, op: OpSpec, dtype: str, backward: bool) -> float:
        if op_class(op) == "attention" and dtype not in _WIDE:
            found = self.attention_backward if backward else self.attention
            head = op.inputs[0].shape[-1]
            narrow = min(1.0, (head / 128) ** 0.5) if isinstance(head, int) else 1.0
            generation = op.attribute("generation")
            early = self.flash1 if generation == 1 else self.flash2 if generation == 2 else 1.0
            causal = op.key == "attention_rows" or op.attribute("is_causal", "5") is True
            return found * narrow * early * (2.0 if causal else 1.0)
        if dtype in _WIDE:
            return self.float32
        found = self.float8 if dtype == "float8" else self.matmul
        return found * (1.0 if _is_aligned(op) else self.unaligned)

    def traffic(self, op: OpSpec) -> float:
        """Return the fraction of the memory bandwidth that the op reaches."""
        return self.normalization if op_class(op) == "normalisation" else self.memory

    def kernel(self, arithmetic: float, traffic: float) -> float:
        """Return the seconds of a kernel from those of its arithmetic and of its traffic."""
        return START + hypot(arithmetic, traffic)


def _is_aligned(op: OpSpec) -> bool:
    """Return whether rows of all 16-bit operands and results are multiples of 16 bytes."""
    rows = (t.shape[-1] for t in (*op.inputs, *op.outputs) if len(t.shape) > 1)
    return all(not isinstance(size, int) or size * 2 % _ROW_BYTES == 0 for size in rows)


@cache
def find_efficiency(model: str) -> Efficiency | None:
    """Return the efficiency of a device model; None for CPUs and models without a data file."""
    data = architecture_data(model)
    if data is None:
        return None
    return Efficiency(**{name: data[name] for name in Efficiency.__dataclass_fields__})


def copy_bandwidth(device: Device) -> float:
    """Return the bytes/s that copies and elementwise operations reach in the device's memory.

    On a GPU as measured, else by its architecture. Elsewhere the nominal value.
    """
    found = find_efficiency(device.model) if device.kind == "gpu" else None
    if found is None:
        return device.bandwidth
    measured = device.measured if isinstance(device.measured, dict) else {}
    return measured.get("bandwidth", found.memory * device.bandwidth)


def update_bandwidth(device: Device) -> float:
    """Return the bytes/s that a fused optimizer step reaches in the device's memory."""
    found = find_efficiency(device.model) if device.kind == "gpu" else None
    return copy_bandwidth(device) * (found.update / found.memory if found is not None else 1.0)


def update_launch(device: Device) -> float:
    """Return the seconds of a weight's update besides its bytes.

    On a GPU one kernel updates many weights, so that only the host's work for a weight is left: a
    third of an eager op's, an assumption.
    """
    return device.launch / 3 if device.kind == "gpu" else device.launch
