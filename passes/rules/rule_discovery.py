"""Propose a sharding rule for an op by comparing sharded and unsharded runs on random operands.

A factor is one dim, or none, of each operand and result, all of equal size. It holds if the op on
two halves returns the halves of the whole result (or parts of its sum). The result is a proposal:
it holds for the sizes and arguments that were tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, product
from typing import Any, TypeAlias

import torch

from fxpart.compat import operation_schema
from fxpart.compiler.tensor_sizes import tensors

Where: TypeAlias = tuple[int | None, ...]  # a dim of each tensor, or None
SHARDS = 2
ADDED = -1  # an operand that is added once: zeros on all shards but the first
_SIZES = (4, 6, 8, 10)
_TRIALS = 30_000


@dataclass(frozen=True)
class FactorCandidate:
    """One factor: its dim in operands (ADDED: added once) and in results (None: summed)."""

    operands: Where
    results: Where


@dataclass(frozen=True)
class RuleProposal:
    """The proposed rule of an op on these shapes.

    linear: sets of operands that may be Partial together.
    """

    op: str
    names: tuple[str, ...]
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    factors: tuple[FactorCandidate, ...]
    linear: tuple[frozenset[int], ...]

    @property
    def notation(self) -> str:
        """The dims in factor notation; ``_`` marks dims that are not sharded."""
        letters = iter("abcdefghijklmnopqrstuvw")
        named = [(f, next(letters)) for f in self.factors]
        terms = []
        for side, shapes in (("operands", self.operands), ("results", self.results)):
            texts = []
            for i, shape in enumerate(shapes):
                dims = [f"_{side[0]}{i}{d}" for d in range(len(shape))]
                for factor, letter in named:
                    dim = getattr(factor, side)[i]
                    if dim is not None and dim != ADDED:
                        dims[dim] = letter
                texts.append(" ".join(dims))
            terms.append(", ".join(texts))
        return " -> ".join(terms)

    @property
    def additive(self) -> tuple[str, ...]:
        """Names of the operands that are added to the result."""
        found = {i for f in self.factors for i, d in enumerate(f.operands) if d == ADDED}
        return tuple(self.names[i] for i in sorted(found))

    @property
    def entry(self) -> str:
        """The table line for fxpart.passes.rules that accepts the proposal."""
        more = f', additive="{" ".join(self.additive)}"' if self.additive else ""
        sets = [" ".join(self.names[i] for i in sorted(s)) for s in self.linear]
        texts = ", ".join(f'"{s}"' for s in sets)
        more += f", linear=[{texts}]" if sets else ""
        return f'"{self.op}": notation("{self.notation}"{more}),'


def discover(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None, seed: int = 0
) -> RuleProposal:
    """Propose a rule for ``op`` on operands like these (tensors of args, lists flattened).

    Values are drawn again for every comparison; integers stay within the same bounds.
    """
    runner = _ShardTrial(op, tuple(args), kwargs or {}, seed)
    found = [f for f in _candidates(runner) if all(runner.holds(f, trial) for trial in range(2))]
    kept: list[FactorCandidate] = []
    for factor in sorted(found, key=_dims_named, reverse=True):
        if not any(_overlap(factor, other) for other in kept):
            kept.append(factor)
    indices = range(len(runner.shapes))
    floating = [i for i in indices if runner.like[i].is_floating_point()]
    sets = [
        frozenset(some)
        for count in range(1, len(floating) + 1)
        for some in combinations(floating, count)
        if all(runner.adds(some, trial) for trial in range(2))
    ]
    name = str(operation_schema(op).name).replace("::", ".")
    order = sorted(kept, key=lambda f: _first(f))
    return RuleProposal(name, runner.names, runner.shapes, runner.outs, tuple(order), tuple(sets))


def _dims_named(factor: FactorCandidate) -> int:
    return sum(d is not None and d != ADDED for d in (*factor.operands, *factor.results))


def _first(factor: FactorCandidate) -> tuple[int, int]:
    return next((i, d) for i, d in enumerate(factor.operands) if d is not None and d != ADDED)


def _overlap(a: FactorCandidate, b: FactorCandidate) -> bool:
    """Return whether two factors use the same dim."""
    sides = ((a.operands, b.operands), (a.results, b.results))
    return any(
        x == y and x is not None and x != ADDED
        for left, right in sides
        for x, y in zip(left, right, strict=True)
    )


def _candidates(runner: _ShardTrial) -> Iterator[FactorCandidate]:
    """Yield every assignment of equal-size dims that includes a dim of some operand."""
    sizes = sorted({s for shape in runner.shapes for s in shape if s % SHARDS == 0})
    for size in sizes:
        inside = [[None, *(d for d, s in enumerate(shape) if s == size)] for shape in runner.shapes]
        outside = [[None, *(d for d, s in enumerate(shape) if s == size)] for shape in runner.outs]
        for operands in product(*inside):
            if all(d is None for d in operands):
                continue
            for results in product(*outside):
                yield FactorCandidate(operands, results)
                if all(r is None for r in results):
                    for bias in (i for i, d in enumerate(operands) if d is None):
                        added = (*operands[:bias], ADDED, *operands[bias + 1 :])
                        yield FactorCandidate(added, results)


class _ShardTrial:
    """The op with replaceable operands, run on whole and on sharded operands."""

    def __init__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> None:
        self.op, self.args, self.kwargs, self.seed = op, args, kwargs, seed
        declared = [a.name for a in operation_schema(op).arguments]
        given = [*zip(declared, args, strict=False), *kwargs.items()]
        pairs = [(name, t) for name, value in given for t in tensors(value)]
        self.names = tuple(name for name, _ in pairs)
        self.like = [t for _, t in pairs]
        self.shapes = tuple(tuple(t.shape) for t in self.like)
        self.outs = tuple(tuple(t.shape) for t in self.run(self.like))

    def run(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results on these operands."""
        left = iter(operands)

        def put(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return next(left).clone()
            return [put(v) for v in value] if isinstance(value, list | tuple) else value

        args = [put(a) for a in self.args]
        return tensors(self.op(*args, **{k: put(v) for k, v in self.kwargs.items()}))

    def draw(self, trial: int) -> list[torch.Tensor]:
        """Return new random operands like the given ones."""
        made = torch.Generator().manual_seed(1000 * self.seed + trial)
        found = []
        for t in self.like:
            if t.is_floating_point():
                found.append(torch.randn(t.shape, generator=made, dtype=torch.float64).to(t.dtype))
            else:
                high = int(t.max()) + 1 if t.numel() else 1
                found.append(torch.randint(0, max(high, 1), t.shape, generator=made).to(t.dtype))
        return found

    def holds(self, factor: FactorCandidate, trial: int) -> bool:
        """Return whether the shards' results combine to the whole result."""
        whole = self.draw(trial)
        pieces = []
        for t, dim in zip(whole, factor.operands, strict=True):
            if dim == ADDED:
                pieces.append([t, *[torch.zeros_like(t)] * (SHARDS - 1)])
            else:
                pieces.append([t] * SHARDS if dim is None else list(t.chunk(SHARDS, dim)))
        return self._equal(whole, pieces, factor.results)

    def adds(self, summed: Sequence[int], trial: int) -> bool:
        """Return whether results are sums if these operands are."""
        whole = self.draw(trial)
        pieces = []
        for i, t in enumerate(whole):
            part = torch.randn(t.shape, generator=torch.Generator().manual_seed(7 + i)).to(t.dtype)
            pieces.append([t - part, part] if i in summed else [t] * SHARDS)
        return self._equal(whole, pieces, (None,) * len(self.outs))

    def _equal(
        self, whole: Sequence[torch.Tensor], pieces: list[list[torch.Tensor]], results: Where
    ) -> bool:
        try:
            runs = [self.run([piece[shard] for piece in pieces]) for shard in range(SHARDS)]
        except (RuntimeError, ValueError, IndexError):
            return False
        for i, (expected, dim) in enumerate(zip(self.run(whole), results, strict=True)):
            parts = [run[i] for run in runs]
            if dim is None and not (expected.is_floating_point() or expected.is_complex()):
                return False  # sums of integers and booleans prove nothing
            if dim is None and any(p.shape != expected.shape for p in parts):
                return False
            try:
                made = parts[0] + parts[1] if dim is None else torch.cat(parts, dim)
            except (RuntimeError, IndexError):
                return False
            if made.shape != expected.shape or not torch.allclose(made, expected, equal_nan=True):
                return False
        return True


def example(
    op: Any, given: dict[str, Any] | None = None
) -> tuple[list[Any], dict[str, Any]] | None:
    """Return arguments that the op accepts, with many different sizes; None if none are found.

    given: arguments by name. Shapes of up to three dims are tried, of floats and integers.
    """
    known = given or {}
    needed = [
        a
        for a in operation_schema(op).arguments
        if a.name in known or not a.has_default_value() or str(a.type) == "Optional[Tensor]"
    ]
    best: tuple[int, list[Any], dict[str, Any]] | None = None
    for optional in (True, False):
        wanted = [a for a in needed if optional or a.name in known or not a.has_default_value()]
        for values in islice(_values(wanted, known), _TRIALS):
            args = {a.name: v for a, v in zip(wanted, values, strict=True)}
            score = _score(op, args, best[0] if best else 0)
            if score:
                best = (score, [], args)
        if best is not None:
            break
    return None if best is None else (best[1], best[2])


def _score(op: Any, args: dict[str, Any], least: int) -> int:
    """Score arguments by number of dims and distinct sizes; 0 if the op fails."""
    shapes = [tuple(t.shape) for v in args.values() for t in tensors(v)]
    sizes = [s for shape in shapes for s in shape]
    score = 10 * len(set(sizes)) + len(sizes)
    if score <= least:
        return 0
    try:
        found = tensors(op(**args))
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
        return 0
    return score if found and all(t.dim() for t in found) else 0


def _values(wanted: Sequence[Any], known: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield combinations of values: every shape of every rank, equal ranks first."""
    plain: dict[str, Sequence[Any]] = {
        "int": (-1, 1),
        "bool": (False,),
        "number": (0.5,),
        "float": (0.5,),
        "List[int]": ((-1,), (0,), (4,)),
    }
    tensor_names = [a.name for a in wanted if "Tensor" in str(a.type) and a.name not in known]
    rest = [
        (known[a.name],) if a.name in known else plain.get(str(a.type), (None,))
        for a in wanted
        if a.name not in tensor_names
    ]
    ranks = sorted(product((2, 1, 3), repeat=len(tensor_names)), key=lambda r: len(set(r)))
    for others in product(*rest):
        for kinds in product("ri", repeat=len(tensor_names)):
            for rank in ranks:
                for sizes in product(_SIZES, repeat=sum(rank)):
                    left, made = iter(sizes), {}
                    for name, count, kind in zip(tensor_names, rank, kinds, strict=True):
                        made[name] = _tensor([next(left) for _ in range(count)], kind)
                    other = iter(others)
                    yield tuple(made[a.name] if a.name in made else next(other) for a in wanted)


def _tensor(shape: Sequence[int], kind: str) -> torch.Tensor:
    if kind == "i":
        return torch.arange(max(1, torch.Size(shape).numel())).reshape(*shape) % min(_SIZES)
    return torch.rand(*shape, dtype=torch.float64)
