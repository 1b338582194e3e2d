"""Emulation of asynchronous training in one process, with exact weight versions."""

from __future__ import annotations

from fxpart.emulator.emulation_result import EmulationResult
from fxpart.emulator.emulator import Emulator
from fxpart.plan.staleness_penalty import StalenessPenalty

__all__ = ["EmulationResult", "Emulator", "StalenessPenalty"]
