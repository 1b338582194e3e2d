"""Schedules: which rank does what, in which order. Plain Python, no torch."""
