"""Clusters: devices and links, files, presets, detection, importers. No torch."""

from __future__ import annotations

from fxpart.cluster.devices import Device, Link
from fxpart.cluster.model import Cluster

__all__ = ["Cluster", "Device", "Link"]
