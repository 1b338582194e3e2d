"""Parameters and buffers by block, with gradients, optimizer state and the optimizer's time."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

import torch
from torch import fx

from fxpart.compat.optimizer_choice import OptimizerChoice, state_bytes
from fxpart.compiler.duplicated_ops import find_duplicated_ops
from fxpart.costmodels.efficiency import update_bandwidth, update_launch
from fxpart.pricing.optimizer_step import compute_update_bytes
from fxpart.pricing.optimizer_temporaries import UNKNOWN, masks_rows, temporaries
from fxpart.pricing.sparse_gradients import touched_bytes
from fxpart.pricing.specs import annotation
from fxpart.solver.problem import Weight

if TYPE_CHECKING:
    from fxpart.capture.captured_model import CapturedModel
    from fxpart.cluster.devices import Device


def weights(
    graph: fx.Graph, captured: CapturedModel, trained: frozenset[str], optimizer: OptimizerChoice
) -> tuple[Weight, ...]:
    """Return every parameter, buffer and constant that a block uses, with these blocks.

    Frozen parameters and those without a gradient have neither gradient nor optimizer bytes; a
    sparse gradient has the bytes of a step's rows (:mod:`fxpart.pricing.sparse_gradients`).
    """
    touched, duplicated = touched_bytes(graph), find_duplicated_ops(graph)
    users: dict[str, set[int]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            users.setdefault(str(node.target), set()).update(_blocks(node, duplicated))
            tensors[str(node.target)] = _get_tensor(node, captured)
    used = [name for name, blocks in users.items() if blocks]
    trained_here = [name for name in used if name in trained]
    shapes = [(tuple(tensors[n].shape), tensors[n].dtype) for n in trained_here]
    state = dict(zip(trained_here, state_bytes(optimizer, shapes, trained_here), strict=True))
    parameters = frozenset(captured.parameters)
    takes, before = temporaries(optimizer), 0
    numbers = bool(touched) and masks_rows(optimizer)
    result = []
    for name in used:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        gradient = touched.get(name, size) if name in state else 0
        if name in touched:  # sparse updates allocate tensors of the gradient's size
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
                optimizer=state.get(name, 0)
                + _numbered(numbers and name in touched, tensor, state.get(name)),
                buffer=name not in parameters,
                sparse=name in state and name in touched,
                temporary=temporary,
            )
        )
    return tuple(sorted(result, key=lambda weight: (weight.blocks, weight.name)))


def _numbered(sparse: bool, table: torch.Tensor, state: int | None) -> int:
    """Return the bytes of the row numbers that an optimizer's ``sparse_mask`` makes for a table."""
    return 8 * table.shape[0] if sparse and state else 0


def _get_tensor(node: fx.Node, captured: CapturedModel) -> torch.Tensor:
    """Return the graph's tensor of a name: the model's tensor, or a rank's part of it."""
    found = node.meta.get("val")
    return found if isinstance(found, torch.Tensor) else captured.state[str(node.target)]


def _blocks(node: fx.Node, duplicated: Container[fx.Node]) -> set[int]:
    """Return the blocks that use the node, also through nodes outside of blocks.

    Duplicated ops belong to the blocks of the ops that use their results.
    """
    found: set[int] = set()
    waiting = list(node.users)
    seen = set(waiting)
    while waiting:
        user = waiting.pop()
        block = annotation(user).block
        if block is not None and user not in duplicated:
            found.add(block)
        elif user.op != "output":
            waiting += [u for u in user.users if u not in seen]
            seen.update(user.users)
    return found


def trained_names(captured: CapturedModel) -> frozenset[str]:
    """Return the parameters that take a gradient."""
    return frozenset(n for n in captured.parameters if captured.state[n].requires_grad)


def step_seconds(weights: tuple[Weight, ...], blocks: int, device: Device) -> tuple[float, ...]:
    """Return the optimizer's seconds by block: read weight, gradient, state; write weight, state.

    A tied weight counts for the first block that uses it.
    """
    seconds, bandwidth = [0.0] * blocks, update_bandwidth(device)
    for weight in weights:
        if weight.gradient:
            moved = compute_update_bytes(weight)
            seconds[weight.blocks[0]] += moved / bandwidth + update_launch(device)
    return tuple(seconds)
