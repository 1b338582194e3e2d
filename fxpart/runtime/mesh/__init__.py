"""The ranks of a stage's mesh: coordinates and communicators."""
