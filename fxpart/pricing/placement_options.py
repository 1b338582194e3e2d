"""The strategies of one op and their costs: placements, seconds, bytes saved for the backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxpart.compiler.collective_calls import unwrap_seeded_call
from fxpart.compiler.tensor_sizes import expression, tensors
from fxpart.costmodels.tensor_sizes import item_bytes
from fxpart.costs import OpSpec, TensorSpec
from fxpart.passes.rules import REPLICATED, ShardingRule, choices, layout, operands, rule_of
from fxpart.passes.rules.sharding_rule import factor_of
from fxpart.pricing.placement_edges import Port, ReshardCosts, get_gradient_placements
from fxpart.pricing.specs import OpSignatures, Specs, annotation
from fxpart.sharding import PARTIAL, REPLICATE, Mesh, Placements, Shard

if TYPE_CHECKING:
    from fxpart.cluster.devices import Device
    from fxpart.costs import CostModel
    from fxpart.pricing.variants import Sizes

Strategy = tuple[str, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class OpOption:
    """One strategy. takes: a port for each operand; gives: one for each result."""

    strategy: Strategy
    takes: tuple[Port, ...]
    gives: tuple[Port, ...]


@dataclass(frozen=True)
class OpFamily:
    """All options of equal ops. seconds: per step; standing: resident bytes, by option."""

    options: tuple[OpOption, ...]
    seconds: tuple[float, ...]
    standing: tuple[float, ...]


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that autograd saves for an op, and the tensor whose sharding they share.

    tensor: ("operand" | "result", position).
    """

    size: float
    tensor: tuple[str, int]


def local(shape: Sequence[int], placements: Placements, mesh: Mesh) -> Shape:
    """Return the largest shape of a shard."""
    sizes = list(shape)
    for placement, parts in zip(placements, mesh.shape, strict=True):
        if isinstance(placement, Shard):
            outer = placement.outer if isinstance(placement.outer, int) else 1
            part = sizes[placement.dim] // outer
            sizes[placement.dim] = outer * -(-part // parts)
    return tuple(sizes)


class OpFamilies:
    """The families of one graph's ops at one microbatch size; equal ops share one."""

    def __init__(
        self,
        mesh: Mesh,
        model: CostModel,
        device: Device,
        reshards: ReshardCosts,
        sizes: Sizes,
        specs: Specs,
        microbatches: int,
        rows: frozenset[str] | None = None,
        like: OpFamilies | None = None,
    ) -> None:
        """Create it. microbatches: per step; seconds are per step. rows: symbols of batch dims.

        like: families of the same graph on another mesh, whose sharding rules are reused. Factors
        of other symbolic sizes are sharded by annotation only: two that are equal at run time (the
        lengths of two inputs) need not divide into the same parts.
        """
        self.mesh, self._model, self._device = mesh, model, device
        self._reshards, self._sizes, self._specs = reshards, sizes, specs
        self._microbatches, self._rows = microbatches, rows
        self._rules: dict[object, ShardingRule | None] = {} if like is None else like._rules
        self._signatures: OpSignatures = OpSignatures() if like is None else like._signatures
        self._symbols: dict[int, dict[str, frozenset[str]]] = {} if like is None else like._symbols
        self._known: dict[object, OpFamily] = {}
        self._costs: dict[OpSpec, float] = {}

    def rule(self, node: fx.Node) -> ShardingRule | None:
        """Return the sharding rule of the node's op, looked up once for equal ops."""
        key = self._signatures(node)
        if key not in self._rules:
            self._rules[key] = rule_of(node)
        return self._rules[key]

    def symbols(self, node: fx.Node) -> dict[str, frozenset[str]]:
        """Return by strategy the symbols in the sizes of the factors that it shards."""
        rule = self.rule(node)
        if rule is None:
            return {}
        if id(rule) not in self._symbols:
            found: dict[str, frozenset[str]] = {}
            for name in choices(rule):
                factors = rule.together.get(name, (name,))
                sizes = [expression(rule.sizes[f]) for f in factors if f in rule.sizes]
                names = {str(s) for z in sizes if not isinstance(z, int) for s in z.free_symbols}
                if names:
                    found[name] = frozenset(names)
            self._symbols[id(rule)] = found
        return self._symbols[id(rule)]

    def of(
        self,
        node: fx.Node,
        kept: tuple[SavedBytes, ...] = (),
        *,
        more: tuple[str, ...] = (),
        only: Strategy | None = None,
        waiting: bool = False,
    ) -> OpFamily:
        """Return the node's family.

        more: strategies besides those of the rule (fused weights). only: the only allowed strategy.
        waiting: whether its results' gradients may be partial sums, because it computes from
        parameters alone.
        """
        fixed = self._fixed(node)
        gradients = tuple(map(self._specs.requires_grad, operands(node)))
        flows = annotation(node).requires_grad
        key = (self._signatures(node), flows, gradients, kept, fixed, more, only, waiting)
        if key not in self._known:
            rule, spec = self.rule(node), self._specs.op(node)
            found = self._list_options(node, rule, fixed, more, only, waiting)
            rows = [self._price(node, rule, spec, kept, option) for option in found]
            self._known[key] = OpFamily(found, tuple(s for s, _ in rows), tuple(b for _, b in rows))
        return self._known[key]

    def _fixed(self, node: fx.Node) -> tuple[tuple[str | None, ...], tuple[Placements, ...]]:
        """Return what is decided: the strategy by axis, and the results' placements."""
        sharding = annotation(node).sharding
        if sharding is None:
            return (None,) * len(self.mesh.axes), ()
        return sharding.strategy, sharding.results

    def _list_options(
        self,
        node: fx.Node,
        rule: ShardingRule | None,
        fixed: tuple[tuple[str | None, ...], tuple[Placements, ...]],
        more: tuple[str, ...],
        only: Strategy | None,
        waiting: bool,
    ) -> tuple[OpOption, ...]:
        """Return every possible strategy that agrees with what is decided."""
        given = len(operands(node))
        results = len(tensors(node.meta.get("val")))
        if rule is None:
            whole: Placements = (REPLICATE,) * len(self.mesh.axes)
            plain = OpOption(
                (REPLICATED,) * len(self.mesh.axes), ((whole, whole),) * given,
                ((whole, whole),) * results,
            )  # fmt: skip
            return self._waiting(plain) if waiting else (plain,)
        symbols = self.symbols(node) if self._rows is not None else {}
        free = [
            name
            for name in (*choices(rule), *more)
            if self._rows is None or not symbols.get(name) or symbols[name] & self._rows
        ]
        names = [(decided,) if decided is not None else tuple(free) for decided in fixed[0]]
        if only is not None and all(o in n for o, n in zip(only, names, strict=True)):
            names = [(name,) for name in only]
        found: dict[object, OpOption] = {}
        for strategy in product(*names):
            option = self._option(rule, strategy)
            if option is not None:
                for each in self._waiting(option) if waiting else (option,):
                    found.setdefault((each.takes, each.gives), each)
        agreeing = [o for o in found.values() if _agrees(o, fixed[1])]
        return tuple(agreeing or found.values())

    def _option(self, rule: ShardingRule, strategy: Strategy) -> OpOption | None:
        """Return the option of a strategy; None where a size is not divisible."""
        parts: dict[str, int] = {}
        for name, count in zip(strategy, self.mesh.shape, strict=True):
            base = factor_of(name)[0]
            for factor in rule.together.get(base, (base,)):
                parts[factor] = parts.get(factor, 1) * count
        for name, count in parts.items():
            size = rule.sizes.get(name)
            if size is not None and not isinstance(size, int):
                number = self._sizes.number(expression(size))
                if number % count:
                    return None
        made = layout(rule, strategy, self.mesh)
        if made is None:
            return None
        return OpOption(
            strategy,
            tuple(zip(made.operands, made.gradients, strict=True)),
            tuple((placements, get_gradient_placements(placements)) for placements in made.results),
        )

    def _waiting(self, option: OpOption) -> tuple[OpOption, ...]:
        """Return the option, and those with deferred reductions on axes that it does not shard."""
        free = [i for i, name in enumerate(option.strategy) if name == REPLICATED]
        found = [option]
        for chosen in product((False, True), repeat=len(free)):
            axes = [a for a, wait in zip(free, chosen, strict=True) if wait]
            if axes:
                takes = tuple(_wait(port, axes) for port in option.takes)
                gives = tuple(_wait(port, axes) for port in option.gives)
                found.append(OpOption(option.strategy, takes, gives))
        return tuple(found)

    def _price(
        self,
        node: fx.Node,
        rule: ShardingRule | None,
        spec: OpSpec | None,
        kept: Iterable[SavedBytes],
        option: OpOption,
    ) -> tuple[float, float]:
        """Return the seconds per step, and the bytes saved for the backward."""
        seconds = 0.0
        if spec is not None:
            numbers = self._sizes.op(spec)
            inputs = self._local(numbers.inputs, positions(node), option.takes)
            given = tuple(range(len(numbers.outputs)))
            outputs = self._local(numbers.outputs, given, option.gives)
            local_spec = replace(numbers, inputs=inputs, outputs=outputs)
            seconds = self._op(as_local_form(rule, option.strategy, local_spec))
            if rule is not None and rule.forms:
                seconds += self._inside(rule, option, inputs, outputs, bool(spec.gradients))
        bytes_ = 0.0
        for part in kept:
            what, position = part.tensor
            ports = option.takes if what == "operand" else option.gives
            bytes_ += part.size * self._share(ports[position][0]) if position < len(ports) else 0.0
        return seconds * self._microbatches, bytes_

    def _op(self, spec: OpSpec) -> float:
        if spec not in self._costs:
            self._costs[spec] = sum(
                self._model.op(spec, self._device, backward).seconds for backward in (False, True)
            )
        return self._costs[spec]

    def _local(
        self, tensors: Sequence[TensorSpec], positions: Sequence[int | None], ports: Sequence[Port]
    ) -> tuple[TensorSpec, ...]:
        found = []
        for tensor, position in zip(tensors, positions, strict=True):
            if position is None or position >= len(ports):
                found.append(tensor)
            else:
                shape = tuple(int(d) for d in tensor.shape)
                found.append(replace(tensor, shape=local(shape, ports[position][0], self.mesh)))
        return tuple(found)

    def _share(self, placements: Placements) -> float:
        cut = (n for p, n in zip(placements, self.mesh.shape, strict=True) if isinstance(p, Shard))
        return 1.0 / prod(cut)

    def _inside(
        self,
        rule: ShardingRule,
        option: OpOption,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        gradient: bool,
    ) -> float:
        """Return the seconds of reductions inside local forms.

        A form reduces over the dims without the sharded factor.

        Where the result still has the factor (softmax), its largest statistic counts, the operand
        without that factor: twice forward (maximum and sum), once backward. A form whose result is
        Partial pays for its reduction on the edge.
        """
        seconds = 0.0
        for axis, name in enumerate(option.strategy):
            name = factor_of(name)[0]
            if name not in rule.forms or name in rule.local or not inputs:
                continue
            if any(gives[0][axis] == PARTIAL for gives in option.gives):
                continue
            dims = rule.operands[0] if rule.operands else ()
            size = prod(
                int(s)
                for s, factors in zip(inputs[0].shape, dims, strict=False)
                if name not in factors
            )
            times = 3 if gradient else 2
            bytes_ = float(size * item_bytes(inputs[0].dtype))
            if outputs and not outputs[0].shape:
                bytes_ = min(bytes_, 8.0 * size)
            seconds += times * self._reshards.single(axis, "partial", "replicate", bytes_)
        return seconds


def as_local_form(rule: ShardingRule | None, strategy: Strategy, spec: OpSpec) -> OpSpec:
    """Return an op as its form without communication; itself where it has none."""
    for factor, stripes in map(factor_of, strategy):
        if rule is not None and factor in rule.local:
            attributes = (
                spec.attributes if stripes == 1 else (*spec.attributes, ("stripes", stripes))
            )
            return replace(spec, name=f"aten.{rule.forms[factor]}", attributes=attributes)
    return spec


def positions(node: fx.Node) -> list[int | None]:
    """Return the operand position of each tensor of the op's spec; None inside tuples."""
    found: list[int | None] = []
    count = 0

    def visit(value: Any) -> None:
        nonlocal count
        if isinstance(value, fx.Node):
            inner = value.meta.get("val")
            if isinstance(inner, torch.Tensor):
                found.append(count)
                count += 1
            else:
                found.extend(None for _ in tensors(inner))
        elif isinstance(value, tuple | list):
            for entry in value:
                visit(entry)
        elif isinstance(value, dict):
            for entry in value.values():
                visit(entry)

    _, args, kwargs = unwrap_seeded_call(node)
    visit((args, kwargs))
    return found


def _wait(port: Port, axes: Sequence[int]) -> Port:
    """Return the port with a gradient that is not yet reduced on axes with a replicated value."""
    value, gradient = port
    return value, tuple(
        PARTIAL if i in axes and value[i] == REPLICATE else g for i, g in enumerate(gradient)
    )


def _agrees(option: OpOption, results: Sequence[Placements]) -> bool:
    """Return whether the option's results match the decided ones."""
    return all(
        wanted is None or wanted == have
        for given, decided in zip(option.gives, results, strict=False)
        for have, wanted in zip(given[0], decided, strict=True)
    )
