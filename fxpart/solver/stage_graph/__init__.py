"""Stages of parallel branches: any split of the blocks whose stages form an acyclic graph."""
