"""Checkpoints of trainers: snapshot, save and restore with :mod:`fxpart.checkpoint`."""
