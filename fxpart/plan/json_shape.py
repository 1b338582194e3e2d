"""Find all missing fields, unknown fields and wrong types in a decoded JSON value."""

from __future__ import annotations

from functools import cache
from types import GenericAlias
from typing import Any, Literal

import msgspec
from msgspec import inspect

from fxpart.errors import Problem

MAX_PROBLEMS = 200
_FIX = "plan again with `fxpart plan`, or correct this field"


def shape_problems(value: Any, kind: Any, where: str) -> list[Problem]:
    """Return where ``value`` is not of the msgspec type ``kind``; at most MAX_PROBLEMS."""
    found: list[Problem] = []
    _walk(value, _info(kind), "", where, found)
    return found[:MAX_PROBLEMS]


@cache
def _info(kind: Any) -> inspect.Type:
    """Return msgspec's description of a type, cached."""
    return inspect.type_info(kind)


def _walk(value: Any, info: inspect.Type, path: str, where: str, found: list[Problem]) -> None:
    if len(found) >= MAX_PROBLEMS:
        return
    if isinstance(info, inspect.StructType) and isinstance(value, dict):
        _fields(value, info, path, where, found)
    elif isinstance(info, inspect.VarTupleType) and isinstance(value, list):
        for index, item in enumerate(value):
            _walk(item, info.item_type, f"{path}[{index}]", where, found)
    elif isinstance(info, inspect.DictType) and isinstance(value, dict):
        for key, item in value.items():
            _walk(item, info.value_type, f"{path}[{ascii(key)[:80]}]", where, found)
    else:
        _leaf(value, info, path, where, found)


def _fields(
    value: dict[str, Any], info: inspect.StructType, path: str, where: str, found: list[Problem]
) -> None:
    known = {field.encode_name: field for field in info.fields}
    for name, field in known.items():
        if name in value:
            _walk(value[name], field.type, f"{path}.{name}", where, found)
        elif field.required:
            found.append(_problem(where, f"{path}.{name}", "the field is missing"))
    for name in value:
        if name not in known:
            text = ascii(name)[1:-1][:80]
            found.append(_problem(where, f"{path}.{text}", "there is no such field"))


def _leaf(value: Any, info: inspect.Type, path: str, where: str, found: list[Problem]) -> None:
    try:
        msgspec.convert(value, _python_type(info))
    except (msgspec.ValidationError, OverflowError, RecursionError) as why:
        found.append(_problem(where, path, str(why).split(" - at")[0]))


def _python_type(info: inspect.Type) -> Any:
    """Return the type that ``info`` describes: leaves of a plan, or containers of a wrong value."""
    match info:
        case inspect.StructType():
            return info.cls
        case inspect.LiteralType():
            return Literal[tuple(info.values)]
        case inspect.UnionType():
            types = [_python_type(t) for t in info.types]
            union = types[0]
            for other in types[1:]:
                union = union | other
            return union
        case inspect.VarTupleType():
            return GenericAlias(tuple, (_python_type(info.item_type), ...))
        case inspect.TupleType():
            return GenericAlias(tuple, tuple(_python_type(t) for t in info.item_types))
        case inspect.DictType():
            return GenericAlias(dict, (str, _python_type(info.value_type)))
        case inspect.NoneType():
            return None
    return _SCALARS[type(info)]


_SCALARS: dict[type, Any] = {
    inspect.IntType: int,
    inspect.FloatType: float,
    inspect.StrType: str,
    inspect.BoolType: bool,
    inspect.AnyType: Any,
}


def _problem(where: str, path: str, why: str) -> Problem:
    return Problem("FXP303", f"{where}: {path.lstrip('.') or 'the whole file'}", why, _FIX)
