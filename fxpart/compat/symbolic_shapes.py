"""Symbolic sizes and exported programs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def has_unbacked_symbols(value: object) -> bool:
    """Return whether a value or its size is a data-dependent symbol."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if not isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    return bool(free_unbacked_symbols(value))


def symbol_names(size: int | torch.SymInt) -> str | int:
    """Return a dim as an int, or as the text of its expression, such as "s0*s1"."""
    if isinstance(size, torch.SymInt):
        expression = size.node.expr
        return int(expression) if expression.is_number else str(expression)
    return int(size)


def size_hint(size: int | torch.SymInt) -> int:
    """Return the size of a dim at tracing."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint)
    return int(size)


def symbolic_input(mode: Any, example: torch.Tensor, dynamic: list[bool]) -> torch.Tensor:
    """Return a fake tensor like ``example``, with the chosen dims symbolic.

    Uses FakeTensorMode's ``from_tensor`` and the contexts of
    ``torch.fx.experimental.symbolic_shapes``; equal sizes share one symbol.
    """
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    kinds = [DimDynamic.DUCK if d else DimDynamic.STATIC for d in dynamic]
    context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
    fake: torch.Tensor = mode.from_tensor(example, symbolic_context=context)
    return fake


@contextmanager
def disable_guards(mode: Any) -> Iterator[None]:
    """Prevent fake runs in this context from specializing symbols to their traced sizes.

    Uses ``ShapeEnv.suppress_guards``; does nothing without it or without symbolic shapes.
    """
    env = getattr(mode, "shape_env", None)
    suppress = getattr(env, "suppress_guards", None)
    context: AbstractContextManager[Any] = nullcontext() if suppress is None else suppress()
    with context:
        yield


def symbol_facts(mode: Any) -> tuple[Hashable, ...]:
    """Return all facts that fake runs know about symbols; equal facts give equal results.

    These are example sizes and ranges of symbols, guards and divisibility. Uses ``ShapeEnv``'s
    ``var_to_val`` (``backed_var_to_val`` in newer releases), ``var_to_range``, ``guards``,
    ``axioms``, ``replacements`` and ``divisible``.
    """
    env = getattr(mode, "shape_env", None)
    if env is None:
        return ()
    sizes = getattr(env, "backed_var_to_val", None)
    return (
        frozenset((env.var_to_val if sizes is None else sizes).items()),
        frozenset(env.var_to_range.items()),
        frozenset(guard.expr for guard in env.guards),
        frozenset(env.axioms.items()),
        frozenset(env.replacements.items()),
        frozenset(env.divisible),
    )


def floor_division(expression: Any, divisor: int) -> Any:
    """Return ``expression // divisor`` as torch writes it in symbolic sizes.

    Uses ``torch.utils._sympy.functions.FloorDiv``.
    """
    from torch.utils._sympy.functions import FloorDiv

    return FloorDiv(expression, divisor)


def unflatten_output(exported: torch.export.ExportedProgram, leaves: list[Any]) -> Any:
    """Return ``leaves`` in the structure that the exported module's forward returned."""
    from torch.utils._pytree import tree_unflatten

    return tree_unflatten(leaves, exported.call_spec.out_spec)


def share_number_of_rows(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give a fake mask the number of True values that another one has, if that has one.

    Uses ``FakeTensor.nonzero_memo``, which has no public name; without it masks keep numbers of
    their own.
    """
    number = getattr(source, "nonzero_memo", None)
    if number is not None and target is not source and hasattr(target, "nonzero_memo"):
        target.nonzero_memo = number


@contextmanager
def answer_data_dependent(
    answer: Callable[[Any, Any, int | None, int | None], bool | None],
) -> Iterator[None]:
    """Answer conditions on one number that depends on data, which no tracer can decide.

    answer: from (the condition, its symbol, the least and the largest value of the symbol, None for
    no limit) to a truth value, or None to raise torch's error. Uses ``ShapeEnv.evaluate_expr``.
    """
    import sympy
    from sympy.core.relational import Relational
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    original = ShapeEnv.evaluate_expr

    def evaluate_expr(self: Any, expr: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            if len(expr.free_symbols) != 1 or not isinstance(expr, Relational):
                raise
            (symbol,) = expr.free_symbols
            limits = self.var_to_range[symbol]
            least, most = (int(n) if n.is_Integer else None for n in (limits.lower, limits.upper))
            found = answer(expr, symbol, least, most)
            if found is None:
                raise
            return sympy.true if found else sympy.false

    ShapeEnv.evaluate_expr = evaluate_expr  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        ShapeEnv.evaluate_expr = original  # type: ignore[method-assign]


def defining_nodes(graph: torch.fx.Graph) -> dict[str, torch.fx.Node]:
    """Return, by name of a data-dependent symbol, the node whose result defines it."""
    return {
        str(symbol): node
        for node in graph.nodes
        for symbol in node.meta.get("unbacked_bindings") or ()
    }
