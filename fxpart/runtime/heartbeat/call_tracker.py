"""The current trainer call of this process, and whether the last one raised an exception.

Every rank makes the same calls. A rank that waits in a call compares these values with those of the
rank that it waits for.
"""

from __future__ import annotations

from fxpart.diagnostics.exception_text import describe_exception
from fxpart.errors import FxpartError, make_printable

_LONGEST = 400  # characters of a message


class TrainerCallTracker:
    """Outermost trainer calls of one process.

    number: of calls begun. name: of the call in progress, or "". failed: number of the last call
    that raised an exception the other ranks may not share, or 0. code, problem: describe that
    exception.
    """

    __slots__ = ("code", "failed", "name", "number", "problem")

    def __init__(self) -> None:
        """Create a tracker without calls."""
        self.number, self.name = 0, ""
        self.failed, self.code, self.problem = 0, "", ""

    @property
    def last_problem(self) -> str:
        """The exception of the last call, if the other ranks may not share it; or ""."""
        return self.problem if self.failed == self.number and not self.name else ""

    def begin(self, name: str) -> None:
        """Record the begin of a call."""
        self.number += 1
        self.name = name

    def end(self) -> None:
        """Record that the call has returned, or raised an exception that every rank raises."""
        self.name = ""

    def fail(self, cause: BaseException) -> None:
        """Record an exception that the other ranks do not know."""
        self.code, text = "FXP507", describe_exception(cause)
        if isinstance(cause, FxpartError):
            first = cause.problems[0]
            self.code, text = first.code, f"{first.code}: {first.where}: {first.why}"
        self.problem = f"{make_printable(text)[:_LONGEST].rstrip(': ')} in {self.name}()"
        self.failed, self.name = self.number, ""


calls = TrainerCallTracker()  # of this process
