"""Capture: an unmodified nn.Module becomes a torch.fx graph with named state and inputs."""

from __future__ import annotations

from fxpart.capture.captured import Captured
from fxpart.capture.capturing import capture
from fxpart.capture.doctor import Diagnosis, diagnose

__all__ = ["Captured", "Diagnosis", "capture", "diagnose"]
