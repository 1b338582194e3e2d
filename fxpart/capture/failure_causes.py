"""Convert exceptions of torch's tracers to problems with the user's source line and a fix."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from fxpart.capture.source_locations import is_users, shorten_path
from fxpart.errors import FxpartError, Problem

_DATA = re.compile(
    r"data-dependent|data dependent|DataDependent|GuardOnDataDependent|"
    r"inputs to control flow|Dynamic control flow|bool\(\) on|u\d+ .*unbacked",
    re.IGNORECASE,
)
_UNSUPPORTED = re.compile(
    r"UnsupportedOperator|DynamicOutputShape|no fake impl|meta implementation|fake kernel|"
    r"not implemented for|NotImplementedError|Unsupported (?:output|input|builtin)|custom_op",
    re.IGNORECASE,
)
_USER_CODE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's code: short path and stripped code; empty if unknown."""

    file: str = ""
    line: int = 0
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.code}" if self.file else "unknown line"


def find_source_line(failure: BaseException) -> SourceLine:
    """Return the innermost line of the user's (or a model library's) code that led to ``failure``.

    Sources are the traceback, the lines that torch writes into its messages ("from user code: File
    ..."), and the exception's cause.
    """
    frames = [f for f in traceback.extract_tb(failure.__traceback__) if is_users(f.filename)]
    inside = [f for f in frames if _after_entry(f, failure)]
    if inside:
        last = inside[-1]
        return _place(last.filename, last.lineno or 0)
    for match in reversed(list(_USER_CODE.finditer(str(failure)))):
        if is_users(match["file"]):
            return _place(match["file"], int(match["line"]))
    cause = failure.__cause__ or failure.__context__
    return find_source_line(cause) if cause is not None else SourceLine()


def problem_of(failure: BaseException) -> Problem:
    """Return one failure as a problem with location, cause and fix."""
    if isinstance(failure, FxpartError):
        return failure.problems[0]
    place = find_source_line(failure)
    summary = summarize_exception(failure)
    text = f"{type(failure).__name__} {failure}"
    if _DATA.search(text):
        code, why = "FXP103", f"control flow here depends on a tensor's value ({summary})"
    elif _UNSUPPORTED.search(text):
        code, why = "FXP108", f"torch cannot trace this operation ({summary})"
    else:
        code, why = "FXP101", summary
    return Problem(code, str(place), why, _fix(code, place, text))


def problems_of(failures: Sequence[tuple[str, BaseException]]) -> list[Problem]:
    """Return every distinct cause among the failures of the trace methods, in order.

    Failures at one line are one cause. Failures of the first method (torch.export, non-strict) are
    separate problems; causes found only by fallbacks are appended to the first problem.
    """
    merged: dict[str, tuple[Problem, list[str]]] = {}
    for label, failure in failures:
        problem = problem_of(failure)
        merged.setdefault(problem.where, (problem, []))[1].append(label)
    leading = [p for p, labels in merged.values() if labels[0].startswith("export,")]
    leading = leading or [next(iter(merged.values()))[0]]
    result = []
    for problem in leading:
        why = [problem.why, "in: " + "; ".join(merged[problem.where][1])]
        if problem is leading[0]:
            why += [
                f"{'; '.join(labels)}: {other.why} at {other.where}"
                for other, labels in merged.values()
                if not any(other is p for p in leading)
            ]
        result.append(Problem(problem.code, problem.where, "\n".join(why), problem.fix))
    return result


def summarize_exception(failure: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return f"{type(failure).__name__}: {lines[0]}" if lines else type(failure).__name__


def _after_entry(frame: traceback.FrameSummary, failure: BaseException) -> bool:
    """Return whether a frame is below fxpart's frames; a caller of capture() is not a cause."""
    stack = traceback.extract_tb(failure.__traceback__)
    own = [i for i, f in enumerate(stack) if not is_users(f.filename)]
    return bool(own) and stack.index(frame) > own[0]


def _place(file: str, line: int) -> SourceLine:
    return SourceLine(shorten_path(file), line, linecache.getline(file, line).strip())


def _fix(code: str, place: SourceLine, text: str) -> str:
    """Return advice for a cause, from its code and source line."""
    source = place.code.lower()
    if "layerdrop" in source or "layer_drop" in source:
        return (
            "switch layer drop off: set encoder_layerdrop, decoder_layerdrop or layerdrop to 0.0 "
            "in the model's config"
        )
    if code == "FXP103" and "labels" in source:
        return "remove labels from the example, and pass your own loss="
    if code == "FXP103" and re.search(r"\.item\(|\.tolist\(|int\(|float\(|bool\(", source):
        return "keep the value as a tensor: avoid .item(), .tolist(), int(), float() and bool()"
    if code == "FXP103" and re.search(r"Eq\(u\d+, u\d+\)", text):
        return "compute the mask once: rows that two masks select may differ in number"
    if code == "FXP103" and re.search(r"nonzero|unique|masked_select|\[.*[<>=]=?.*\]", source):
        return "use torch.where or a mask of fixed size instead of a data-dependent size"
    if code == "FXP103":
        return (
            "replace the branch with torch.where or torch.cond, or select it by a config option or "
            "a constructor argument"
        )
    if code == "FXP108":
        return (
            "register a fake kernel (torch.library.register_fake) for a custom operator, or "
            "rewrite the line with torch operations"
        )
    if "Constraints violated" in text or "specializ" in text:
        return "the model fixes a size in its code; pass that size as microbatch_size="
    return "make this line traceable by torch.export; `fxpart doctor` shows every attempt"
