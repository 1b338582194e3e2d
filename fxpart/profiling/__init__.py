"""Measure on the devices at hand: ops, stages, links, contention, memory. Fills profiles."""
