"""Construction of trainers from programs, and stages for evaluation."""
