"""The operations that one call of a layer recorded: compare them, and record them once more."""

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
    """Where a call is tied to the graph around it.

    inputs: the nodes of its tensors, in order. state: the nodes of the layer's parameters and
    buffers by name within the layer. stack: the modules that are being called, outermost first, as
    the tracer notes them on nodes.
    """

    inputs: tuple[fx.Node, ...]
    state: dict[str, fx.Node]
    stack: tuple[tuple[str, tuple[str, str]], ...]

    def roles(self) -> dict[tuple[str, int | str], fx.Node]:
        """Every end under a name that it has in each layer."""
        found: dict[tuple[str, int | str], fx.Node] = {}
        found.update((("input", i), node) for i, node in enumerate(self.inputs))
        found.update((("state", name), node) for name, node in self.state.items())
        return found


@dataclass(frozen=True)
class TraceSegment:
    """What a call recorded: its nodes in order, its ends, the nodes and fakes that it returned.

    result: what it returned, with a :class:`SegmentInputRef` or :class:`SegmentOutputRef` for each
    tensor. inner: all nodes, those of unused sizes too.
    """

    nodes: tuple[fx.Node, ...]
    ends: SegmentBoundary
    made: tuple[tuple[fx.Node, torch.Tensor], ...]
    result: Any
    inner: frozenset[fx.Node] = field(default=frozenset(), repr=False)

    def private(self) -> set[fx.Node]:
        """The nodes that were not returned; sizes aside, which are the same everywhere."""
        given = {node for node, _ in self.made}
        return {n for n in self.nodes if n not in given and not _is_size(n)}

    def leaving(self) -> Iterator[fx.Node]:
        """The private nodes that something outside of the call uses."""
        private = self.private()
        for node in self.nodes:
            if node in private and any(user not in self.inner for user in node.users):
                yield node


@dataclass(frozen=True)
class SegmentInputRef:
    """A result that is the call's own tensor number ``index``."""

    index: int


@dataclass(frozen=True)
class SegmentOutputRef:
    """A result that the call made: number ``index`` of ``TraceSegment.made``."""

    index: int


def ends_of(
    module: nn.Module, tensors: Sequence[torch.Tensor], tracer: Any
) -> SegmentBoundary | None:
    """The ends of a call that is about to be made; None if the tracer does not know a tensor."""
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
    """A class as the tracer writes it on nodes."""
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


def drop_unused_sizes(nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Without sizes that nobody uses: a fake kernel computes them anew or finds them cached."""
    used: set[fx.Node] = set()
    kept = []
    for node in reversed(nodes):
        dead = _is_size(node) and not any(u in used for u in node.users)
        if not dead:
            used.add(node)
            kept.append(node)
    return tuple(reversed(kept))


def _is_size(node: fx.Node) -> bool:
    """Whether the node computes a size or a truth about sizes."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def same(a: TraceSegment, b: TraceSegment) -> bool:
    """Whether two calls recorded the same operations on what corresponds to each other."""
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
    """Equality of arguments with types; nodes by identity, those of sizes by what they say."""
    if isinstance(a, (list, tuple)):  # torch.fx has list and dict types of its own
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, slice):
        parts = (a.start, a.stop, a.step)
        return isinstance(b, slice) and _equal(parts, (b.start, b.stop, b.step))
    if isinstance(a, fx.Node):
        # Which op a size is read from depends on what was traced before; export makes them one.
        return a is b or (isinstance(b, fx.Node) and _is_size(a) and _is_size(b) and _alike(a, b))
    return type(a) is type(b) and bool(a == b or repr(a) == repr(b))


def _alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes have values of one description."""
    return bool(_described(a.meta.get("val")) == _described(b.meta.get("val")))


def _described(known: Any) -> Any:
    """What two values must share."""
    if isinstance(known, torch.Tensor):
        sizes = (tuple(map(size, known.shape)), tuple(map(size, known.stride())))
        return *sizes, known.dtype, known.device, size(known.storage_offset())
    if isinstance(known, (list, tuple)):
        return tuple(map(_described, known))
    return size(known) if isinstance(known, torch.SymInt) else (type(known), str(known))


def replay_segment(
    template: TraceSegment, other: TraceSegment, ends: SegmentBoundary, tracer: Any
) -> list[Any] | None:
    """Record the template's operations again at other ends; returns new fakes for ``made``.

    other: a second segment that is the same. An end that these two share may be reached by another
    way than as an argument or an attribute, so it must be shared by the new call too: otherwise
    None, and nothing was recorded.
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
    """A node's modules in another layer; those outside of the layer are the new call's own."""
    items = list(stack.items())
    if not old or [key for key, _ in items[: len(old)]] != [key for key, _ in old]:
        return dict(stack)
    before, after = f"{old[-1][1][0]}.", f"{new[-1][1][0]}."

    def moved(path: str) -> str:
        return after + path.removeprefix(before) if path.startswith(before) else path

    inside = ((moved(key), (moved(path), kind)) for key, (path, kind) in items[len(old) :])
    return {**dict(new), **dict(inside)}


def results(tree: Any, kept: Callable[[int], Any], made: Sequence[Any]) -> Any:
    """``TraceSegment.result`` with tensors again."""
    if isinstance(tree, SegmentInputRef):
        return kept(tree.index)
    if isinstance(tree, SegmentOutputRef):
        return made[tree.index]
    if isinstance(tree, (list, tuple)):
        return type(tree)(results(item, kept, made) for item in tree)
    if isinstance(tree, dict):
        return {key: results(item, kept, made) for key, item in tree.items()}
    return tree
