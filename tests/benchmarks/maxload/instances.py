"""Max-load instances for tests: random small ones, and transformers op by op that can be grown."""

from __future__ import annotations

import random

from .instance import Instance, Node


def random_instance(seed: int) -> Instance:
    """At most eight groups: equal costs and none, tight memory, backward nodes, CPU cores."""
    draw = random.Random(seed)
    count = draw.randint(1, 6)
    nodes, edges = [], []
    times = draw.choice([(0, 1, 2, 3), (0.0, 0.7, 1.3, 2.9, 5.1), (1, 1, 1, 0)])
    cheap = draw.random() < 0.3
    for i in range(count):
        work = draw.choice(times) * (1 if draw.random() < 0.5 else draw.random())
        nodes.append(
            Node(
                id=10 * i + 3,
                accelerator=work,
                cpu=work * draw.choice([0.5, 2, 10, 10]) + draw.choice([0, 0, 1]),
                bytes=draw.choice([0, 1, 2, 3, 4]),
                transfer=draw.choice([0, 0.1, 0.5, 1, 4]) * (0.1 if cheap else 1),
                runs=draw.random() > 0.05,
                group=draw.choice([None, None, i % 3, i]),
            )
        )
        edges += [(j, i) for j in range(i) if draw.random() < draw.choice([0.3, 0.5])]
    if draw.random() < 0.5:
        _add_backward(draw, nodes, edges)
    total = sum(n.bytes for n in nodes)
    accelerators, cpus = draw.choice(
        [(1, 0), (1, 1), (2, 0), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1)]
    )
    return Instance(
        nodes=tuple(nodes),
        edges=tuple(edges),
        accelerators=accelerators,
        cpus=cpus,
        memory=draw.choice([total, total, total * 0.6, total * 0.45, 4]),
    )


def _add_backward(draw: random.Random, nodes: list[Node], edges: list[tuple[int, int]]) -> None:
    """Backward nodes for some forward ones, mostly in their groups, with the edges turned round."""
    count = len(nodes)
    of = {}
    for i in reversed(range(count)):
        if draw.random() < 0.7 and len(nodes) < 10:
            of[i] = len(nodes)
            own = draw.random() < 0.8 or len(nodes) > 7
            group = nodes[i].group if nodes[i].group is not None else 100 + i
            if own:
                values = {f: getattr(nodes[i], f) for f in Node.__struct_fields__}
                nodes[i] = Node(**{**values, "group": group})
            nodes.append(
                Node(
                    id=10 * i + 4,
                    accelerator=draw.choice([0, 1, 2.5]),
                    cpu=draw.choice([0, 3, 9]),
                    bytes=draw.choice([0, 1]),
                    transfer=draw.choice([0, 0.3, 1.1]),
                    backward=True,
                    group=group if own else None,
                )
            )
    forward = [(u, v) for u, v in edges if v < count]
    edges += [(of[v], of[u]) for u, v in forward if u in of and v in of]
    edges += [(u, of[u]) for u in range(count) if u in of and draw.random() < 0.5]


def transformer(layers: int, devices: int, *, seed: int = 0, cpus: int = 0) -> Instance:
    """An op-level transformer: 33 ops a layer and 2 more, with costs that vary a little."""
    draw = random.Random(seed)
    nodes: list[Node] = []
    edges: list[tuple[int, int]] = []

    def op(work: float, out: float, *inputs: int, size: float = 0.0) -> int:
        noise = draw.uniform(0.8, 1.2)
        nodes.append(
            Node(
                id=len(nodes),
                accelerator=work * noise,
                cpu=20 * work * noise,
                bytes=size,
                transfer=out * draw.uniform(0.9, 1.1),
            )
        )
        edges.extend((i, len(nodes) - 1) for i in inputs)
        return len(nodes) - 1

    hidden = op(0.2, 0.4, size=4.0)
    for _ in range(layers):
        hidden = _layer(op, hidden)
    op(1.5, 0.1, hidden, size=4.0)
    return Instance(
        nodes=tuple(nodes), edges=tuple(edges), accelerators=devices, cpus=cpus, memory=1e6
    )


def _layer(op, x: int) -> int:  # type: ignore[no-untyped-def]
    """33 ops: norm (4), attention (18), norm (4), feed-forward (7)."""

    def norm(v: int) -> int:
        centred = op(0.02, 0.4, v, op(0.02, 0.01, v))
        return int(op(0.02, 0.4, centred, op(0.02, 0.01, centred)))

    h, heads = norm(x), []
    for _ in range(3):
        product = op(0.3, 0.4, h, size=1.0)
        heads.append(op(0.01, 0.4, op(0.01, 0.4, op(0.02, 0.4, product))))
    q, k, v = heads
    scores = op(0.02, 0.9, op(0.15, 0.9, q, k))
    mixed = op(0.15, 0.4, op(0.03, 0.9, scores), v)
    out = op(0.3, 0.4, mixed, size=1.0)
    x = op(0.01, 0.4, x, out)
    h = norm(x)
    inner = op(0.02, 1.6, op(0.6, 1.6, h, size=4.0))
    half = op(0.02, 1.6, inner)
    gate = op(0.02, 1.6, op(0.02, 1.6, inner), half)
    down = op(0.6, 0.4, gate, size=4.0)
    return int(op(0.02, 0.4, x, down))
