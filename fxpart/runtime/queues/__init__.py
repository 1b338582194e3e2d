"""Copies of stages that take microbatches from queues, whichever is free; one that dies is missed.

See ``fxpart/docs/heterogeneous_devices.md``.
"""
