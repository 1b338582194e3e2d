"""Gradients between backward and update: buckets, reduction, norms, tied parameters."""
