"""Convert check results to problems that name the parameter, attribute or source line."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fxpart.capture.failure_causes import find_source_line, summarize_exception
from fxpart.errors import Problem
from fxpart.verification.differences import NumericDifference
from fxpart.verification.impure_calls import ImpureCalls
from fxpart.verification.mutable_object import StateChange
from fxpart.verification.reachable_code import ReachableCode

_SHOWN = 8
_INPUT = "pass the value to forward as an input tensor"
_BUFFER = "store it in a tensor registered with register_buffer"
_CAUSES = {"random": "random numbers of Python or NumPy", "clock": "the current time"}


def python_problems(
    first: Sequence[StateChange],
    second: Sequence[StateChange],
    keys: Sequence[str],
    code: ReachableCode,
) -> list[Problem]:
    """Return problems with Python state that changes in every call and that forward reads."""
    again = {change.path: change for change in second}
    found = [
        Problem(
            "FXP113", f"state_dict key {key}", "the first call of forward adds or removes it",
            "register it in __init__, or run one forward before compile()",
        )
        for key in keys
    ]  # fmt: skip
    for change in first:
        if change.path not in again:
            continue
        problem = _python_problem(change, code)
        if problem is not None:
            found.append(problem)
    return found[:_SHOWN]


def _python_problem(change: StateChange, code: ReachableCode) -> Problem | None:
    shown = change.path or "the model"
    if change.kind == "number":
        place = code.reads(change.key)
        if not place:
            return None
        why = f"forward changes and reads {shown} in every call, but the program treats it as a "
        return Problem("FXP113", f"{place} ({shown})", why + "constant", f"{_BUFFER}; or {_INPUT}")
    if change.kind == "size" and change.grown:
        why = f"{shown} grows in every call, but the program does not change it"
        return Problem("FXP113", _place(change, code), why, f"{_BUFFER} of a fixed size")
    if change.kind == "iterator":
        why = f"forward advances the iterator {shown}, but the program treats its value as a "
        return Problem("FXP113", _place(change, code), why + "constant", _INPUT)
    return None


def drawn_problem(kind: str, line: str, change: StateChange | None, code: ReachableCode) -> Problem:
    """Return the problem of values that forward takes from outside, recorded as constants."""
    what = _CAUSES[kind]
    if not line and change is not None:
        names = ("random", "np", "numpy", change.key)
        line = next((place for n in names if (place := code.mentions(n))), "") or change.path
    why = f"forward or loss depends on {what}, but the program has recorded it as a constant"
    fix = "use torch (torch.rand, torch.randint), or pass the numbers as an input tensor"
    return Problem("FXP113", line, why, fix if kind == "random" else _INPUT)


def failed_problem(cause: Exception, what: str) -> Problem:
    """Return the problem of a module or program that fails in one of the two steps."""
    why = f"{what} fails in two training steps on the example ({summarize_exception(cause)})"
    return Problem(
        "FXP113", str(find_source_line(cause)), why,
        'fix that line, or skip the comparison with compile(..., check="off")',
    )  # fmt: skip


def leaked_problem(name: str) -> Problem:
    """Return the problem of a value of one call that the next call reads outside of buffers."""
    return Problem(
        "FXP113", name, "forward reads a value of an earlier call that is not a registered buffer",
        f"{_BUFFER}, and write it in place",
    )  # fmt: skip


def number_problems(
    found: Sequence[NumericDifference],
    changes: Sequence[StateChange],
    seen: ImpureCalls,
    code: ReachableCode,
    model: nn.Module,
) -> list[Problem]:
    """Return problems for numeric differences, with their probable causes."""
    largest: dict[tuple[str, str], NumericDifference] = {}
    for each in found:
        largest.setdefault((each.kind, each.name), each)
    lines = [
        f"{_named(each)} differs by {each.size:.1e} relative in step {each.step}"
        for each in list(largest.values())[:_SHOWN]
    ]
    if len(largest) > _SHOWN:
        lines.append(f"and {len(largest) - _SHOWN} more")
    if seen.gradient:
        return [
            Problem(
                "FXP113", seen.gradient,
                "\n".join(["forward or loss computes a gradient, whose own derivative is not in "
                           "the program", *lines]),
                "compute the derivative with differentiable torch operations, or train this "
                "model without fxpart",
            )
        ]  # fmt: skip
    state = [c for c in changes if c.kind in ("tensor", "number", "object", "size")]
    if state:
        return [
            Problem(
                "FXP113", _place(change, code),
                "\n".join([f"forward changes {change.path or 'the model'}, which is not a "
                           "registered buffer, but the program does not change it", *lines]),
                f"{_BUFFER}, and write it in place; or {_INPUT}",
            )
            for change in state[:_SHOWN]
        ]  # fmt: skip
    first = found[0]
    where = _named(first) if first.name in dict(model.named_parameters()) else type(model).__name__
    fix = (
        "look for hooks, custom gradients, or operations on data outside of tensors near it; "
        '`fxpart doctor` shows the captured graph; check="off" skips the comparison'
    )
    return [Problem("FXP113", where, "\n".join(lines), fix)]


def _named(each: NumericDifference) -> str:
    if each.kind == "loss":
        return "the loss"
    if each.kind == "state":
        return f"buffer {each.name}"
    kind = "parameter" if each.kind == "gradient" else "input"
    return f"the gradient of {kind} {each.name}"


def _place(change: StateChange, code: ReachableCode) -> str:
    line = code.writes(change.key) or code.mentions(change.key)
    shown = change.path or "the model"
    return f"{line} ({shown})" if line else shown
