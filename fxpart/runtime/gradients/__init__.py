"""Gradients between a backward and an update: buckets, reduction, norms, tied parameters."""
