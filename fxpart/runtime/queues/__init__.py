"""Replicated stages that take microbatches from queues and survive the loss of a replica.

See ``fxpart/docs/heterogeneous_devices.md``.
"""
