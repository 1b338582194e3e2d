"""Estimate unmeasured ops from measured ones: the same op at other sizes, or its class."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import fsum
from statistics import median
from typing import TYPE_CHECKING

from .op_classes import op_class
from .op_keys import OpSizeFamily, family, parse_key, scale
from .partial_draws import count_drawn, count_dropped, is_part, unshard_op

if TYPE_CHECKING:
    from fxpart.cluster.devices import Device
    from fxpart.costs import CostModel, OpSpec

    from .profile_store import TimeQuartiles

BETWEEN = "measured (interpolated)"
BEYOND = "measured (extrapolated)"
_Sizes = tuple[int, ...]


class OpTimeEstimator:
    """Estimates the seconds of unmeasured ops that run alone, for one setting."""

    def __init__(self, timings: Mapping[str, TimeQuartiles]) -> None:
        """Index the timings by op key and direction; invalid entries are skipped."""
        self._families: dict[tuple[OpSizeFamily, bool], list[tuple[_Sizes, float]]] = defaultdict(
            list
        )
        self._ops: list[tuple[OpSpec, bool, float]] = []
        for name, timing in timings.items():
            key, _, direction = name.rpartition(" ")
            try:
                spec = parse_key(key)
            except (ValueError, TypeError, KeyError, AssertionError, RecursionError):
                continue
            kind, sizes = family(spec)
            back = direction == "backward"
            self._families[kind, back].append((sizes, timing.seconds))
            self._ops.append((spec, back, timing.seconds))
        self._rates: dict[tuple[str, str, bool], float | None] = {}
        self._draws: dict[tuple[str, str], float | None] = {}

    def __call__(
        self, op: OpSpec, backward: bool, base: CostModel, device: Device
    ) -> tuple[float, str] | None:
        """Return the seconds alone and their source; None where nothing similar was measured.

        With several measured sizes that differ from the op's by one factor: linear interpolation or
        extrapolation. With a single one: the growth of the formula of ``base``, limited by the rate
        of its class, so that a call's fixed cost is not multiplied. A form on the same local
        tensors takes as long for any number of ranks. An op that keeps a part of random numbers:
        the time on its part alone, plus the time to generate the numbers of others.
        """
        if is_part(op):
            return self._part(op, backward, base, device)
        kind, sizes = family(op)
        same = [s for known, s in self._families.get((kind, backward), ()) if known == sizes]
        if same:
            return median(same), BEYOND
        points, one = self._points(op, backward)
        if len(points) > 1:
            low, high = points[0][0], points[-1][0]
            return along(points, Fraction(1)), BETWEEN if low <= 1 <= high else BEYOND
        if one is not None:
            sizes, seconds = one
            base_seconds = base.op(_resized(op, sizes), device, backward).seconds
            if base_seconds <= 0:
                return seconds, BEYOND
            usual = self.rate(op, backward, base, device)
            rate = seconds / base_seconds if usual is None else min(seconds / base_seconds, usual)
            here = base.op(op, device, backward).seconds
            return seconds + rate * (here - base_seconds), BEYOND
        return None

    def rate(self, op: OpSpec, backward: bool, base: CostModel, device: Device) -> float | None:
        """Return the measured over the formula's time of the op's class, all together.

        None where no op of the class was measured, or the formula has zero for them.
        """
        kind = op_class(op)
        key = (kind, device.name, backward)
        if key not in self._rates:
            pairs = [
                (seconds, base.op(spec, device, backward).seconds)
                for spec, back, seconds in self._ops
                if back is backward and op_class(spec) == kind
            ]
            pairs = [pair for pair in pairs if pair[1] > 0]
            formula_seconds = fsum(formula for _, formula in pairs)
            self._rates[key] = (
                fsum(took for took, _ in pairs) / formula_seconds if formula_seconds else None
            )
        return self._rates[key]

    def _part(
        self, op: OpSpec, backward: bool, base: CostModel, device: Device
    ) -> tuple[float, str] | None:
        """Estimate an op that generates more random numbers than it returns, in its forward."""
        found = self(unshard_op(op), backward, base, device)
        if found is None or backward:
            return found
        each = self._draw(op.key, base, device)
        if each is None:
            return None
        return found[0] + each * int(count_dropped(op)), BEYOND

    def _draw(self, name: str, base: CostModel, device: Device) -> float | None:
        """Return the seconds per generated number that is dropped; None where it is not known.

        From measured ops that keep a part, those of the same op if there are any; else from random
        ops, which do little else than generate.
        """
        key = name, device.name
        if key not in self._draws:
            ahead = [(spec, seconds) for spec, back, seconds in self._ops if not back]
            parts = [
                (spec, seconds) for spec, seconds in ahead if is_part(spec) and count_dropped(spec)
            ]
            own = [pair for pair in parts if pair[0].key == name] or parts
            found = []
            for spec, seconds in own:
                alone = self(unshard_op(spec), False, base, device)
                if alone is not None:
                    found.append(max(0.0, seconds - alone[0]) / int(count_dropped(spec)))
            found = found or [
                seconds / int(count_drawn(spec))
                for spec, seconds in ahead
                if op_class(spec) == "random" and not is_part(spec) and count_drawn(spec)
            ]
            self._draws[key] = median(found) if found else None
        return self._draws[key]

    def _points(
        self, op: OpSpec, backward: bool
    ) -> tuple[list[tuple[Fraction, float]], tuple[_Sizes, float] | None]:
        """Return measured (factor to the op's sizes, seconds), and a single point's sizes."""
        kind, sizes = family(op)
        groups: dict[frozenset[int], dict[Fraction, list[tuple[float, _Sizes]]]] = {}
        for known, seconds in self._families.get((kind, backward), ()):
            found = scale(known, sizes)
            if found is not None:
                base_seconds = groups.setdefault(found[0], {})
                base_seconds.setdefault(found[1], []).append((seconds, known))
        if not groups:
            return [], None
        # With ties, use the group that changes the most sizes: the batch dim is in all of them.
        best = max(groups.values(), key=lambda g: (len(g), max(g)))
        points = [(factor, median(s for s, _ in best[factor])) for factor in sorted(best)]
        return points, (best[points[0][0]][0][1], points[0][1])


def along(points: Iterable[tuple[Fraction, float]], at: Fraction) -> float:
    """Return the value at ``at`` of the line through the two nearest points, >= 0, never falling.

    points: at least two, by rising position.
    """
    row = list(points)
    above = next((i for i, (x, _) in enumerate(row) if x >= at), len(row) - 1)
    (x0, y0), (x1, y1) = row[max(above, 1) - 1 : max(above, 1) + 1]
    if y1 < y0:  # noise: a larger op is not faster
        return (y0 + y1) / 2
    return max(0.0, y0 + (y1 - y0) * float((at - x0) / (x1 - x0)))


def _resized(op: OpSpec, sizes: _Sizes) -> OpSpec:
    """Return the op at other sizes, given as one row."""
    from dataclasses import replace

    row = iter(sizes)
    inputs, outputs = (
        tuple(replace(t, shape=tuple(next(row) for _ in t.shape)) for t in tensors)
        for tensors in (op.inputs, op.outputs)
    )
    return replace(op, inputs=inputs, outputs=outputs)
