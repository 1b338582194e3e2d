"""One call of a layer: its signature, and the trace of a recorded call."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from fxpart.capture.module_signature import (
    IncomparableModuleError,
    ModuleSignatureBuilder,
    Slot,
    forbid_counter_access,
    snapshot_contents,
)
from fxpart.capture.trace_segments import (
    SegmentBoundary,
    SegmentInputRef,
    SegmentOutputRef,
    TraceSegment,
    drop_unused_sizes,
    results,
)
from fxpart.compat import (
    get_write_count,
    is_plain_fake,
    like_fake,
    storage_address,
    trace_as,
    traced_node,
)


@dataclass(frozen=True)
class RepeatedLayer:
    """One of several equal layers: its index attributes, and whether it is the last one."""

    module: nn.Module
    slots: frozenset[Slot]
    last: bool


@dataclass
class _CallSignatureBuilder(ModuleSignatureBuilder):
    """Describes a call: the module and its arguments.

    It is a class because a nested function would keep the tensors alive in a cycle.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)

    def argument(self, held: Any) -> Hashable:
        """Describe one argument; raise IncomparableModuleError for a mutable object."""
        if isinstance(held, torch.Tensor):
            if not is_plain_fake(held):
                raise IncomparableModuleError("a tensor with data")
            self.tensors.append(held)
            return self.seen.setdefault(id(held), len(self.seen)), self.tensor(held)
        if isinstance(held, torch.SymInt):
            return "symbol", held.node.expr
        if type(held) in (list, tuple):
            return type(held), *map(self.argument, held)
        if type(held) is dict:
            return dict, *((key, self.argument(item)) for key, item in held.items())
        if held is None or type(held) in (bool, int, float, str, torch.dtype, torch.device):
            return self.value(held)
        raise IncomparableModuleError("an object")


def describe(
    member: RepeatedLayer, args: tuple[Any, ...], kwargs: dict[str, Any], tracer: Any
) -> tuple[Hashable, list[torch.Tensor]] | None:
    """Return a call's signature and tensors; None for a call that cannot be compared."""
    describer = _CallSignatureBuilder(member.slots)
    try:
        rows = describer.module(member.module, "")
        given = describer.argument(args), describer.argument(kwargs)
    except IncomparableModuleError:
        return None
    return (id(tracer), rows, given, _modes()), describer.tensors


def _modes() -> Hashable:
    """Return thread settings that change the recorded ops."""
    casts = [
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *casts


class LayerCallRecorder:
    """One traced call: the recorded nodes, and whether it had other effects.

    result: the call's return value, set by the caller.
    """

    def __init__(
        self,
        member: RepeatedLayer,
        described: tuple[Hashable, list[torch.Tensor]],
        given: tuple[tuple[Any, ...], dict[str, Any]],
        tracer: Any,
    ) -> None:
        """Record the state before the call; given: its arguments."""
        self.member, self.given, self.tracer = member, given, tracer
        self.key, self.tensors = described
        self.result: Any = None
        module = member.module
        self.watched = [*self.tensors, *module.parameters(), *module.buffers()]
        self.written = [get_write_count(t) for t in self.watched]
        self.contents = snapshot_contents(module)
        self.before = _last(tracer.graph)
        self.numbers = forbid_counter_access(module, sorted(member.slots))
        self.references = self._references()

    def __enter__(self) -> LayerCallRecorder:
        self.numbers.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self.numbers.__exit__(*failure)

    def segment(self, ends: SegmentBoundary) -> TraceSegment | None:
        """Return the recorded nodes; None if the call wrote or kept anything, or is unsupported.

        Its results are replaced by equal tensors, to detect references to the original ones.
        """
        if self._wrote():
            return None
        node, nodes = _last(self.tracer.graph), []
        while node is not self.before:
            nodes.append(node)
            node = node.prev
        nodes.reverse()
        inner = frozenset(nodes)
        if any(n.op != "call_function" or _has_symbols_of_its_own(n) for n in nodes):
            return None
        made: list[tuple[fx.Node, torch.Tensor]] = []
        try:
            tree = self._tree(self.result, made, inner)
        except IncomparableModuleError:
            return None
        fakes = [(node, like_fake(tensor)) for node, tensor in made]
        kept = self._exchange(tree, made, fakes)
        return (
            None
            if kept
            else TraceSegment(drop_unused_sizes(nodes), ends, tuple(fakes), tree, inner)
        )

    def _wrote(self) -> bool:
        """Return whether the call wrote to tensors, modules, shared objects or arguments."""
        after = snapshot_contents(self.member.module)
        if len(after) != len(self.contents) or any(map(_is_not, after, self.contents)):
            return True
        if [get_write_count(t) for t in self.watched] != self.written:
            return True
        described = describe(self.member, *self.given, self.tracer)
        return described is None or described[0] != self.key

    def _exchange(
        self,
        tree: Any,
        made: list[tuple[fx.Node, torch.Tensor]],
        fakes: list[tuple[fx.Node, torch.Tensor]],
    ) -> bool:
        """Replace the result's tensors; return whether any argument or result is referenced."""
        own = [weakref.ref(tensor) for _, tensor in made]
        made.clear()
        self.result = None
        kept = any(ref() is not None for ref in own) or self._references() != self.references
        for node, fake in fakes:
            trace_as(fake, node, self.tracer)
        self.result = results(tree, self.tensors.__getitem__, [fake for _, fake in fakes])
        return kept

    def _references(self) -> list[int]:
        """Return the reference count of each argument."""
        return [sys.getrefcount(tensor) for tensor in self.tensors]

    def _tree(
        self, held: Any, made: list[tuple[fx.Node, torch.Tensor]], inner: frozenset[fx.Node]
    ) -> Any:
        """Return the result with each tensor replaced by its origin."""
        if isinstance(held, torch.Tensor):
            for index, given in enumerate(self.tensors):
                if given is held:
                    return SegmentInputRef(index)
            node = traced_node(held, self.tracer)
            homes = [storage_address(t) for t in (*self.watched, *(t for _, t in made))]
            if node not in inner or not is_plain_fake(held) or storage_address(held) in homes:
                raise IncomparableModuleError("a result that is not the call's own")
            assert node is not None
            made.append((node, held))
            return SegmentOutputRef(len(made) - 1)
        if type(held) in (list, tuple):
            return type(held)(self._tree(item, made, inner) for item in held)
        if type(held) is dict:
            return {key: self._tree(item, made, inner) for key, item in held.items()}
        if held is None or type(held) in (bool, int, float, str):
            return held
        raise IncomparableModuleError("a result of another sort")


def _is_not(a: object, b: object) -> bool:
    return a is not b


def _last(graph: fx.Graph) -> fx.Node:
    """Return the graph's newest node."""
    newest: fx.Node = next(iter(reversed(graph.nodes)))
    return newest


def _has_symbols_of_its_own(node: fx.Node) -> bool:
    """Return whether the node creates a data-dependent size."""
    return "unbacked_bindings" in node.meta
