"""Conversion between checkpoints of fxpart and other formats, without torch.

A format is a module with a class that reads it (a ``CheckpointSource``) and a function that writes
it; :mod:`~fxpart.checkpoint.exchange.conversion` lists them. One tensor is in memory at a time.
Pickles are neither read nor written.
"""
