"""The passes, one file each; PASSES has one line for each.

A new pass is a file here and a line in the table. Passes of other packages join through the entry
point group "fxpart.passes": the entry's name is the pass's name, its object the class.
"""

from __future__ import annotations

if __name__ != "fxpart.passes":
    raise ImportError(
        f"this package is fxpart.passes and was imported as {__name__!r}: "
        "import fxpart.passes, and keep fxpart's own repository root off sys.path"
    )

from importlib.metadata import entry_points
from typing import Any

from fxpart.errors import error

from .annotate import Annotate
from .assign import Assign
from .drop_asserts import DropAsserts
from .group_blocks import GroupBlocks
from .group_experts import GroupExperts
from .inline_regions import InlineRegions
from .key_random import KeyRandom
from .lower import Lower
from .mark_gradients import MarkGradients
from .place import Place
from .propagate import Propagate
from .remove_inplace import RemoveInplace
from .simplify import Simplify

PASSES: dict[str, type[Any]] = {
    "annotate": Annotate,
    "assign": Assign,
    "drop_asserts": DropAsserts,
    "group_blocks": GroupBlocks,
    "group_experts": GroupExperts,
    "inline_regions": InlineRegions,
    "key_random": KeyRandom,
    "lower": Lower,
    "mark_gradients": MarkGradients,
    "place": Place,
    "propagate": Propagate,
    "remove_inplace": RemoveInplace,
    "simplify": Simplify,
}

PREPARE = (
    "drop_asserts,inline_regions,remove_inplace,simplify,group_experts,key_random,mark_gradients,"
    "group_blocks"
)


def all_passes() -> dict[str, type[Any]]:
    """PASSES and those of installed packages; FXP109 if one of theirs takes a name of ours."""
    table = dict(PASSES)
    for entry in entry_points(group="fxpart.passes"):
        if entry.name in PASSES:
            raise error(
                "FXP109",
                where=f"entry point {entry.name} = {entry.value}",
                why="a pass of this name is part of fxpart",
                fix="give the pass another name",
            )
        table[entry.name] = entry.load()
    return table


__all__ = ["PASSES", "PREPARE", "all_passes"]
