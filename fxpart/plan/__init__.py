"""Plans: data model, files, checks, migration and comparison, without torch."""

from __future__ import annotations

from fxpart.plan.model import Plan

__all__ = ["Plan"]
