"""Plans: the model of their JSON, files, checks, migration, comparison. No torch."""

from __future__ import annotations

from fxpart.plan.model import Plan

__all__ = ["Plan"]
