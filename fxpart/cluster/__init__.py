"""Clusters: devices and links, files, presets, detection, importers. No torch."""

from __future__ import annotations

from fxpart.cluster.model import Cluster, Device, Link

__all__ = ["Cluster", "Device", "Link"]
