"""Random placement problems for the tests of their solvers."""

from __future__ import annotations

import random
from typing import Literal

from fxpart.solver.placement.problem import NodeCosts, PlacementEdge, PlacementProblem

Form = Literal["chain", "tree", "residual", "random"]


def problem(
    seed: int, nodes: int = 6, *, form: Form = "random", most: int = 4, tight: float = 0.5,
    points: bool = False,
) -> PlacementProblem:  # fmt: skip
    """Small integer costs, so there are ties; ``tight`` of the way from least to most bytes."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, most) for _ in range(nodes)]
    kinds = tuple(
        NodeCosts(
            seconds=tuple(float(draw.randint(0, 9)) for _ in range(size)),
            standing=tuple(float(draw.randint(0, 9)) for _ in range(size)),
            temporary=tuple(float(draw.randint(0, 5)) for _ in range(size)) if points else (),
        )
        for size in sizes
    )
    pairs = _pairs(draw, nodes, form)
    matrices = tuple(
        tuple(tuple(float(draw.randint(0, 6)) for _ in range(sizes[b])) for _ in range(sizes[a]))
        for a, b in pairs
    )
    least = sum(min(k.standing) for k in kinds)
    highest = sum(max(k.standing) for k in kinds)
    live = tuple(
        tuple(sorted(draw.sample(range(nodes), min(nodes, 2)))) for _ in range(2 if points else 0)
    )
    return PlacementProblem(
        names=tuple(f"n{i}" for i in range(nodes)),
        kinds=kinds,
        nodes=tuple(range(nodes)),
        matrices=matrices,
        edges=tuple(PlacementEdge(source=a, target=b, matrix=i) for i, (a, b) in enumerate(pairs)),
        budget=float(int(least + tight * (highest - least))) + (3.0 if points else 0.0),
        points=live,
    )


def _pairs(draw: random.Random, nodes: int, form: Form) -> list[tuple[int, int]]:
    if form == "chain":
        return [(i, i + 1) for i in range(nodes - 1)]
    if form == "tree":
        return [(draw.randrange(i), i) for i in range(1, nodes)]
    if form == "residual":
        return [(i, i + 1) for i in range(nodes - 1)] + [(i, i + 2) for i in range(0, nodes - 2, 2)]
    # parallel edges and edges against the order happen too
    return [
        (a, b)
        for a in range(nodes)
        for b in range(nodes)
        if a != b and draw.random() < 0.35
    ]  # fmt: skip


def layers(
    count: int, seed: int = 0, *, strategies: int = 6, width: int = 8, tight: float = 0.3
) -> PlacementProblem:
    """Equal layers of ``width`` nodes, each a chain with a skip around it."""
    draw = random.Random(seed)
    bytes_ = [10.0 * 2 ** draw.randint(0, 6) for _ in range(width)]

    def kind(scale: float) -> NodeCosts:
        return NodeCosts(
            seconds=tuple(draw.uniform(1, 5) for _ in range(strategies)),
            standing=tuple(scale / draw.choice((1, 2, 4, 8)) for _ in range(strategies)),
        )

    kinds = tuple(kind(b) for b in bytes_)

    def matrix() -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(0.0 if i == j else draw.uniform(0.5, 4) for j in range(strategies))
            for i in range(strategies)
        )

    matrices = tuple(matrix() for _ in range(width + 1))
    nodes = tuple(i % width for i in range(count * width))
    edges = [
        PlacementEdge(source=v, target=v + 1, matrix=v % width) for v in range(count * width - 1)
    ] + [
        PlacementEdge(source=v, target=v + width, matrix=width)
        for v in range(0, (count - 1) * width, width)
    ]  # fmt: skip
    least = count * sum(min(k.standing) for k in kinds)
    highest = count * sum(max(k.standing) for k in kinds)
    return PlacementProblem(
        names=tuple(f"layer{v // width}.{v % width}" for v in range(count * width)),
        kinds=kinds,
        nodes=nodes,
        matrices=matrices,
        edges=tuple(edges),
        budget=least + tight * (highest - least),
    )
