"""Recorded operations of one layer call: compare and replay them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from fxpart.capture.module_signature import size
from fxpart.compat import like_fake, trace_as, traced_node


@dataclass(frozen=True)
class SegmentBoundary:
    """Connections of a layer call to the graph around it.

    inputs: the nodes of its tensors, in order. state: the nodes of the layer's parameters and
    buffers by name in the layer. stack: the modules being called, outermost first, as the tracer
    records them on nodes.
    """

    inputs: tuple[fx.Node, ...]
    state: dict[str, fx.Node]
    stack: tuple[tuple[str, tuple[str, str]], ...]

    def roles(self) -> dict[tuple[str, int | str], fx.Node]:
        """Return every boundary node under a name that is the same in each layer."""
        found: dict[tuple[str, int | str], fx.Node] = {}
        found.update((("input", i), node) for i, node in enumerate(self.inputs))
        found.update((("state", name), node) for name, node in self.state.items())
        return found


@dataclass(frozen=True)
class TraceSegment:
    """A recorded call: its nodes in order, its boundary, the returned nodes and fakes.

    result: the return value, with a :class:`SegmentInputRef` or :class:`SegmentOutputRef` for each
    tensor. inner: all nodes, including unused sizes.
    """

    nodes: tuple[fx.Node, ...]
    ends: SegmentBoundary
    made: tuple[tuple[fx.Node, torch.Tensor], ...]
    result: Any
    inner: frozenset[fx.Node] = field(default=frozenset(), repr=False)

    def private(self) -> set[fx.Node]:
        """Return the nodes that were not returned, except sizes, which are the same everywhere."""
        given = {node for node, _ in self.made}
        return {n for n in self.nodes if n not in given and not _is_size(n)}

    def leaving(self) -> Iterator[fx.Node]:
        """Yield the private nodes that are used outside of the call."""
        private = self.private()
        for node in self.nodes:
            if node in private and any(user not in self.inner for user in node.users):
                yield node


@dataclass(frozen=True)
class SegmentInputRef:
    """A result that is the call's argument tensor number ``index``."""

    index: int


@dataclass(frozen=True)
class SegmentOutputRef:
    """A result that the call computed: number ``index`` of ``TraceSegment.made``."""

    index: int


def ends_of(
    module: nn.Module, tensors: Sequence[torch.Tensor], tracer: Any
) -> SegmentBoundary | None:
    """Return the boundary of a call; None if the tracer does not know a tensor."""
    inputs = [traced_node(t, tracer) for t in tensors]
    if any(node is None for node in inputs):
        return None
    state: dict[str, fx.Node] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        for slots in (inner._parameters, inner._buffers):
            for name, tensor in slots.items():
                node = None if tensor is None else traced_node(tensor, tracer)
                if node is not None:
                    state[f"{path}.{name}"] = node
    stack = tuple((key, (path, _name(kind))) for key, (path, kind) in tracer.module_stack.items())
    return SegmentBoundary(tuple(n for n in inputs if n is not None), state, stack)


def _name(kind: Any) -> str:
    """Return a class name as the tracer writes it on nodes."""
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


def drop_unused_sizes(nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Drop unused sizes, which a fake kernel computes again or finds cached."""
    used: set[fx.Node] = set()
    kept = []
    for node in reversed(nodes):
        dead = _is_size(node) and not any(u in used for u in node.users)
        if not dead:
            used.add(node)
            kept.append(node)
    return tuple(reversed(kept))


def _is_size(node: fx.Node) -> bool:
    """Return whether the node computes a size or a condition on sizes."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def same(a: TraceSegment, b: TraceSegment) -> bool:
    """Return whether two calls recorded the same operations on corresponding values."""
    if len(a.nodes) != len(b.nodes) or a.result != b.result:
        return False
    env = dict(zip(a.nodes, b.nodes, strict=True))
    theirs = b.ends.roles()
    for role, node in a.ends.roles().items():
        if role not in theirs or env.setdefault(node, theirs[role]) is not theirs[role]:
            return False
    for x, y in zip(a.nodes, b.nodes, strict=True):
        mine = fx.node.map_arg((x.args, dict(x.kwargs)), lambda n: env.get(n, n))
        if x.target is not y.target or not _equal(mine, (y.args, dict(y.kwargs))):
            return False
        if not _alike(x, y):
            return False
        if x.meta.get("stack_trace") != y.meta.get("stack_trace"):
            return False
    return all(env[m] is n for (m, _), (n, _) in zip(a.made, b.made, strict=True))


def _equal(a: Any, b: Any) -> bool:
    """Compare arguments with types; nodes by identity, size nodes by their value."""
    if isinstance(a, (list, tuple)):  # torch.fx has its own list and dict types
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, slice):
        parts = (a.start, a.stop, a.step)
        return isinstance(b, slice) and _equal(parts, (b.start, b.stop, b.step))
    if isinstance(a, fx.Node):
        # The op that a size is read from depends on earlier traces; export merges these sizes.
        return a is b or (isinstance(b, fx.Node) and _is_size(a) and _is_size(b) and _alike(a, b))
    return type(a) is type(b) and bool(a == b or repr(a) == repr(b))


def _alike(a: fx.Node, b: fx.Node) -> bool:
    """Return whether two nodes have values with equal metadata."""
    return bool(_described(a.meta.get("val")) == _described(b.meta.get("val")))


def _described(known: Any) -> Any:
    """Return the metadata that two values must share."""
    if isinstance(known, torch.Tensor):
        sizes = (tuple(map(size, known.shape)), tuple(map(size, known.stride())))
        return *sizes, known.dtype, known.device, size(known.storage_offset())
    if isinstance(known, (list, tuple)):
        return tuple(map(_described, known))
    return size(known) if isinstance(known, torch.SymInt) else (type(known), str(known))


def replay_segment(
    template: TraceSegment, other: TraceSegment, ends: SegmentBoundary, tracer: Any
) -> list[Any] | None:
    """Record the template's operations at another boundary; return new fakes for ``made``.

    other: a second, equal segment. A boundary node that both share may be used other than as an
    argument or attribute, so the new call must share it too; otherwise return None without
    recording.
    """
    first, second, wanted = template.ends.roles(), other.ends.roles(), ends.roles()
    env: dict[fx.Node, fx.Node] = {}
    for role, node in first.items():
        new = wanted.get(role)
        shared = template is not other and node is second[role]
        if new is None or (shared and new is not node) or env.setdefault(node, new) is not new:
            return None
    fakes = [like_fake(fake) for _, fake in template.made]
    if [_described(f) for f in fakes] != [_described(f) for _, f in template.made]:
        return None
    for node in template.nodes:
        copied = tracer.graph.node_copy(node, lambda n: env.get(n, n))
        env[node] = copied
        stack = node.meta.get("nn_module_stack")
        if stack is not None:
            copied.meta["nn_module_stack"] = _moved(stack, template.ends.stack, ends.stack)
    for (node, _), fake in zip(template.made, fakes, strict=True):
        trace_as(fake, env[node], tracer)
    return fakes


def _moved(
    stack: Mapping[str, tuple[str, Any]],
    old: tuple[tuple[str, tuple[str, str]], ...],
    new: tuple[tuple[str, tuple[str, str]], ...],
) -> dict[str, tuple[str, Any]]:
    """Return a node's module stack in another layer, with the new call's outer modules."""
    items = list(stack.items())
    if not old or [key for key, _ in items[: len(old)]] != [key for key, _ in old]:
        return dict(stack)
    before, after = f"{old[-1][1][0]}.", f"{new[-1][1][0]}."

    def moved(path: str) -> str:
        return after + path.removeprefix(before) if path.startswith(before) else path

    inside = ((moved(key), (moved(path), kind)) for key, (path, kind) in items[len(old) :])
    return {**dict(new), **dict(inside)}


def results(tree: Any, kept: Callable[[int], Any], made: Sequence[Any]) -> Any:
    """Return ``TraceSegment.result`` with tensors in place of references."""
    if isinstance(tree, SegmentInputRef):
        return kept(tree.index)
    if isinstance(tree, SegmentOutputRef):
        return made[tree.index]
    if isinstance(tree, (list, tuple)):
        return type(tree)(results(item, kept, made) for item in tree)
    if isinstance(tree, dict):
        return {key: results(item, kept, made) for key, item in tree.items()}
    return tree
