"""What asynchronous training would do to a model: its exact weight versions, in one process."""

from __future__ import annotations

from fxpart.emulator.emulation_result import EmulationResult
from fxpart.emulator.emulator import Emulator

__all__ = ["EmulationResult", "Emulator"]
