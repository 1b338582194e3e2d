"""Last events of each rank, in files that survive it, and their analysis."""
