"""Single-process reference: run the captured graph unpartitioned, microbatch by microbatch.

It shares no code with the code generator or the runtime: torch.fx's interpreter executes the graph,
torch's autograd differentiates it and one torch optimizer updates all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpart.accelerator import CUDA, find_accelerator, get_device_module
from fxpart.capture.captured_model import CapturedModel
from fxpart.compat import TorchDispatchMode
from fxpart.passes.objective import OBJECTIVE_KEY, TotalInputs
from fxpart.rng import call_kept, keeps_by_rate, microbatch_key, mix, seeded


@dataclass(frozen=True)
class TransferConversion:
    """Conversion of a value that another stage computes.

    before: the stage to which its gradient is sent if that stage only forwards the value; None for
    the stage that computes it. ahead, back: the dtypes in which value and gradient are sent, None
    if they are not converted.
    """

    before: int | None
    ahead: torch.dtype | None
    back: torch.dtype | None


@dataclass(frozen=True)
class TransferPrecision:
    """Rounding of transfers between stages. stages: of each op. sent: by value and stage."""

    stages: Mapping[fx.Node, int]
    sent: Mapping[tuple[str, int], TransferConversion]


class WholeGraph(fx.Interpreter):
    """Runs a graph with state from a dictionary of tensors by original name."""

    def __init__(
        self,
        graph: fx.GraphModule,
        state: dict[str, torch.Tensor],
        sending: TransferPrecision | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Store the graph and the state that it reads (and writes, for buffers).

        sending: rounds values like the transfers between stages of the partitioned run. device:
        where new tensors are created, by default as recorded in the graph.
        """
        super().__init__(graph)
        self.state = state
        self._device = device
        self._sending = sending
        self._arrived: dict[tuple[str, int], Any] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the graph's outputs for its inputs."""
        self._arrived = {}
        try:
            return super().run(*args, **kwargs)
        finally:
            self._arrived = {}

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        """Return the values of a node's arguments, as they are on its stage."""
        sending = self._sending
        stage = None if sending is None else sending.stages.get(n)
        if sending is None or stage is None:
            return super().map_nodes_to_values(args, n)
        return fx.node.map_arg(args, lambda a: self._on_stage(a.name, self.env[a], stage, sending))

    def _on_stage(self, name: str, value: Any, stage: int, sending: TransferPrecision) -> Any:
        """Return a value as the stage receives it, converted once."""
        route = sending.sent.get((name, stage))
        if route is None:
            return value
        if (name, stage) not in self._arrived:
            if route.before is not None:
                value = self._on_stage(name, value, route.before, sending)
            send: Any = _TransferCast.apply  # torch has no types for it
            self._arrived[name, stage] = send(value, route.ahead, route.back)
        return self._arrived[name, stage]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run an op; it creates tensors on the device of the run."""
        if self._device is not None and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._device}
        return super().call_function(target, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return the state tensor of that name."""
        return (
            self.state[target] if target in self.state else super().get_attr(target, args, kwargs)
        )


class _TransferCast(torch.autograd.Function):
    """Cast a value to ``ahead`` and back, and its gradient to ``back``."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, ahead: Any, back: Any) -> torch.Tensor:
        ctx.back = back
        return value.view_as(value) if ahead is None else value.to(ahead).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        if ctx.back is not None:
            gradient = gradient.to(ctx.back).to(gradient.dtype)
        return gradient, None, None


class SingleProcessTrainer:
    """Trains the captured model in one process, on the same microbatches as a partitioned run.

    graph: the prepared graph (placeholder ``rng_key`` first). State is cloned from ``captured``.
    """

    def __init__(
        self,
        captured: CapturedModel,
        graph: fx.GraphModule,
        optimizer: Any,
        *,
        microbatches: int,
        seed: int,
        multiple: int = 1,
        convert: Callable[[torch.Tensor], torch.Tensor] | None = None,
        sending: TransferPrecision | None = None,
        device: torch.device | None = None,
    ) -> None:
        """optimizer: takes the parameter list and returns a torch optimizer.

        An optimizer callable with an attribute ``named`` takes pairs of names and parameters.
        multiple: divides the rows of each microbatch, as ranks that share them require. convert:
        applied to each state tensor. sending: the rounding of the partitioned run's transfers.
        device: where to train, by default where the module is.
        """
        self.captured = captured
        self.state = clone_state(captured, convert, device)
        self._device = device
        self.microbatches = microbatches
        self.multiple = multiple
        self.seed = seed
        self.steps = 0
        found = graph.meta.get(OBJECTIVE_KEY)
        self._totals: TotalInputs | None = found
        names = [n.name for n in graph.graph.find_nodes(op="placeholder")]
        self._taken = [n for n in names if found is not None and n in found.inputs]
        self._run = WholeGraph(graph, self.state, sending, device)
        names = [n for n in captured.parameters if self.state[n].requires_grad]
        named = getattr(optimizer, "named", False)
        trained = [(n, self.state[n]) if named else self.state[n] for n in names]
        self.optimizer = optimizer(trained) if trained else None

    def backward(self, leaves: list[Any]) -> torch.Tensor:
        """Accumulate gradients of the weighted loss over all microbatches; return that loss."""
        total: torch.Tensor | None = None
        leaves = [leaf if self._device is None else leaf.to(self._device) for leaf in leaves]
        pieces = list(split_batch(self.captured, leaves, self.microbatches, self.multiple))
        fed = self._fed(leaves, [weight for _, weight in pieces])
        for index, (part, weight) in enumerate(pieces):
            key = microbatch_key(self.seed, self.steps, index)
            loss = self._run.run(key, *part, *fed[index])[0]
            if loss.requires_grad:
                torch.autograd.backward([loss], [torch.full_like(loss, weight)])
            value = loss.detach() * weight
            total = value if total is None else total + value
        self.steps += 1
        assert total is not None
        return total

    def _fed(self, leaves: list[Any], weights: list[float]) -> list[list[torch.Tensor]]:
        """Return the graph's additional inputs: batch totals and a microbatch's fraction."""
        found = self._totals
        if found is None:
            return [[] for _ in weights]
        by_name = {i.name: t for i, t in zip(self.captured.inputs, leaves, strict=True)}
        given = [by_name[n.name] for n in found.graph.find_nodes(op="placeholder")]
        with torch.no_grad():
            whole = fx.GraphModule(found.module, found.graph)
            totals = WholeGraph(whole, self.state, device=self._device).run(*given)
        known = dict(zip(found.names, totals, strict=True))
        dtypes = {name: getattr(torch, dtype) for name, dtype in found.shares}
        return [
            [
                known[name]
                if name in known
                else torch.tensor(weight, dtype=dtypes[name], device=self._device)
                for name in self._taken
            ]
            for weight in weights
        ]

    def update(self) -> None:
        """Run one optimizer step, then clear the gradients."""
        if self.optimizer is not None:
            self.optimizer.step()
            for name in self.captured.parameters:  # the optimizer may have only some of them
                self.state[name].grad = None

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return a copy of each parameter's gradient by original name."""
        names = self.captured.parameters
        return {
            n: g.to_dense() if g.is_sparse else g.clone()
            for n in names
            if (g := self.state[n].grad) is not None
        }


def clone_state(
    captured: CapturedModel,
    convert: Callable[[torch.Tensor], torch.Tensor] | None = None,
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """Copy all state by main name, trainable like in the model.

    convert: applied to each copy. device: of the copies, by default that of each tensor.
    """
    found = {
        name: tensor.detach().to(device or tensor.device, copy=True)
        for name, tensor in captured.state.items()
    }
    return {
        name: (tensor if convert is None else convert(tensor)).requires_grad_(
            captured.state[name].requires_grad
        )
        for name, tensor in found.items()
    }


def split_batch(
    captured: CapturedModel, leaves: list[Any], microbatches: int, multiple: int = 1
) -> Iterator[tuple[list[Any], float]]:
    """Split tensors (in the order of ``captured.inputs``) into microbatches with weights n_i/N.

    multiple: divides the rows of the batch and of each microbatch.
    """
    dims = [spec.batch_dim for spec in captured.inputs]
    sizes = {t.shape[d] for t, d in zip(leaves, dims, strict=True) if d is not None}
    total = max(sizes, default=multiple)
    shares = total // multiple
    count = min(microbatches, shares)
    base, extra = divmod(shares, count)
    rows = [(base + (1 if index < extra else 0)) * multiple for index in range(count)]
    cut = [
        _cut(t, d, rows if t.shape[d] == total and multiple > 1 else count)
        if d is not None
        else (t,) * count
        for t, d in zip(leaves, dims, strict=True)
    ]
    for index in range(count):
        yield [parts[index] for parts in cut], rows[index] / total


def _cut(tensor: torch.Tensor, dim: int, how: list[int] | int) -> tuple[torch.Tensor, ...]:
    """Split into pieces of these lengths, or into this number of nearly equal pieces."""
    if isinstance(how, int):
        return torch.tensor_split(tensor, how, dim=dim)
    return torch.split(tensor, how, dim=dim)


_NUMBERED = 1 << 62  # seeds from here on are this plus a number of random primitives


class KeyedRandom(TorchDispatchMode):
    """Makes an eager module draw the random numbers of the captured graph.

    The n-th random primitive of a microbatch is seeded with ``mix(key, n)``, like the graph's n-th
    random op by :func:`fxpart.rng.seeded`. Scalars count only with ``scalars``: a model may draw
    one to decide in Python what runs (layerdrop), without an op in the graph. The global seed
    has the number n: a checkpoint, which restores it, draws the same again.
    """

    def __init__(self, key: int, *, scalars: bool = False) -> None:
        """key: the microbatch's key."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.key = key
        self.scalars = scalars
        self.index = 0
        torch.default_generator.manual_seed(_NUMBERED)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Seed before each primitive that draws random numbers."""
        if not is_random(func, args, kwargs or {}) or not (self.scalars or _large(args)):
            return func(*args, **(kwargs or {}))
        number = torch.default_generator.initial_seed() - _NUMBERED
        self.index = number if number >= 0 else self.index  # otherwise the model has seeded it
        seed = mix(self.key, self.index)
        self.index += 1
        try:
            if keeps_by_rate(func):
                return call_kept(seed, func, args, kwargs or {})
            torch.manual_seed(seed)
            return func(*args, **(kwargs or {}))
        finally:
            torch.default_generator.manual_seed(_NUMBERED + self.index)


def is_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a primitive draws random numbers (attention only with dropout)."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(given > 0.0)
    return True


def _large(args: tuple[Any, ...]) -> bool:
    """Return whether a random primitive draws more than a scalar, by its tensor or its shape."""
    first = args[0] if args else None
    if isinstance(first, torch.Tensor):
        return first.numel() != 1 or first.dim() > 0
    return not (isinstance(first, (list, tuple)) and len(first) == 0)


def draws_scalars(graph: fx.GraphModule) -> bool:
    """Return whether a random op of the graph returns a tensor without dims."""
    return any(
        n.op == "call_function" and n.target is seeded and getattr(n.meta["val"], "shape", 1) == ()
        for n in graph.graph.nodes
    )


@contextmanager
def keyed_random(key: int, *, scalars: bool = False) -> Iterator[None]:
    """Use :class:`KeyedRandom` in a block of code, and restore the global generator afterwards."""
    kind = find_accelerator() or CUDA
    module = get_device_module(kind)
    used = [module.current_device()] if module.is_initialized() else []
    with torch.random.fork_rng(used, device_type=kind), KeyedRandom(key, scalars=scalars):
        yield
