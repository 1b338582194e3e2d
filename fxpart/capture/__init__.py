"""Capture an unmodified nn.Module as a torch.fx graph with named state and inputs."""

from __future__ import annotations

from fxpart.capture.api import capture
from fxpart.capture.captured_model import CapturedModel
from fxpart.capture.diagnosis import Diagnosis, diagnose

__all__ = ["CapturedModel", "Diagnosis", "capture", "diagnose"]
