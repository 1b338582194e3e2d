"""The last events of each rank, in files that outlive it, and what can be told from them."""
