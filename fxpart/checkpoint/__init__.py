"""Checkpoint files: written atomically, every byte covered by a digest, keyed by parameter name.

This package does not import torch: tensors are bytes with a dtype name, a shape and the stored
region of the whole. :mod:`fxpart.runtime.checkpointing` saves and restores trainers with it.
"""
