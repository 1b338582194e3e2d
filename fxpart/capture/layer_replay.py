"""Layers that are the same program are traced a few times, and what they recorded is repeated.

Tracing a model of 96 equal layers costs 96 times one layer. Here the model's own code runs as ever
under the tracer, but a call of a layer that is the same program as layers before it, on arguments
of the same description and with the same globals around, only records the same operations again
with its own inputs and state. The graph is that of the plain way, node for node.

What is the same program is decided by :mod:`fxpart.capture.module_signature`: class, every
attribute, shapes and ties of tensors; numbers that only count layers must stay unlooked at. Three
layers are really traced before anything is repeated, and the last layer of a row: these must have
recorded the same operations. A layer with hooks, or one that writes to a tensor, to itself or to
what it shares, keeps a constant or a region, or has values that anything outside of it uses, is
traced as ever.
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

REAL = 3  # layers of a kind that are traced before one is repeated
LEAST = REAL + 3  # equal layers that are worth the comparison


class ReplayMismatchError(Exception):
    """Something was repeated that should not have been; the model is to be traced in full."""


@dataclass
class _LayerCallGroup:
    """Calls alike: how many were traced, the segment to repeat, another that equals it.

    ready: calls may be repeated. unfit: they are to be traced, each of them. around: what globals
    held at the last traced call; a call that finds others is traced.
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
    """The rows of equal layers of a module, and what is known of their calls while it is traced.

    real: layers to trace before one is repeated. least: equal layers that make a row. repeated: how
    many calls were not traced. touched: whether a layer looked at a number that counts layers.
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
        """Within: a tracer that calls the root module once repeats what it may.

        ReplayMismatchError, or any other failure while ``repeated`` is not 0 or ``touched`` is set,
        says that the model is to be traced without.
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
                raise ReplayMismatchError("a layer looks at its own number") from touched
        if self.repeated and not self.checked:
            raise ReplayMismatchError("the tracer did not call the root")

    @property
    def doubtful(self) -> bool:
        """Whether a failure may be due to repetition."""
        return self.touched or self.repeated > 0

    def _find_rows(self) -> None:
        """Equal layers of one container each, by class and number."""
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
        """One call of any module: traced, or repeated."""
        # Tracers wrap modules in proxies that share the module's dict of attributes.
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
        """ReplayMismatchError if a value inside a traced layer is used outside of it."""
        returned = {traced_node(t, tracer) for t in _tensors(result)}
        for kind in self.kinds.values():
            for segment in (kind.template, kind.other) if kind.repeated else ():
                assert segment is not None
                for node in segment.leaving():
                    raise ReplayMismatchError(f"{node.name} leaves its layer")
                if not returned.isdisjoint(segment.private()):
                    raise ReplayMismatchError("a value inside of a layer is returned")
        self.checked = True


def _learn(kind: _LayerCallGroup, segment: TraceSegment | None, real: int) -> None:
    """Take up what a traced call recorded; None: it does more than record operations.

    The first layers may make sizes that later ones find made, so the comparison starts anew with
    each that differs, a few times.
    """
    kind.traced += 1
    if segment is not None and kind.template is not None and same(kind.template, segment):
        kind.other = segment
        kind.ready = kind.traced >= real
        return
    if kind.repeated:
        raise ReplayMismatchError("a layer recorded other operations than those before it")
    kind.unfit = segment is None or kind.traced > 2 * REAL
    kind.template = kind.other = segment
    kind.ready = kind.traced >= real == 1


def _tensors(held: Any) -> Sequence[torch.Tensor]:
    """The tensors in a result of the whole module."""
    return [t for t in held.values() if isinstance(t, torch.Tensor)]
