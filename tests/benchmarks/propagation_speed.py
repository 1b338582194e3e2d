"""Seconds to propagate placements through a generated transformer of 20,000 nodes.

    python tests/benchmarks/propagation_speed.py

On one thread, a mesh of two axes: the batch cut by one, feed-forward and attention by the other
from one annotation for each weight. Medians over the rounds, for each pass alone (without the
verifier) and by the number of nodes, to show that the time is linear.
"""

from __future__ import annotations

import json
import statistics
import time

from record import parser, write

SEEDS = {
    "input:x": "dp:S(0)",
    "qkv*": "tp:S(0,3)",
    "up*": "tp:S(0)",
    "gate*": "tp:S(0)",
    "out*": "tp:S(1)",
    "down*": "tp:S(1)",
}


def measure(layers: int, rounds: int) -> dict[str, float]:
    """Nodes, seconds of both passes, and distinct ops of one graph."""
    from fxpart.passes.annotate import AnnotatePass
    from fxpart.passes.propagate import PropagatePass
    from fxpart.passes.propagation.axis_rules import GraphRules
    from layers_of_ops import deep

    from fxpart.annotations.graph_values import sharding
    from fxpart.sharding import Mesh

    graph = deep(layers)
    taken: dict[str, list[float]] = {"annotate": [], "propagate": []}
    for _ in range(rounds):
        for item in (AnnotatePass("dp=2,tp=2", json.dumps(SEEDS)), PropagatePass()):
            start = time.process_time()
            item.run(graph)
            taken[item.name].append(time.process_time() - start)
    held = [known for n in graph.graph.nodes if (known := sharding(n)) is not None]
    rules = GraphRules(Mesh.parse("dp=2"))
    for node in graph.graph.nodes:
        if node.op == "call_function":
            rules.of(node)
    return {
        "nodes": len(graph.graph.nodes),
        "distinct_ops": rules.looked_up,
        "decided_share": round(sum(None not in known.strategy for known in held) / len(held), 3),
        **{f"{name}_s": round(statistics.median(times), 3) for name, times in taken.items()},
    }


def main() -> None:
    """A small, a middle and the large graph."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--rounds", type=int, default=3)
    options = options_parser.parse_args()
    import torch

    torch.set_num_threads(1)
    figures = {str(layers): measure(layers, options.rounds) for layers in (32, 128, 480)}
    write("propagation_speed", figures, options)


if __name__ == "__main__":
    main()
