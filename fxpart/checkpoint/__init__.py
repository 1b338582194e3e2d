"""Checkpoints as files: written beside and renamed, every byte under a digest, keyed by name.

Nothing here knows torch: tensors are bytes with a dtype's name, a shape and the region of the whole
that they hold. :mod:`fxpart.runtime.checkpointing` makes them of a trainer and gives them back.
"""
