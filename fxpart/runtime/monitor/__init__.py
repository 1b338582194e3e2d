"""Measurements of a run: times, memory, clocks, stragglers."""
