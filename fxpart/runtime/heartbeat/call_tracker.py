"""Which trainer call this process is in, and whether its last one raised an exception.

Every rank makes the same calls. A rank that waits in one compares these numbers with those of the
rank that it waits for.
"""

from __future__ import annotations

from fxpart.errors import FxpartError

_LONGEST = 400  # characters of a message


class TrainerCallTracker:
    """The outermost trainer calls of one process.

    number: how many were begun. name: the one that is under way, "" if none is. failed: the number
    of the last one that raised an exception which the other ranks need not share, 0 if none did;
    code and problem: that exception.
    """

    __slots__ = ("code", "failed", "name", "number", "problem")

    def __init__(self) -> None:
        """No call was made."""
        self.number, self.name = 0, ""
        self.failed, self.code, self.problem = 0, "", ""

    def begin(self, name: str) -> None:
        """A call begins."""
        self.number += 1
        self.name = name

    def end(self) -> None:
        """The call has returned, or raised an exception that every rank raises."""
        self.name = ""

    def fail(self, cause: BaseException) -> None:
        """The call has raised an exception that the other ranks do not know of."""
        self.code, self.problem = "FXP507", f"{type(cause).__name__}"
        text = str(cause)
        if isinstance(cause, FxpartError):
            first = cause.problems[0]
            self.code, self.problem, text = first.code, first.code, f"{first.where}: {first.why}"
        self.problem = f"{self.problem}: {text}"[:_LONGEST].rstrip(": ") + f" in {self.name}()"
        self.failed, self.name = self.number, ""


calls = TrainerCallTracker()  # of this process
