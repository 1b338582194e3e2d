"""Infer the batch dim of each input by running the model at two batch sizes.

A hypothesis assigns each input its batch dim or None. It holds if the model runs, on fake tensors,
with twice the rows, and its outputs grow with them. The conventional hypothesis (dim 0 of every
input of the batch's size) is tried first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

import torch

from fxpart.capture.batch_independence import batch_first_is_off, is_batch_independent
from fxpart.capture.failure_causes import find_source_line, summarize_exception
from fxpart.capture.shape_probe import ShapeProbe
from fxpart.errors import FxpartError, Problem, error

Dims = tuple[int | None, ...]
MAX_TRIALS = 64


@dataclass(frozen=True)
class BatchDimInference:
    """The batch dim per input, the dim per output that grows with the batch, and a note.

    outputs: by name, empty if nothing was run. note: text for ``tried`` if the dims were guessed.
    ran: whether the model runs on the example.
    """

    dims: Dims
    outputs: dict[str, int | None]
    note: str = ""
    ran: bool = True


def resize(tensor: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """Cut or repeat the tensor along ``dim`` to ``size`` rows; return it unchanged for None."""
    if dim is None or tensor.shape[dim] == size:
        return tensor
    have = tensor.shape[dim]
    repeats = [1] * tensor.dim()
    repeats[dim] = -(-size // have)
    return tensor.detach().repeat(repeats).narrow(dim, 0, size).contiguous()


def settled(
    given: Mapping[str, int | None], names: Sequence[str], tensors: Sequence[torch.Tensor]
) -> dict[str, int | None]:
    """Return the user's ``batch_dims`` with nonnegative dims; raise FXP109 with every problem."""
    problems = []
    result: dict[str, int | None] = {}
    shapes = dict(zip(names, (t.shape for t in tensors), strict=True))
    for name, dim in given.items():
        if name not in shapes:
            why = f"there is no input of this name. Known inputs: {', '.join(names)}"
        elif dim is not None and type(dim) is not int:
            why = f"{dim!r} is not the number of a dim"
        elif dim is not None and not -len(shapes[name]) <= dim < len(shapes[name]):
            why = f"dim {dim} is out of range for the shape {list(shapes[name])}"
        else:
            result[name] = dim if dim is None or dim >= 0 else dim + len(shapes[name])
            continue
        fix = "name an input and one of its dims, or None"
        problems.append(Problem("FXP109", f"batch_dims[{name!r}]", why, fix))
    sizes = {n: shapes[n][d] for n, d in result.items() if d is not None}
    if len(set(sizes.values())) > 1:
        why = "the sizes differ: " + ", ".join(f"{n} has {s}" for n, s in sizes.items())
        fix = "pass inputs with the same batch size"
        problems.append(Problem("FXP104", "batch_dims", why, fix))
    if problems:
        raise FxpartError(problems)
    return result


def infer(
    trial: ShapeProbe,
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    known: Mapping[str, int | None],
) -> BatchDimInference:
    """Infer the batch dims; raise FXP104 if no hypothesis holds, FXP101 if the model fails."""
    failure = trial.choose(tensors)
    if isinstance(failure, FxpartError):
        raise failure
    if failure is not None and trial.real:
        raise error(
            "FXP101",
            where=str(find_source_line(failure)),
            why=f"the model itself fails on the example inputs ({summarize_exception(failure)})",
            fix="call the model on these inputs without fxpart to debug it",
        ) from failure
    guesses = list(islice(hypotheses(names, tensors, known), MAX_TRIALS))
    if not guesses:
        raise _unclear(names, tensors, "no input has a dim", None)
    if failure is not None:
        if len(known) < len(names):
            cause = summarize_exception(failure)
            note = f"batch dims by convention; the model does not run on fake tensors: {cause}"
            return BatchDimInference(guesses[0], {}, note, ran=False)
        return BatchDimInference(guesses[0], {}, ran=False)
    return _first_that_holds(trial, names, tensors, known, guesses)


def hypotheses(
    names: Sequence[str], tensors: Sequence[torch.Tensor], known: Mapping[str, int | None]
) -> Iterator[Dims]:
    """Yield possible batch dims, conventional ones first; all agree with the ``known`` ones."""
    if len(known) == len(names) and all(known[n] is None for n in names):
        yield tuple(None for _ in names)
        return
    ranked: dict[Dims, tuple[int, int, int]] = {}
    for order, size in enumerate(_sizes(names, tensors, known)):
        options = [_options(known, n, t, size) for n, t in zip(names, tensors, strict=True)]
        for dims in islice(product(*options), 4 * MAX_TRIALS):
            if any(d is not None for d in dims):
                free = [d for n, d in zip(names, dims, strict=True) if n not in known]
                rank = (sum(bool(d) for d in free), free.count(None), order)
                ranked[dims] = min(rank, ranked.get(dims, rank))
    yield from sorted(ranked, key=ranked.__getitem__)


def _sizes(
    names: Sequence[str], tensors: Sequence[torch.Tensor], known: Mapping[str, int | None]
) -> list[int]:
    """Return candidate batch sizes: the known one, or first and second dims of the inputs."""
    pairs = list(zip(names, tensors, strict=True))
    fixed = [t.shape[d] for n, t in pairs if (d := known.get(n)) is not None]
    if fixed:
        return fixed[:1]
    free = [t for n, t in pairs if n not in known]
    firsts = [t.shape[0] for t in free if t.dim() > 0]
    seconds = [t.shape[1] for t in free if t.dim() > 1]
    return list(dict.fromkeys((*firsts, *seconds)))


def _options(
    known: Mapping[str, int | None], name: str, tensor: torch.Tensor, size: int
) -> list[int | None]:
    if name in known:
        return [known[name]]
    return [*(d for d, s in enumerate(tensor.shape[:2]) if s == size), None]


def _first_that_holds(
    trial: ShapeProbe,
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    known: Mapping[str, int | None],
    guesses: Sequence[Dims],
) -> BatchDimInference:
    before = trial.run(tensors) if trial.first is None else trial.first
    reasons: list[str] = []
    uncut: BatchDimInference | None = None
    for dims in guesses:
        if all(d is None for d in dims):
            return BatchDimInference(dims, {name: None for name in before if "/" not in name})
        try:
            after = trial.run(_doubled(tensors, dims))
        except Exception as failure:  # the user's module may raise anything
            reasons.append(
                f"{_show(names, dims)}: {summarize_exception(failure)} "
                f"({find_source_line(failure)})"
            )
            continue
        grown = _grown(before, after)
        if grown is None:
            reasons.append(f"{_show(names, dims)}: the outputs do not grow with the batch")
            continue
        found = BatchDimInference(dims, grown)
        verdict = _verdict(trial, names, tensors, known, found)
        if verdict is False:
            reasons.append(f"{_show(names, dims)}: half of the batch gives different results")
            uncut = uncut or found
            continue
        return found
    if uncut is not None and None not in uncut.dims and not batch_first_is_off(trial.whole):
        return replace(uncut, note="rows of the batch influence each other")
    if len(known) == len(names):
        # Trust the user's batch dims; the sizes are then fixed in the model's code.
        return BatchDimInference(guesses[0], {})
    why = "no choice of batch dims holds at twice the size and for both halves of the batch"
    raise _unclear(names, tensors, why, reasons[:3])


def _verdict(
    trial: ShapeProbe,
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    known: Mapping[str, int | None],
    found: BatchDimInference,
) -> bool | None:
    """Return whether the batch can be split this way if shapes alone are unclear; None if clear.

    This is tested if an input would not be split (offsets into another input look like that), and
    if batch_first is off, so that dim 0 may be the sequence; an unknown result is then an error.
    """
    off = batch_first_is_off(trial.whole)
    if len(known) == len(names) or not (off or None in found.dims):
        return None
    verdict = is_batch_independent(trial, tensors, found.dims, found.outputs)
    if verdict is None and off:
        why = (
            f"{_show(names, found.dims)} runs, but a layer has batch_first=False, and it is unclear"
        )
        raise _unclear(names, tensors, f"{why} whether its dim 0 is the sequence", None)
    return verdict


def _doubled(tensors: Sequence[torch.Tensor], dims: Dims) -> list[torch.Tensor]:
    return [
        t if d is None else resize(t, d, 2 * t.shape[d]) for t, d in zip(tensors, dims, strict=True)
    ]


def _grown(
    before: Mapping[str, tuple[int, ...]], after: Mapping[str, tuple[int, ...]]
) -> dict[str, int | None] | None:
    """Return the dim that grew, per output; None if outputs have dims but none grew."""
    grown: dict[str, int | None] = {}
    for name, shape in before.items():
        if "/" in name:
            continue
        other = after.get(name, shape)
        changed = [d for d, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b]
        grown[name] = changed[0] if changed else None
    sized = [name for name in grown if before[name]]
    return None if sized and all(grown[name] is None for name in sized) else grown


def _show(names: Sequence[str], dims: Dims) -> str:
    return ", ".join(f"{n}: {d}" for n, d in zip(names, dims, strict=True))


def _unclear(
    names: Sequence[str], tensors: Sequence[torch.Tensor], why: str, reasons: list[str] | None
) -> FxpartError:
    shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in zip(names, tensors, strict=True))
    example = {n: 0 if t.dim() else None for n, t in zip(names, tensors, strict=True)}
    return error(
        "FXP104",
        where=shapes or "no inputs",
        why="\n".join([why, *(reasons or [])]),
        fix=f"pass batch_dims={example} with the batch dim of each input, None for no batch",
    )
