"""Optimizers of a trainer: parameter groups, ZeRO shards, state, the user's instances."""
