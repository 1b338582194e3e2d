"""Key of a stage's code and shapes, independent of names, to find equal stages."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping

from fxpart.errors import FxpartError
from fxpart.program.spec import Dim, ProgramSpec, ValueSpec, dim_value

FIRST = " first"  # key suffix for the first microbatch, which writes gradients instead of adding


def stage_key(
    source: str, spec: ProgramSpec, stage: int, sizes: Mapping[str, int], optimizer: str
) -> str:
    """Return a digest of what determines a stage's time: operations, shapes and the optimizer.

    Stages whose code differs only in names (repeated layers) have one key. source: the stage's
    module. sizes: of the program's symbols for one microbatch. optimizer: its name.
    """
    found = spec.stages[stage]
    inputs = [
        (*_value(value, sizes), from_stage >= 0, _passed_on(spec, stage, value.name))
        for value, from_stage in zip(found.inputs, found.sources, strict=True)
    ]
    outputs = [
        (*_value(value, sizes), bool(targets), value.name == spec.loss)
        for value, targets in zip(found.outputs, found.targets, strict=True)
    ]
    state = [(s.dtype, s.shape, s.kind, s.requires_grad) for s in found.state]
    shared = None if spec.sharding is None else (spec.sharding.mesh, spec.sharding.zero)
    text = repr((canonical(source), inputs, outputs, state, shared, optimizer))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def symbol_sizes(
    symbols: Mapping[str, tuple[str, int]],
    batch_dims: Mapping[str, int | None],
    hints: Mapping[str, int],
    rows: int,
) -> dict[str, int]:
    """Return the values of symbols for a microbatch of ``rows`` rows.

    symbols: per symbol, the input and dim that it is read from. batch_dims: by input. hints: the
    sizes at capture, which all symbols except the batch keep.
    """
    return {
        name: rows if batch_dims.get(place) == dim else hints.get(name, rows)
        for name, (place, dim) in symbols.items()
    }


def _value(value: ValueSpec, sizes: Mapping[str, int]) -> tuple[object, ...]:
    return value.dtype, tuple(_number(dim, sizes) for dim in value.shape), value.requires_grad


def _number(dim: Dim, sizes: Mapping[str, int]) -> int | str:
    """Return a dim as a number, or "?" if it is only known at run time."""
    try:
        return dim_value(dim, sizes)
    except FxpartError:
        return "?"


def _passed_on(spec: ProgramSpec, stage: int, name: str) -> bool:
    """Return whether a later stage also uses the value, so its gradient may arrive here."""
    later = spec.stages[stage + 1 :]
    return any(value.name == name for other in later for value in other.inputs)


def canonical(source: str) -> str:
    """Return a module's forward without local names, comments and random-op indices."""
    every = ast.walk(ast.parse(source))
    forward = next(n for n in every if isinstance(n, ast.FunctionDef) and n.name == "forward")
    return ast.dump(_NameCanonicalizer(forward).visit(forward))


class _NameCanonicalizer(ast.NodeTransformer):
    """Replace local names and attributes of self by numbers in order of appearance."""

    def __init__(self, function: ast.FunctionDef) -> None:
        made = (n for n in ast.walk(function) if isinstance(n, ast.Name))
        stored = {n.id for n in made if not isinstance(n.ctx, ast.Load)}
        self._local = stored | {argument.arg for argument in function.args.args}
        self._names: dict[str, str] = {}

    def _short(self, name: str) -> str:
        return self._names.setdefault(name, f"v{len(self._names)}")

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self._short(node.arg)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self._local:
            node.id = self._short(node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr != "device":
            return ast.Name(self._short(f"self.{node.attr}"), ast.Load())
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == "seeded":
            node.args[1] = ast.Constant(0)  # index of the random op
        return self.generic_visit(node)
