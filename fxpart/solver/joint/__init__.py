"""The joint problem: stages, devices, degrees, ZeRO, recompute, microbatches, schedule at once."""
