"""The compiler passes, one per file, and their table PASSES.

A new pass is one file and one line in the table. Other packages add passes through the entry point
group "fxpart.passes": the entry's name is the pass's name, its object is the class.
"""

from __future__ import annotations

if __name__ != "fxpart.passes":
    raise ImportError(
        f"this package is fxpart.passes but was imported as {__name__!r}; "
        "import fxpart.passes, and remove the root of the fxpart repository from sys.path"
    )

from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fxpart.errors import error

from .annotate import AnnotatePass
from .assign import AssignPass
from .drop_asserts import DropAssertsPass
from .fold_attention_mask import FoldAttentionMaskPass
from .group_blocks import GroupBlocksPass
from .group_experts import GroupExpertsPass
from .inline_regions import InlineRegionsPass
from .key_random import KeyRandomPass
from .lower import LowerPass
from .mark_gradients import MarkGradientsPass
from .place import PlacePass
from .propagate import PropagatePass
from .quantize_linears import QuantizeLinearsPass
from .remove_inplace import RemoveInplacePass
from .simplify import SimplifyPass

PASSES: dict[str, type[Any]] = {
    "annotate": AnnotatePass,
    "assign": AssignPass,
    "drop_asserts": DropAssertsPass,
    "fold_attention_mask": FoldAttentionMaskPass,
    "group_blocks": GroupBlocksPass,
    "group_experts": GroupExpertsPass,
    "inline_regions": InlineRegionsPass,
    "key_random": KeyRandomPass,
    "lower": LowerPass,
    "mark_gradients": MarkGradientsPass,
    "place": PlacePass,
    "propagate": PropagatePass,
    "quantize_linears": QuantizeLinearsPass,
    "remove_inplace": RemoveInplacePass,
    "simplify": SimplifyPass,
}

PREPARE = (
    "drop_asserts,inline_regions,remove_inplace,simplify,fold_attention_mask,group_experts,"
    "quantize_linears,key_random,mark_gradients,group_blocks"
)


@lru_cache(maxsize=1)
def _find_entry_points(search: Callable[..., Iterable[EntryPoint]]) -> tuple[EntryPoint, ...]:
    """Search the installed packages once, which reads the metadata of all of them."""
    return tuple(search(group="fxpart.passes"))


def all_passes() -> dict[str, type[Any]]:
    """Return PASSES and the passes of installed packages; raise FXP109 for a name conflict."""
    table = dict(PASSES)
    for entry in _find_entry_points(entry_points):
        if entry.name in PASSES:
            raise error(
                "FXP109",
                where=f"entry point {entry.name} = {entry.value}",
                why="fxpart already has a pass of this name",
                fix="rename the pass",
            )
        table[entry.name] = entry.load()
    return table


__all__ = ["PASSES", "PREPARE", "all_passes"]
