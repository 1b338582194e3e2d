"""Pricing: op specs from the graph, sizes, memory, weights, devices, and the solvers' problems."""
