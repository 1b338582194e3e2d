"""Measure on the devices at hand: ops, stages, links, crowding, memory. Fills profiles."""
