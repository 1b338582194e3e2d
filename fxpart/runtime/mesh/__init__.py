"""Ranks of a stage's mesh: mesh ranks and communicators."""
