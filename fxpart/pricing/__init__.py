"""The parts of pricing: op specs from the graph, sizes, variants, memory, weights, devices."""
