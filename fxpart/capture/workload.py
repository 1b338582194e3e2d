"""Targets of the command line: a function of the user that returns a model to work on."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fxpart.errors import FxpartError, error

if TYPE_CHECKING:
    from torch import nn

_FORM = "name it as file.py:function or package.module:function"


@dataclass(frozen=True)
class Workload:
    """A model with its training setup; everything except the model is optional.

    example: one batch, a tuple of positional inputs or a dict of inputs by name, with the loss
    targets last or under their parameter names. loss: a function of the output and the targets.
    data: batches like the example, or a function that returns them. batch_size: samples per global
    batch. optimizer: a name, class, instance or factory. example_kwargs: keyword inputs in addition
    to a tuple. All as :func:`fxpart.compile` takes them.
    """

    model: nn.Module
    example: tuple[Any, ...] | dict[str, Any] | None = None
    loss: Callable[..., Any] | None = None
    data: Iterable[Any] | Callable[[], Iterable[Any]] | None = field(default=None, repr=False)
    batch_size: int | None = None
    optimizer: Any = None
    example_kwargs: dict[str, Any] | None = None

    def batches(self) -> Iterable[Any] | None:
        """Return the data from its start; None without data."""
        return self.data() if callable(self.data) else self.data


def load_target(text: str, seed: int = 0) -> Workload:
    """Return the workload of ``file.py:function`` or ``package.module:function``.

    The function takes no arguments and returns a model, (model, example inputs as a tuple or as a
    dict of keyword arguments), or a :class:`Workload`; the name may also refer to a model or
    workload. seed: for torch's generator, so that every rank and run draws the same weights. Raise
    FXP107 with the location; the user's own exception is its cause.
    """
    import torch

    place, separator, name = text.rpartition(":")
    if not separator or not place or not name:
        raise error("FXP107", where=text, why="it does not name a function", fix=_FORM)
    torch.manual_seed(seed)
    module = _file(place, text) if place.endswith(".py") else _module(place, text)
    found = _attribute(module, name, text)
    return as_workload(_result(found, name, module, text), text)


def as_workload(result: object, where: str) -> Workload:
    """Return a :class:`Workload` for the result of a target; raise FXP107 for other objects."""
    from torch import nn

    if isinstance(result, Workload):
        if not isinstance(result.model, nn.Module):
            raise _wrong(where, f"the model of its Workload is a {_kind(result.model)}")
        return result
    if isinstance(result, nn.Module):
        return Workload(result)
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module):
        model, example = result
        if isinstance(example, (tuple, list, dict)):
            return Workload(model, example if isinstance(example, dict) else tuple(example))
        raise _wrong(where, f"its second result is a {_kind(example)}, not example inputs")
    raise _wrong(where, f"it returns a {_kind(result)}")


def _file(place: str, text: str) -> ModuleType:
    """Run the file as a module under a name that no installed package has."""
    path = Path(place).resolve()
    if not path.is_file():
        raise error("FXP107", where=text, why=f"there is no file {place}", fix=_FORM)
    name = f"fxpart_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    # Like `python file.py`, allow imports from the file's folder.
    _search_first(str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as fault:
        del sys.modules[name]
        raise make_user_error(fault, str(path), text, "while the file was run") from fault
    return module


def _module(place: str, text: str) -> ModuleType:
    _search_first(str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as fault:
        if fault.name is not None and (place == fault.name or place.startswith(fault.name + ".")):
            why = f"there is no module {fault.name}"
            raise error("FXP107", where=text, why=why, fix=_FORM) from fault
        raise make_user_error(fault, None, text, "while the module was imported") from fault
    except (Exception, SystemExit) as fault:
        raise make_user_error(fault, None, text, "while the module was imported") from fault


def _search_first(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _attribute(module: ModuleType, name: str, text: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    own = [n for n, v in vars(module).items() if inspect.isfunction(v) and n[0] != "_"]
    own = [n for n in own if getattr(module, n).__module__ == module.__name__]
    fix = f"use one of its functions: {', '.join(own[:8])}" if own else _FORM
    raise error("FXP107", where=text, why=f"the module has no {name}", fix=fix)


def _result(found: Any, name: str, module: ModuleType, text: str) -> object:
    """Call the function; return a model or workload unchanged."""
    from torch import nn

    if isinstance(found, (nn.Module, Workload)):
        return found
    if not callable(found):
        raise _wrong(text, f"{name} is a {_kind(found)}, not a function")
    try:
        inspect.signature(found).bind()
    except TypeError as fault:
        fix = "write a function without arguments that returns the model"
        raise error("FXP107", where=text, why=f"{name}: {fault}", fix=fix) from fault
    except ValueError:
        pass  # a builtin without a signature
    try:
        return found()
    except FxpartError:
        raise
    except (Exception, SystemExit) as fault:
        doing = f"in {name}()"
        raise make_user_error(fault, getattr(module, "__file__", None), text, doing) from fault


def make_user_error(fault: BaseException, path: str | None, text: str, doing: str) -> FxpartError:
    """Return the user's exception as FXP107, with the last line of the user's code.

    path: the user's file, if known. text: the target. doing: the current activity, for the message.
    """
    frames = traceback.extract_tb(fault.__traceback__)
    own = [f for f in frames if f.filename == path] or [f for f in frames if not _ours(f.filename)]
    if isinstance(fault, SyntaxError) and fault.filename:
        where = f"{fault.filename}:{fault.lineno}"
    else:
        where = f"{own[-1].filename}:{own[-1].lineno}" if own else text
    line = f"\n{own[-1].line}" if own and own[-1].line else ""
    why = f"{type(fault).__name__}: {fault} ({doing}){line}"
    return error("FXP107", where=where, why=why, fix="fix this line of the target's code")


def _ours(filename: str) -> bool:
    return filename == __file__ or "importlib" in filename


def _wrong(where: str, why: str) -> FxpartError:
    fix = "return the model, (model, example inputs as a tuple or dict), or a fxpart.Workload"
    return error("FXP107", where=where, why=why, fix=fix)


def _kind(value: object) -> str:
    return type(value).__name__
