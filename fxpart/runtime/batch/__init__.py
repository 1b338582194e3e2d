"""From a batch to the microbatches of each rank, and back to outputs."""
