"""What asynchronous training would do to a model: its exact weight versions, in one process."""

from __future__ import annotations

from fxpart.emulate.emulation import Emulation
from fxpart.emulate.emulator import Emulator

__all__ = ["Emulation", "Emulator"]
