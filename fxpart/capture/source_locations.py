"""Origin of a node: module path and the user's source line."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import torch
from torch import fx

from fxpart.compiler import KEY, NodeAnnotation

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_TORCH = Path(torch.__file__).parent.as_posix() + "/"
_OURS = Path(__file__).parents[1].as_posix() + "/"


@lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Return whether a file belongs to the user or a model library, not to torch or fxpart."""
    path = Path(file).as_posix()
    # torch writes some of its own files in short form; "<...>" is code without a file.
    return not path.startswith((_TORCH, _OURS, "torch/", "<"))


def shorten_path(file: str) -> str:
    """Return a path relative to its package or the working folder, without machine paths."""
    path = Path(file)
    parts = path.parts
    for marker in ("site-packages", "dist-packages"):
        if marker in parts:
            return "/".join(parts[parts.index(marker) + 1 :])
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except (ValueError, OSError):  # elsewhere; or the working folder was deleted
        return path.name


def source_line(stack_trace: str | None) -> str:
    """Return the innermost line of the user's code in a stack trace as "file.py:12", "" if none."""
    for match in reversed(list(_FRAME.finditer(stack_trace or ""))):
        if is_users(match["file"]):
            return f"{shorten_path(match['file'])}:{match['line']}"
    return ""


def module_path(node: fx.Node, loss_prefix: str) -> str:
    """Return the innermost module of the user's model that the node came from, "" for the root."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    # A module called twice gets "name@1" the second time.
    first, _, rest = path.partition(".")
    if first.partition("@")[0] == "model":
        path = rest
    elif first.partition("@")[0] == "loss":
        path = f"{loss_prefix}.{rest}" if rest else loss_prefix
    else:
        return ""
    return ".".join(part.partition("@")[0] for part in path.split("."))


def annotate(module: fx.GraphModule, loss_prefix: str) -> None:
    """Add a :class:`NodeAnnotation` to every node of the graph and of nested graphs."""
    for inner in module.modules():
        if not isinstance(inner, fx.GraphModule):
            continue
        for node in inner.graph.nodes:
            node.meta[KEY] = NodeAnnotation(
                module=module_path(node, loss_prefix),
                source=source_line(node.meta.get("stack_trace")),
            )
