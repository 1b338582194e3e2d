"""Split batches into the microbatches of each rank, and gather outputs."""
