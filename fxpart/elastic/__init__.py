"""Elastic training: a changing number of ranks, with plans made in advance."""
