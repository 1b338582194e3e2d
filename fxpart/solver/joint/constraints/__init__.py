"""User constraints on a plan: parsed, checked, and applied to a joint problem."""
