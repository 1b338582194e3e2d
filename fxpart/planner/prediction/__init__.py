"""From a joint choice to what its plan says: predictions, words, what was rejected and why."""
