"""What users ask of a plan, in their words: read, checked, and applied to a joint problem."""
