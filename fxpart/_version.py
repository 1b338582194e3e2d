"""The version, alone, so that the build reads it without importing anything."""

from __future__ import annotations

__version__ = "0.1.0"
