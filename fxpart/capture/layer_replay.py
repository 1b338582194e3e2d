"""Trace only a few of many equal layers, and replay their recorded operations for the others.

Tracing a model of 96 equal layers costs 96 times one layer. Here the model's code runs normally
under the tracer, but a call of a layer that equals earlier layers, on arguments of the same
description and with unchanged globals, only records the same operations with its own inputs and
state. The resulting graph is identical, node for node.

:mod:`fxpart.capture.module_signature` decides equality: class, every attribute, shapes and ties of
tensors; layer indices must not be read. Three layers are traced before anything is replayed, and
the last layer of a container; all must record the same operations. A layer is traced normally if it
has hooks, writes to a tensor, to itself or to shared objects, contains a constant or a region, or
has inner values that are used outside of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import nn

from fxpart.capture.layer_calls import LayerCallRecorder, RepeatedLayer, describe
from fxpart.capture.module_signature import (
    IncomparableModuleError,
    LayerIndexAccessError,
    counters,
    snapshot_globals,
)
from fxpart.capture.trace_segments import TraceSegment, ends_of, replay_segment, results, same
from fxpart.compat import active_tracer, has_module_hooks, intercept_module_calls, traced_node

REAL = 3  # equal layers that are traced before one is replayed
LEAST = REAL + 3  # minimum number of equal layers


class ReplayMismatchError(Exception):
    """Raised if a replay was invalid; the model must be traced in full."""


@dataclass
class _LayerCallGroup:
    """Calls with one signature: number traced, the segment to replay, and an equal segment.

    ready: calls may be replayed. unfit: calls must be traced. around: globals at the last traced
    call; a call with other globals is traced.
    """

    traced: int = 0
    repeated: int = 0
    ready: bool = False
    unfit: bool = False
    template: TraceSegment | None = None
    other: TraceSegment | None = None
    around: list[object] = field(default_factory=list)


@dataclass
class LayerReplay:
    """The equal layers of a module, and their calls during a trace.

    real: layers to trace before one is replayed. least: minimum number of equal layers. repeated:
    number of replayed calls. touched: whether a layer read its index.
    """

    root: nn.Module
    real: int = REAL
    least: int = LEAST
    repeated: int = 0
    touched: bool = False
    members: dict[int, RepeatedLayer] = field(default_factory=dict)
    kinds: dict[Hashable, _LayerCallGroup] = field(default_factory=dict)
    inside: bool = False
    checked: bool = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Replay calls of equal layers under a tracer that calls the root module once.

        After a ReplayMismatchError, or any other failure while ``repeated`` is not 0 or ``touched``
        is set, the model must be traced without replay.
        """
        if not has_module_hooks():
            self._find_rows()
        if not self.members:
            yield
            return
        with intercept_module_calls(self._call):
            try:
                yield
            except LayerIndexAccessError as touched:
                self.touched = True
                raise ReplayMismatchError("a layer reads its own index") from touched
        if self.repeated and not self.checked:
            raise ReplayMismatchError("the tracer did not call the root")

    @property
    def doubtful(self) -> bool:
        """Whether a failure may be caused by replay."""
        return self.touched or self.repeated > 0

    def _find_rows(self) -> None:
        """Find the equal layers of each container, by class."""
        for container in self.root.modules():
            if not isinstance(container, (nn.ModuleList, nn.Sequential)):
                continue
            rows: dict[type, list[nn.Module]] = defaultdict(list)
            for layer in dict.fromkeys(container.children()):
                rows[type(layer)].append(layer)
            for row in rows.values():
                if len(row) < self.least:
                    continue
                try:
                    slots = counters(row)
                except IncomparableModuleError:
                    continue
                for layer in row:
                    self.members[id(vars(layer))] = RepeatedLayer(layer, slots, layer is row[-1])

    def _call(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run one call of any module: traced or replayed."""
        # Tracers wrap modules in proxies that share the module's attribute dict.
        member = self.members.get(id(vars(module)))
        tracer = active_tracer()
        if vars(module) is vars(self.root) and tracer is not None:
            result = call(module, *args, **kwargs)
            self._check(result, tracer)
            return result
        if member is None or self.inside or tracer is None:
            return call(module, *args, **kwargs)
        described = describe(member, args, kwargs, tracer)
        kind = None if described is None else self.kinds.setdefault(described[0], _LayerCallGroup())
        if kind is None or kind.unfit:
            return call(module, *args, **kwargs)
        assert described is not None
        tensors = described[1]
        ends = ends_of(member.module, tensors, tracer)
        around = snapshot_globals(member.module)
        undisturbed = len(around) == len(kind.around) and all(map(is_, around, kind.around))
        if ends is not None and kind.ready and undisturbed and not member.last:
            assert kind.template is not None and kind.other is not None
            made = replay_segment(kind.template, kind.other, ends, tracer)
            if made is not None:
                self.repeated += 1
                kind.repeated += 1
                return results(kind.template.result, tensors.__getitem__, made)
            ends = None
        if ends is None:
            return call(module, *args, **kwargs)
        self.inside = True
        try:
            with LayerCallRecorder(member, described, (args, kwargs), tracer) as watch:
                watch.result = call(module, *args, **kwargs)
        finally:
            self.inside = False
        kind.around = around
        _learn(kind, watch.segment(ends), self.real)
        return watch.result

    def _check(self, result: Any, tracer: Any) -> None:
        """Raise ReplayMismatchError if a value inside a traced layer is used outside of it."""
        returned = {traced_node(t, tracer) for t in _tensors(result)}
        for kind in self.kinds.values():
            for segment in (kind.template, kind.other) if kind.repeated else ():
                assert segment is not None
                for node in segment.leaving():
                    raise ReplayMismatchError(f"{node.name} leaves its layer")
                if not returned.isdisjoint(segment.private()):
                    raise ReplayMismatchError("a value inside a layer is returned")
        self.checked = True


def _learn(kind: _LayerCallGroup, segment: TraceSegment | None, real: int) -> None:
    """Record a traced call; None if it does more than record operations.

    The first layers may create sizes that later ones reuse, so the comparison restarts after each
    difference, a few times.
    """
    kind.traced += 1
    if segment is not None and kind.template is not None and same(kind.template, segment):
        kind.other = segment
        kind.ready = kind.traced >= real
        return
    if kind.repeated:
        raise ReplayMismatchError("a layer recorded other operations than the layers before it")
    kind.unfit = segment is None or kind.traced > 2 * REAL
    kind.template = kind.other = segment
    kind.ready = kind.traced >= real == 1


def _tensors(held: Any) -> Sequence[torch.Tensor]:
    """Return the tensors in a result of the whole module."""
    return [t for t in held.values() if isinstance(t, torch.Tensor)]
