"""Parameters and buffers by block, with gradients, optimizer state and the optimizer's time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from fxpart.compat.optimizer_choice import OptimizerChoice, state_bytes
from fxpart.pricing.optimizer_step import compute_update_bytes
from fxpart.pricing.optimizer_temporaries import UNKNOWN, temporaries
from fxpart.pricing.sparse_gradients import touched_bytes
from fxpart.pricing.specs import annotation
from fxpart.solver.problem import Weight

if TYPE_CHECKING:
    from fxpart.capture.captured_model import CapturedModel
    from fxpart.cluster.devices import Device


def weights(
    graph: fx.Graph, captured: CapturedModel, trained: frozenset[str], optimizer: OptimizerChoice
) -> tuple[Weight, ...]:
    """Every parameter, buffer and constant that a block uses, with the blocks that use it.

    Frozen parameters and those that no gradient reaches have neither gradient nor optimizer bytes;
    a sparse gradient takes what a step's rows take (:mod:`fxpart.pricing.sparse_gradients`).
    """
    touched = touched_bytes(graph)
    users: dict[str, set[int]] = {}
    held: dict[str, torch.Tensor] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            users.setdefault(str(node.target), set()).update(_blocks(node))
            held[str(node.target)] = _held(node, captured)
    used = [name for name, blocks in users.items() if blocks]
    learnt = [name for name in used if name in trained]
    shapes = [(tuple(held[n].shape), held[n].dtype) for n in learnt]
    state = dict(zip(learnt, state_bytes(optimizer, shapes, learnt), strict=True))
    parameters = frozenset(captured.parameters)
    takes, before = temporaries(optimizer), 0
    result = []
    for name in used:
        tensor = held[name]
        size = tensor.numel() * tensor.element_size()
        gradient = touched.get(name, size) if name in state else 0
        if name in touched:  # in tensors of the gradient's size, by other ways
            temporary = UNKNOWN.of(min(size, gradient), 0)
        elif gradient:
            temporary, before = takes.of(size, before), size
        else:
            temporary = 0
        result.append(
            Weight(
                name=name,
                blocks=tuple(sorted(users[name])),
                weight=size,
                gradient=gradient,
                optimizer=state.get(name, 0) + _numbered(name in touched, tensor, state.get(name)),
                buffer=name not in parameters,
                sparse=name in state and name in touched,
                temporary=temporary,
            )
        )
    return tuple(sorted(result, key=lambda weight: (weight.blocks, weight.name)))


def _numbered(sparse: bool, table: torch.Tensor, state: int | None) -> int:
    """What an optimizer with state takes beside it: ``sparse_mask`` numbers a table's rows."""
    return 8 * table.shape[0] if sparse and state else 0


def _held(node: fx.Node, captured: CapturedModel) -> torch.Tensor:
    """What the graph holds under a name: the model's tensor, or a rank's part of it."""
    found = node.meta.get("val")
    return found if isinstance(found, torch.Tensor) else captured.state[str(node.target)]


def _blocks(node: fx.Node) -> set[int]:
    """The blocks that use the node, through nodes that are in none."""
    found: set[int] = set()
    waiting = list(node.users)
    seen = set(waiting)
    while waiting:
        user = waiting.pop()
        block = annotation(user).block
        if block is not None:
            found.add(block)
        elif user.op != "output":
            waiting += [u for u in user.users if u not in seen]
            seen.update(user.users)
    return found


def trained_names(captured: CapturedModel) -> frozenset[str]:
    """Parameters that take a gradient."""
    return frozenset(n for n in captured.parameters if captured.state[n].requires_grad)


def step_seconds(weights: tuple[Weight, ...], blocks: int, device: Device) -> tuple[float, ...]:
    """The optimizer's seconds by block: weight, gradient and state read, weight and state written.

    A tied weight counts for the first block that uses it.
    """
    seconds = [0.0] * blocks
    for weight in weights:
        if weight.gradient:
            seconds[weight.blocks[0]] += (
                compute_update_bytes(weight) / device.bandwidth + device.launch
            )
    return tuple(seconds)
