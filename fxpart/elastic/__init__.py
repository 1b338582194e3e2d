"""Another number of ranks in the middle of a run: plans made in advance, policy, who moves."""
