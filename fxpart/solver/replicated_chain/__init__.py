"""Replicated stages on heterogeneous devices: blocks, devices, and round-robin routing."""
