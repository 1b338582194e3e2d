"""Random ops whose numbers depend on seed, step, microbatch and op, not on the plan.

A random op of the graph is called through :func:`seeded`: the default generator of the op's device
is seeded for this call and restored afterwards. What dropout keeps is instead a function of seed
and position (counter-based, as in Salmon et al., SC 2011), so that a rank computes it for its shard
only. Results therefore do not depend on the number of ranks, the order of stages, or restarts,
except where a partial batch is cut into other microbatches on another mesh.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from fxpart.accelerator import get_device_module, is_accelerator
from fxpart.compat.modules import operation_schema
from fxpart.compat.tensors import is_fake

_ATEN = torch.ops.aten
_MASK = (1 << 64) - 1
_LOCK = threading.RLock()  # All threads share one generator.
# The constants of splitmix64, and those of a 32-bit finalizer with low bias (Wellons 2018).
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_COLUMN, _LOW, _HIGH = 0x9E3779B1, 0x7FEB352D, 0x846CA68B
_CHUNK = 1 << 16  # elements whose intermediate values stay in a processor's cache
_Positions = torch.Tensor | int  # a number stands for all positions below it
_RATES = frozenset({"p", "dropout", "dropout_p"})  # arguments of ops that contain a dropout


def mix(*words: int) -> int:
    """Return a 63-bit hash of integers: splitmix64 (Steele, Lea, Flood, OOPSLA 2014), chained."""
    state = 0
    for word in words:
        state = (state + (word & _MASK) + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return state >> 1


class RepeatedKey(int):
    """The key of a microbatch whose rows are repeated, so that its random numbers repeat too.

    count: how often each row is repeated. axes: the mesh axes over which ranks share rows.
    """

    count: int
    axes: frozenset[str]

    @classmethod
    def of(cls, key: int, count: int, axes: frozenset[str]) -> RepeatedKey:
        """Return the key with the repetition count and axes."""
        found = cls(key)
        found.count, found.axes = count, axes
        return found


def microbatch_key(seed: int, step: int, microbatch: int) -> int:
    """Return the key that stage modules take as first argument; all numbers are 0-based."""
    return mix(seed, step, microbatch)


def seeded(key: int, index: int, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``op(*args, **kwargs)`` with the generator seeded by ``mix(key, index)``.

    key: the microbatch's key. index: the op's number among the graph's random ops.
    """
    return draw(mix(key, index), op, *args, **kwargs)


def draw(seed: int, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``op(*args, **kwargs)`` with the generator of its device seeded by ``seed``.

    What the op drops is a function of the seed: see :func:`draw_kept`.
    """
    if op is _ATEN.dropout.default and args[2:] == (True,) and not kwargs:
        return args[0] * dropout_factors(seed, args[1], args[0])
    with draw_from(seed, op, args, kwargs):
        return op(*args, **kwargs)


@contextmanager
def draw_from(
    seed: int, op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Make the block, a call of ``op``, draw its random numbers as :func:`draw` does."""
    generator = _generator(args, kwargs)
    with _LOCK, KeyedDropout(seed) if _has_rate(op) else nullcontext():
        state = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(state)


@lru_cache(maxsize=4096)
def _has_rate(op: Callable[..., Any]) -> bool:
    """Return whether an op drops elements at a rate that is its argument."""
    schema = operation_schema(op)
    return schema is not None and any(a.name in _RATES for a in schema.arguments)


class KeyedDropout(TorchDispatchMode):
    """Makes every primitive that keeps elements at one rate draw by position.

    The first has the seed, others of one op (several layers of an LSTM) seeds made of it.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seeds: Iterator[int] = (mix(seed, n) if n else seed for n in count())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a primitive; in the kernel of a custom op, composite ops arrive here whole."""
        kwargs = kwargs or {}
        if keeps_by_rate(func):
            return call_kept(next(self._seeds), func, args, kwargs)
        if _has_rate(func):
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        return func(*args, **kwargs)


def keeps_by_rate(func: Any) -> bool:
    """Return whether a primitive keeps elements at one rate, as dropout does."""
    return func in (_ATEN.bernoulli_.float, _ATEN.bernoulli.p, _ATEN.native_dropout.default)


def call_kept(seed: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a primitive of :func:`keeps_by_rate` returns, drawn by position."""
    names = [argument.name for argument in operation_schema(func).arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    tensor, rate = args[0], given.get("p", 0.5)  # torch leaves out the default of bernoulli_
    if func is _ATEN.native_dropout.default:
        if not given["train"]:
            return func(*args, **kwargs)
        factors = dropout_factors(seed, rate, tensor)
        return tensor * factors, factors != 0
    ones = draw_kept(seed, rate, tensor)
    return tensor.copy_(ones) if func is _ATEN.bernoulli_.float else ones.to(tensor.dtype)


def dropout_factors(
    seed: int,
    rate: float,
    like: torch.Tensor,
    shape: Sequence[int] | None = None,
    at: Sequence[torch.Tensor | None] = (),
) -> torch.Tensor:
    """Return what dropout multiplies with: 0 at this rate, else 1 / (1 - rate).

    Parameters are those of :func:`draw_kept`.
    """
    kept = draw_kept(seed, 1 - rate, like, shape, at).to(like.dtype)
    return kept.div_(1 - rate) if rate < 1 else kept


def draw_kept(
    seed: int,
    rate: float,
    like: torch.Tensor,
    shape: Sequence[int] | None = None,
    at: Sequence[torch.Tensor | None] = (),
) -> torch.Tensor:
    """Return which elements are kept at this rate: a bool tensor of the shape of ``like``.

    Whether an element is kept is a function of the seed and of its position in a tensor of
    ``shape``. at: for each dim the positions of ``like`` along it; None or missing for all. The
    leading dims give two 32-bit keys for each row by splitmix64, the last dim a counter.
    """
    if is_fake(like) or like.is_meta or not like.numel():
        return torch.empty_like(like, dtype=torch.bool)
    # Numbers are uniform from -2**31; those below the limit are dropped.
    limit = min(max(round((1 - rate) * 2**32), 0), 2**32 - 1) - 2**31
    keep = _keep_on_cpu if like.device.type == "cpu" else _keep_on_device
    sizes = list(like.shape if shape is None else shape) or [1]
    found = keep(seed & _MASK, *_count_lines(sizes, at, like.device), limit, like.device)
    return found.fill_(False).view(like.shape) if rate <= 0 else found.view(like.shape)


def _count_lines(
    sizes: Sequence[int], at: Sequence[torch.Tensor | None], device: torch.device
) -> tuple[_Positions, _Positions]:
    """Return the numbers of rows and of columns, or how many there are if all are kept in order."""
    lines = [*at, *[None] * (len(sizes) - len(at))]
    given, last = lines[:-1], lines[-1]
    columns = sizes[-1] if last is None else last.to(device)
    if all(positions is None for positions in given):
        return math.prod(sizes[:-1]), columns
    rows = torch.zeros(1, dtype=torch.int64, device=device)  # no copy from the host: it would wait
    for size, positions in zip(sizes[:-1], given, strict=True):
        line = torch.arange(size, device=device) if positions is None else positions.to(device)
        rows = (rows[:, None] * size + line).reshape(-1)
    return rows, columns


def _keep_on_cpu(
    seed: int, rows: _Positions, columns: _Positions, limit: int, device: torch.device
) -> torch.Tensor:
    """Return for every row and column whether its number is at least the limit."""
    lines = [np.arange(n) if isinstance(n, int) else n.numpy() for n in (rows, columns)]
    keys = lines[0].astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(seed)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        keys ^= keys >> np.uint64(shift)
        keys *= np.uint64(factor)
    low, high = keys.astype(np.uint32)[:, None], (keys >> np.uint64(32)).astype(np.uint32)[:, None]
    counters = lines[1].astype(np.uint32) * np.uint32(_COLUMN)
    kept: NDArray[np.bool_] = np.empty((len(keys), len(counters)), dtype=np.bool_)
    step = max(1, _CHUNK // len(counters))
    buffers = np.empty((2, min(step, len(keys)), len(counters)), dtype=np.uint32)
    for start in range(0, len(keys), step):
        stop = min(start + step, len(keys))
        value, shifted = buffers[:, : stop - start]
        np.add(counters, low[start:stop], out=value)
        for shift, factor, key in ((16, _LOW, high), (15, _HIGH, None), (16, 1, None)):
            value ^= np.right_shift(value, np.uint32(shift), out=shifted)
            value *= np.uint32(factor)
            if key is not None:
                value ^= key[start:stop]
        np.greater_equal(value.view(np.int32), np.int32(limit), out=kept[start:stop])
    return torch.from_numpy(kept)


def _keep_on_device(
    seed: int, rows: _Positions, columns: _Positions, limit: int, device: torch.device
) -> torch.Tensor:
    """As :func:`_keep_on_cpu`, in torch's signed integers, which wrap around."""
    given = rows, columns, _signed(seed, 64), limit, device
    try:
        return _select_kernel(device.type)(*given)
    except Exception:  # not compiled for these sizes: the same ops one by one
        return _keep(*given)


@lru_cache
def _select_kernel(kind: str) -> Callable[..., torch.Tensor]:
    """Return :func:`_keep` as one kernel, where there is a compiler for devices of this kind.

    It is tried once, as an attempt that fails takes long.
    """
    made: Callable[..., torch.Tensor] = torch.compile(_keep, dynamic=True)
    try:
        made(3, 3, 1, 0, torch.device(kind))
    except Exception:
        return _keep
    return made


def _keep(
    rows: _Positions, columns: _Positions, seed: int, limit: int, device: torch.device
) -> torch.Tensor:
    lines = [torch.arange(n, device=device) if isinstance(n, int) else n for n in (rows, columns)]
    keys = lines[0] * _signed(_GOLDEN, 64) + seed
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        keys = (keys ^ _shift(keys, shift, 64)) * _signed(factor, 64)
    low, high = keys.to(torch.int32)[:, None], _shift(keys, 32, 64).to(torch.int32)[:, None]
    value = lines[1].to(torch.int32) * _signed(_COLUMN, 32) + low
    for shift, factor, key in ((16, _LOW, high), (15, _HIGH, None), (16, 1, None)):
        value = (value ^ _shift(value, shift, 32)) * _signed(factor, 32)
        value = value if key is None else value ^ key
    return value >= limit


def _signed(word: int, bits: int) -> int:
    """Return the signed integer with the same bits."""
    return word - (1 << bits) if word >> (bits - 1) else word


def _shift(words: torch.Tensor, by: int, bits: int) -> torch.Tensor:
    """Return signed words shifted right as unsigned ones."""
    return (words >> by) & ((1 << (bits - by)) - 1)


def _generator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator:
    """Return the default generator of the op's device: its ``device`` argument or first tensor."""
    device = kwargs.get("device")
    if device is None:
        device = next((a.device for a in args if isinstance(a, torch.Tensor)), torch.device("cpu"))
    device = torch.device(device)
    if not is_accelerator(device):
        return torch.default_generator
    module = get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    found: torch.Generator = module.default_generators[index]
    return found
