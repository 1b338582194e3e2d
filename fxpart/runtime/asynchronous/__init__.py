"""Pipelines without flushes: each stage updates its own weights."""
