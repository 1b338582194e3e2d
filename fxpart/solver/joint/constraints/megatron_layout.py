"""Megatron-LM's notation of a pipeline layout: ``Et*3|(tt|)*29,m|L``.

``E`` is the embedding, ``t`` a transformer layer, ``m`` a layer that predicts further tokens, ``L``
the loss with its head; ``|`` ends a stage, ``*n`` repeats what stands before it (a letter or a
group in brackets), commas and spaces are for the eye. Source: Megatron-LM's documentation of
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
    """The letters of each stage: ``E(t|)*2L`` is ("Et", "t", "L"). Raises FXP109."""
    found = re.sub(r"[\s,]", "", text)
    while "(" in found:
        inner = _GROUP.search(found)
        if inner is None:
            raise _wrong(text, "a bracket is not closed")
        times = _times(inner.group(2), inner.group(1), text)
        found = (
            found[: inner.start()] + _letters(inner.group(1), text) * times + found[inner.end() :]
        )
        if len(found) > _LONGEST:
            raise _wrong(text, "it is too long")
    found = _letters(found, text)
    if strange := sorted(set(found) - set("EtmL|")):
        raise _wrong(text, f"{strange[0]!r} is none of E, t, m, L, |, *, ( and )")
    stages = tuple(found.split("|"))
    if not all(stages):
        raise _wrong(text, f"stage {stages.index('')} is empty")
    order = found.replace("|", "")
    if not re.fullmatch(r"E?t+m*L?", order):
        raise _wrong(text, "E comes first, then t, then m, and L last")
    return stages


def _letters(text: str, whole: str) -> str:
    return _LETTER.sub(lambda m: m.group(1) * _times(m.group(2), m.group(1), whole), text)


def _times(number: str | None, what: str, text: str) -> int:
    times = int(number or 1) if len(number or "") < 7 else _LONGEST + 1
    if times * max(len(what), 1) > _LONGEST:
        raise _wrong(text, "it is too long")
    return times


def compute_layout_starts(text: str, blocks: Sequence[str]) -> tuple[int, ...]:
    """The first block of each stage that the layout asks for. Raises FXP109.

    A layer is a member of the model's longest stack of numbered modules; what stands before the
    first belongs to E, what stands after the last to L (or to the outermost layer without them).
    """
    stages, layers = expand_layout(text), find_layer_blocks(blocks)
    wanted = sum(stage.count("t") + stage.count("m") for stage in stages)
    if not layers:
        raise _wrong(text, "the model has no stack of numbered layers")
    if wanted != len(layers):
        raise _wrong(text, f"it has {wanted} layers (t and m), the model has {len(layers)}")
    first = [layers[0][0], *(layer[0] for layer in layers[1:]), layers[-1][1] + 1]
    starts: list[int] = []
    done = 0
    for number, stage in enumerate(stages):
        own = stage.count("t") + stage.count("m")
        begins = 0 if not number else first[done]
        if begins >= len(blocks) or (starts and begins <= starts[-1]):
            raise _wrong(text, f"stage {number} ({stage}) would have no block of this model")
        starts.append(begins)
        done += own
    return tuple(starts)


def _wrong(text: str, why: str) -> FxpartError:
    return error(
        "FXP109",
        where=f"layout {text[:80]!r}",
        why=why,
        fix="write stages like 'Ett|tt|ttL': E embedding, t layer, L loss, | between stages",
    )
