"""Megatron-LM's pipeline layout notation: ``Et*3|(tt|)*29,m|L``.

``E`` is the embedding, ``t`` a transformer layer, ``m`` a multi-token prediction layer, ``L`` the
loss with its head. ``|`` ends a stage, ``*n`` repeats the preceding letter or group in parentheses;
commas and spaces are ignored. Source: Megatron-LM's documentation of
``--pipeline-model-parallel-layout``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fxpart.errors import FxpartError, error
from fxpart.solver.joint.constraints.block_names import find_layer_blocks

_GROUP = re.compile(r"\(([^()]*)\)(?:\*(\d+))?")
_LETTER = re.compile(r"([EtmL|])\*(\d+)")
_LONGEST = 100_000  # letters


def expand_layout(text: str) -> tuple[str, ...]:
    """Return the letters of each stage: ``E(t|)*2L`` is ("Et", "t", "L"). Raise FXP109."""
    found = re.sub(r"[\s,]", "", text)
    while "(" in found:
        inner = _GROUP.search(found)
        if inner is None:
            raise _wrong(text, "A parenthesis is not closed.")
        times = _times(inner.group(2), inner.group(1), text)
        found = (
            found[: inner.start()] + _letters(inner.group(1), text) * times + found[inner.end() :]
        )
        if len(found) > _LONGEST:
            raise _wrong(text, "The layout is too long.")
    found = _letters(found, text)
    if strange := sorted(set(found) - set("EtmL|")):
        raise _wrong(text, f"{strange[0]!r} is not one of E, t, m, L, |, *, ( and ).")
    stages = tuple(found.split("|"))
    if not all(stages):
        raise _wrong(text, f"Stage {stages.index('')} is empty.")
    order = found.replace("|", "")
    if not re.fullmatch(r"E?t+m*L?", order):
        raise _wrong(text, "The order must be E, then t, then m, then L.")
    return stages


def format_layout(layers: Sequence[int]) -> str:
    """Return the layout of stages with these numbers of layers: (2, 3) is ``Ett|tttL``."""
    stages = ["t" * count for count in layers]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}L"
    return "|".join(stages)


def _letters(text: str, whole: str) -> str:
    return _LETTER.sub(lambda m: m.group(1) * _times(m.group(2), m.group(1), whole), text)


def _times(number: str | None, what: str, text: str) -> int:
    times = int(number or 1) if len(number or "") < 7 else _LONGEST + 1
    if times * max(len(what), 1) > _LONGEST:
        raise _wrong(text, "The layout is too long.")
    return times


def compute_layout_starts(text: str, blocks: Sequence[str]) -> tuple[int, ...]:
    """Return the first block of each stage in the layout. Raise FXP109.

    A layer is a member of the model's longest stack of numbered modules. Blocks before the first
    layer belong to E, blocks after the last to L (or to the outermost layer without E or L).
    """
    stages, layers = expand_layout(text), find_layer_blocks(blocks)
    wanted = sum(stage.count("t") + stage.count("m") for stage in stages)
    if not layers:
        raise _wrong(text, "The model has no stack of numbered layers.")
    if wanted != len(layers):
        raise _wrong(
            text, f"The layout has {wanted} layers (t and m); the model has {len(layers)}."
        )
    first = [layers[0][0], *(layer[0] for layer in layers[1:]), layers[-1][1] + 1]
    starts: list[int] = []
    done = 0
    for number, stage in enumerate(stages):
        own = stage.count("t") + stage.count("m")
        begins = 0 if not number else first[done]
        if begins >= len(blocks) or (starts and begins <= starts[-1]):
            raise _wrong(text, f"Stage {number} ({stage}) would contain no block of this model.")
        starts.append(begins)
        done += own
    return tuple(starts)


def _wrong(text: str, why: str) -> FxpartError:
    return error(
        "FXP109",
        where=f"layout {text[:80]!r}",
        why=why,
        fix="Example: 'Ett|tt|ttL', with E embedding, t layer, L loss, | between stages.",
    )
