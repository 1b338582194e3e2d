"""Resolve the optimizer that the user passes, and measure its state for given shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from fxpart.compat import optimizer_over
from fxpart.compat.multi_optimizer import NamedOptimizerFactory, members
from fxpart.errors import FxpartError, error
from fxpart.optim import BasisRotation, Muon, RowWiseAdagrad

Shape = tuple[tuple[int, ...], torch.dtype]
Options = dict[str, bool | float | tuple[float, ...]]
Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer: its name for messages and plans, and its factory.

    parts: for several optimizers, by name pattern; ``make`` then takes (name, tensor) pairs.
    """

    name: str
    make: Make
    parts: tuple[tuple[str, OptimizerChoice], ...] = ()


def choose(optimizer: object = "adamw") -> OptimizerChoice:
    """Return the optimizer for a name, class, instance, partial or ``parameters -> optimizer``.

    A mapping of name patterns to these means several optimizers, each for the parameters that its
    pattern is the first to match. An instance is treated as its class with the options of its first
    group. Raise FXP109 for anything else.
    """
    if isinstance(optimizer, str):
        table = _named()
        name = optimizer.lower()
        if name in table:
            return OptimizerChoice(name, table[name])
        raise error(
            "FXP109",
            where=f"optimizer={optimizer!r}",
            why="neither torch.optim nor fxpart.optim has an optimizer of this name",
            fix=f"use one of {', '.join(sorted(table))}; or a class or function of parameters",
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        return OptimizerChoice(type(optimizer).__name__.lower(), partial(_like, optimizer))
    if isinstance(optimizer, OptimizerChoice):
        return optimizer
    if isinstance(optimizer, Mapping) and optimizer:
        parts = tuple((str(pattern), choose(each)) for pattern, each in optimizer.items())
        made: Any = NamedOptimizerFactory({pattern: part.make for pattern, part in parts})
        return OptimizerChoice(" and ".join(part.name for _, part in parts), made, parts)
    if callable(optimizer):
        inner: Any = optimizer
        while isinstance(inner, partial):
            inner = inner.func
        name = getattr(inner, "__name__", type(inner).__name__).strip("<>").lower()
        return OptimizerChoice(name, optimizer)
    raise error(
        "FXP109",
        where=f"optimizer={optimizer!r}",
        why=f"a {type(optimizer).__name__} is not an optimizer",
        fix='use "adamw", torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9), or a function',
    )


def describe_optimizer(optimizer: object) -> tuple[str, Options]:
    """Return the class name in lowercase, and the options that are numbers.

    For several optimizers, their names and no options. Options that only select an implementation
    are left out. Raises FXP109 as :func:`choose` does.
    """
    choice = choose(optimizer)
    if choice.parts:
        return choice.name, {}
    try:
        made = choice.make([torch.nn.Parameter(torch.zeros(1, 1))])
    except Exception:  # user functions may raise anything for a single parameter
        return choice.name, {}
    if not isinstance(made, torch.optim.Optimizer):
        return choice.name, {}
    found: Options = {}
    for name, value in made.param_groups[0].items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if name in _IMPLEMENTATION:
            continue
        if isinstance(value, bool | int | float):
            found[name] = value if isinstance(value, bool) else float(value)
        elif isinstance(value, tuple) and all(isinstance(v, int | float) for v in value):
            found[name] = tuple(map(float, value))
    return type(made).__name__.lower(), found


def has_options(optimizer: object) -> bool:
    """Return whether the user specified options, not only a name or class."""
    return not isinstance(optimizer, str | type)


# Options that select an implementation, or that fxpart sets.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable", "initial_lr", "maximize"}


def _like(
    instance: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]
) -> torch.optim.Optimizer:
    """Create an optimizer of the instance's class, with all parameters in its first group."""
    group = instance.param_groups[0]
    options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    own = [next(iter(group["params"]), torch.empty(0))]
    others: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in instance.param_groups[1:]]
    made = optimizer_over(instance, [[(own[0], p) for p in parameters], *others], own[0])
    made.param_groups = [{**options, "params": made.param_groups[0]["params"]}]
    return made


def state_bytes(
    choice: OptimizerChoice, shapes: Sequence[Shape], names: Sequence[str] = ()
) -> list[int]:
    """Return the bytes of optimizer state per parameter shape, after one step.

    names: of the parameters, for several optimizers. The real class is stepped once on meta
    parameters, so nothing is allocated. If it needs values, it is stepped on real zeros, one small
    parameter at a time. Raise FXP109 if it cannot be stepped.
    """
    if choice.parts:
        found: dict[str, int] = {}
        shape_of = dict(zip(names, shapes, strict=True))
        for (_, part), mine in zip(
            choice.parts, members([p for p, _ in choice.parts], names), strict=True
        ):
            sizes = state_bytes(part, [shape_of[name] for name in mine])
            found |= zip(mine, sizes, strict=True)
        return [found[name] for name in names]
    table: dict[Shape, int] = {}
    if is_torch_class(choice):
        table = _SIZES.setdefault((choice.make, torch.get_default_dtype()), table)
    missing = [shape for shape in dict.fromkeys(shapes) if shape not in table]
    if missing:
        table |= zip(missing, _measure_states(choice, missing), strict=True)
    return [table[shape] for shape in shapes]


# Bytes of state by parameter, for each class of torch.optim and dtype of its counters.
_SIZES: dict[tuple[Make, torch.dtype], dict[Shape, int]] = {}


def _measure_states(choice: OptimizerChoice, shapes: Sequence[Shape]) -> list[int]:
    """Return the bytes of state of parameters of these shapes after one step."""
    try:
        states = _step(choice, shapes, "meta")
        return [sum(t.numel() * t.element_size() for t in tensors_in(s)) for s in states]
    except FxpartError:
        raise
    except Exception:  # user classes may raise anything on meta tensors
        return [_measured(choice, shape) for shape in shapes]


MAX_REAL = 1 << 20  # maximum elements of a parameter for a real step
_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37)


def _measured(choice: OptimizerChoice, shape: Shape) -> int:
    """Measure the state of a real parameter of this shape, or of a small substitute.

    The substitute has a different prime in each dim, so that a dim of the state identifies the
    parameter dims (Adafactor stores rows and columns, Adam the whole).
    """
    dims = shape[0]
    large = torch.Size(dims).numel() > MAX_REAL and len(dims) <= len(_PRIMES)
    primes = tuple(p if d > 1 else d for d, p in zip(dims, _PRIMES, strict=False))
    stand_in = primes if large else dims
    try:
        (state,) = _step(choice, [(stand_in, shape[1])], "cpu")
    except FxpartError:
        raise
    except Exception as cause:  # user classes may raise anything
        raise error(
            "FXP109",
            where=f"optimizer {choice.name}, a parameter of shape {list(dims)}",
            why=f"one step of it fails: {type(cause).__name__}: {cause}",
            fix="pass a function of parameters that returns an optimizer for all of them",
        ) from cause
    if not large:
        return sum(t.numel() * t.element_size() for t in tensors_in(state))
    real = _runs(stand_in, dims)
    return sum(
        prod(real.get(d, d) for d in tensor.shape) * tensor.element_size()
        for tensor in tensors_in(state)
    )


def _runs(small: Sequence[int], real: Sequence[int]) -> dict[int, int]:
    """Map the product of each run of adjacent dims of ``small`` to that of ``real``."""
    ends = range(len(small) + 1)
    return {prod(small[i:j]): prod(real[i:j]) for i in ends for j in ends if i < j}


def _step(choice: OptimizerChoice, shapes: Sequence[Shape], device: str) -> list[object]:
    """Return the state of each parameter after one real step."""
    parameters = [
        torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        for shape, dtype in shapes
    ]
    optimizer = choice.make(parameters)
    sparse = type(optimizer) is torch.optim.SparseAdam
    for parameter in parameters:
        parameter.grad = _no_rows(parameter) if sparse else torch.zeros_like(parameter)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise error(
            "FXP109",
            where=f"optimizer {choice.name}",
            why=f"it returned a {type(optimizer).__name__}, not a torch.optim.Optimizer",
            fix="pass a function that takes the parameters and returns the optimizer",
        )
    optimizer.step()
    return [optimizer.state.get(parameter, {}) for parameter in parameters]


def _no_rows(parameter: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient without rows, on the parameter's device."""
    ids = torch.zeros(1, 0, dtype=torch.long, device=parameter.device)
    values = parameter.detach().new_zeros(0, *parameter.shape[1:])
    return torch.sparse_coo_tensor(ids, values, parameter.shape, check_invariants=False)


def tensors_in(state: object) -> Iterator[torch.Tensor]:
    """Yield all tensors in a nested state."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for entry in state.values():
            yield from tensors_in(entry)
    elif isinstance(state, list | tuple):
        for entry in state:
            yield from tensors_in(entry)


def is_torch_class(choice: OptimizerChoice) -> bool:
    """Return whether the factory is a class of torch.optim, whose steps can be measured once."""
    return choice.make in _named().values()


def _named() -> dict[str, type[torch.optim.Optimizer]]:
    """Return the classes of torch.optim and fxpart.optim by lowercase name."""
    found = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }
    own = (Muon, BasisRotation, RowWiseAdagrad)
    return {**found, **{kind.__name__.lower(): kind for kind in own}}
