"""Why a capture failed: exceptions of torch's tracers as problems with user's line and fix."""

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
    """A line of the user's code: ``file`` as short path, ``code`` stripped; empty if unknown."""

    file: str = ""
    line: int = 0
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.code}" if self.file else "unknown line"


def find_source_line(failure: BaseException) -> SourceLine:
    """The innermost line of the user's (or the model library's) code that led to ``failure``.

    Looks at the traceback, then at the lines that torch writes into its messages ("from user
    code: File ..."), then at the exception's cause.
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
    """One failure as a problem with its place, reason and fix."""
    if isinstance(failure, FxpartError):
        return failure.problems[0]
    place = find_source_line(failure)
    summary = summarize_exception(failure)
    text = f"{type(failure).__name__} {failure}"
    if _DATA.search(text):
        code, why = "FXP103", f"the program's path here depends on a tensor's value ({summary})"
    elif _UNSUPPORTED.search(text):
        code, why = "FXP108", f"torch cannot trace this operation ({summary})"
    else:
        code, why = "FXP101", summary
    return Problem(code, str(place), why, _fix(code, place, text))


def problems_of(failures: Sequence[tuple[str, BaseException]]) -> list[Problem]:
    """Every distinct cause among the failures of the ways, tried in this order.

    Failures at one line are one cause. What the first way (torch.export, non-strict) found comes
    as problems of their own; causes that only the fallbacks have are told with the first one.
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
    """The first line of what an exception says, with its type."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return f"{type(failure).__name__}: {lines[0]}" if lines else type(failure).__name__


def _after_entry(frame: traceback.FrameSummary, failure: BaseException) -> bool:
    """Whether a frame lies below fxpart's own: a caller of capture() is no cause."""
    stack = traceback.extract_tb(failure.__traceback__)
    own = [i for i, f in enumerate(stack) if not is_users(f.filename)]
    return bool(own) and stack.index(frame) > own[0]


def _place(file: str, line: int) -> SourceLine:
    return SourceLine(shorten_path(file), line, linecache.getline(file, line).strip())


def _fix(code: str, place: SourceLine, text: str) -> str:
    """Advice for a cause, from its code and the line it points to."""
    source = place.code.lower()
    if "layerdrop" in source or "layer_drop" in source:
        return (
            "switch layer drop off: set encoder_layerdrop, decoder_layerdrop or layerdrop to 0.0 "
            "in the model's config"
        )
    if code == "FXP103" and "labels" in source:
        return "leave labels out of the example, and give loss= a function of your own"
    if code == "FXP103" and re.search(r"\.item\(|\.tolist\(|int\(|float\(|bool\(", source):
        return "keep the value a tensor: no .item(), .tolist(), int(), float() or bool() of it"
    if code == "FXP103" and re.search(r"nonzero|unique|masked_select|\[.*[<>=]=?.*\]", source):
        return "the size depends on data: use torch.where or a mask of fixed size instead"
    if code == "FXP103":
        return (
            "replace the branch by torch.where or torch.cond, or decide it by a config option or "
            "a constructor argument"
        )
    if code == "FXP108":
        return (
            "register a fake kernel (torch.library.register_fake) for a custom operator, or "
            "write the line with torch's own operations"
        )
    if "Constraints violated" in text or "specializ" in text:
        return "the model fixes a size in its code; capture at that size (microbatch_size=)"
    return "make this line traceable by torch.export; `fxpart doctor` shows every attempt"
