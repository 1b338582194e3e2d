"""Cuts for a stream of microbatches that is never drained: asynchronous 1F1B."""
