"""The error class, the error codes, and the text of a problem.

Every cause of failure has a code, a title and an exit status here, and a page in ``docs/errors``.
The raise site adds what only it knows: where, why and the fix.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

EXIT_DIFFERENCE = 1
EXIT_INPUT = 2
EXIT_INFEASIBLE = 3
EXIT_ENVIRONMENT = 4
EXIT_RUN = 5
EXIT_INCOMPLETE = 6
EXIT_OURS = 70

CODES: dict[str, tuple[str, int]] = {
    # 1xx: the model, its inputs and the call
    "FXP101": ("the model cannot be captured", EXIT_INPUT),
    "FXP102": ("example inputs are needed", EXIT_INPUT),
    "FXP103": ("control flow depends on data", EXIT_INPUT),
    "FXP104": ("the batch dimension is unclear", EXIT_INPUT),
    "FXP105": ("the batch does not fit the captured inputs", EXIT_INPUT),
    "FXP106": ("there is no loss", EXIT_INPUT),
    "FXP107": ("the target cannot be loaded", EXIT_INPUT),
    "FXP108": ("an operation is not supported", EXIT_INPUT),
    "FXP109": ("an argument is wrong", EXIT_INPUT),
    "FXP110": ("the weights cannot be loaded", EXIT_INPUT),
    "FXP111": ("an annotation is wrong", EXIT_INPUT),
    "FXP112": ("annotations contradict each other", EXIT_INPUT),
    "FXP113": ("the captured program differs from the module", EXIT_INPUT),
    "FXP114": ("the objective depends on how the batch is divided", EXIT_INPUT),
    "FXP115": ("the optimizer or its scheduler is not supported", EXIT_INPUT),
    "FXP116": ("an active torch mode is not supported", EXIT_INPUT),
    # 2xx: planning
    "FXP201": ("the stages cannot be formed", EXIT_INFEASIBLE),
    "FXP202": ("the constraints contradict each other", EXIT_INFEASIBLE),
    "FXP204": ("no plan fits in device memory", EXIT_INFEASIBLE),
    "FXP205": ("no plan found within the time limit", EXIT_INFEASIBLE),
    "FXP206": ("the partition problem is not valid", EXIT_INPUT),
    # 3xx: the plan file
    "FXP301": ("the plan cannot be read", EXIT_INPUT),
    "FXP302": ("the plan's format is not known", EXIT_INPUT),
    "FXP303": ("the plan is not valid", EXIT_INPUT),
    "FXP304": ("the plan belongs to another model", EXIT_INPUT),
    "FXP305": ("the plan belongs to another cluster", EXIT_INPUT),
    "FXP306": ("this version cannot run the plan", EXIT_INPUT),
    # 4xx: the cluster
    "FXP401": ("the cluster cannot be read", EXIT_INPUT),
    "FXP402": ("the cluster is not valid", EXIT_INPUT),
    "FXP403": ("a link is missing", EXIT_INPUT),
    "FXP404": ("the cluster preset is not known", EXIT_INPUT),
    "FXP405": ("the profile cannot be read", EXIT_INPUT),
    "FXP406": ("the profile was measured elsewhere", EXIT_INPUT),
    "FXP407": ("another tool's file cannot be imported", EXIT_INPUT),
    # 5xx: the run
    "FXP501": ("the ranks disagree", EXIT_RUN),
    "FXP502": ("the number of processes does not match the plan", EXIT_INPUT),
    "FXP503": ("a transfer took too long", EXIT_RUN),
    "FXP504": ("a stage failed", EXIT_RUN),
    "FXP505": ("an exported program was changed", EXIT_INPUT),
    "FXP506": ("results differ from single-process training", EXIT_DIFFERENCE),
    "FXP507": ("a rank process failed", EXIT_RUN),
    "FXP510": ("a checkpoint is damaged", EXIT_INPUT),
    "FXP511": ("no checkpoint can be loaded", EXIT_INPUT),
    "FXP512": ("the checkpoint is of another model", EXIT_INPUT),
    "FXP513": ("a checkpoint cannot be written", EXIT_RUN),
    "FXP514": ("a rank was lost", EXIT_RUN),
    "FXP515": ("a rank does not answer", EXIT_RUN),
    "FXP516": ("the ranks could not connect", EXIT_RUN),
    "FXP517": ("restarts make no progress", EXIT_RUN),
    "FXP518": ("a repeated step gave different results", EXIT_DIFFERENCE),
    "FXP519": ("fewer ranks are left than the run allows", EXIT_RUN),
    "FXP520": ("the run's folder cannot be read", EXIT_INPUT),
    "FXP521": ("another process runs the run", EXIT_INPUT),
    "FXP522": ("the last state of the run is not saved", EXIT_INCOMPLETE),
    "FXP523": ("the loss or a gradient is not finite", EXIT_INCOMPLETE),
    "FXP524": ("a signature is missing or does not match", EXIT_INPUT),
    # 6xx: the environment
    "FXP601": ("a needed package is missing or too old", EXIT_ENVIRONMENT),
    "FXP602": ("torch.distributed is not usable here", EXIT_ENVIRONMENT),
    "FXP603": ("a file cannot be written", EXIT_ENVIRONMENT),
    # 9xx: internal errors
    "FXP900": ("internal error of fxpart", EXIT_OURS),
    "FXP901": ("a schedule is not safe", EXIT_OURS),
}


MOST_PROBLEMS = 256  # Per error.
LONGEST = 16_000  # Characters per text of a problem; a rank's whole traceback fits.
_MOST_TEXT = 100_000  # Characters of all problems together; further problems are dropped.


def short(text: str, most: int = 80) -> str:
    """Return a user-supplied text, truncated for a message."""
    return text if len(text) <= most else f"{text[:most]}..."


def quoted(value: object, most: int = 80) -> str:
    """Return the repr of a value, truncated for a message."""
    if isinstance(value, str):
        return repr(value) if len(value) <= most else f"{value[:most]!r}..."
    try:
        return short(repr(value), most)
    except (RecursionError, ValueError):  # Deeply nested, or more digits than Python converts.
        return f"a {type(value).__name__}"


@dataclass(frozen=True)
class Problem:
    """One cause: its code, the place, the reason and the fix (all plain text).

    The middle of a text that is too long is removed; characters that cannot be encoded are escaped.
    """

    code: str
    where: str
    why: str
    fix: str

    def __post_init__(self) -> None:
        """Make the texts printable and encodable."""
        for name in ("where", "why", "fix"):
            object.__setattr__(self, name, make_printable(getattr(self, name)))

    def __str__(self) -> str:
        title = CODES[self.code][0]
        lines = [f"{self.code}  {title}"]
        for label, text in (("where", self.where), ("why", self.why), ("fix", self.fix)):
            if text:
                first, *rest = text.splitlines()
                lines.append(f"  {label:<7} {first}")
                lines.extend(f"  {'':<7} {line}" for line in rest)
        lines.append(f"  {'more':<7} fxpart explain {self.code}")
        return "\n".join(lines)


class FxpartError(Exception):
    """Every failure that fxpart reports: one or more :class:`Problem`, all at once."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        """Store the problems; at least one, each with a known code.

        If there are too many, the first are kept and a last one reports the number of the others.
        """
        self.problems = (
            (problems,) if isinstance(problems, Problem) else _limit_problems(tuple(problems))
        )
        assert self.problems, "an FxpartError needs a problem"
        assert all(p.code in CODES for p in self.problems), "unknown error code"
        super().__init__("\n".join(str(p) for p in self.problems))

    @property
    def code(self) -> str:
        """The code of the first problem."""
        return self.problems[0].code

    @property
    def exit_code(self) -> int:
        """The process exit status of the first problem: 1, 2, 3, 4, 5, 6 or 70."""
        return CODES[self.code][1]

    def __reduce__(self) -> tuple[type[FxpartError], tuple[tuple[Problem, ...]]]:
        """Pickle with all problems."""
        return (FxpartError, (self.problems,))


def error(code: str, *, where: str, why: str, fix: str = "") -> FxpartError:
    """Return an :class:`FxpartError` with one problem, to be raised by the caller."""
    return FxpartError(Problem(code, where, why, fix))


# What a plain installation may lack, and how to install it.
_PACKAGES = {"torch": "fxpart[train]", "ortools": "ortools", "sympy": "sympy"}


def find_missing_package(failure: ModuleNotFoundError) -> FxpartError | None:
    """Return the error for a package that fxpart needs and that is not installed, else None."""
    name = (failure.name or "").partition(".")[0]
    if name not in _PACKAGES:
        return None
    use = " Capture, code generation and training use it." if name == "torch" else ""
    return error(
        "FXP601",
        where=f"the package {name}",
        why=f"{name} is not installed.{use}",
        fix=f"pip install '{_PACKAGES[name]}'",
    )


# A text must not control the terminal; lines and tabs are kept.
_CONTROLS = {i: f"\\x{i:02x}" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}


def make_printable(text: str) -> str:
    """Return a text that can be printed, encoded and sent; its middle is removed if it is long."""
    if len(text) > LONGEST:
        half = LONGEST // 2
        left_out = f"\n... {len(text) - 2 * half} characters left out ...\n"
        text = text[:half] + left_out + text[-half:]
    text = text.translate(_CONTROLS)
    # Half a surrogate pair, as in a path that is not UTF-8, can be neither printed nor sent.
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _limit_problems(problems: tuple[Problem, ...]) -> tuple[Problem, ...]:
    """Return the problems to keep, and one that reports the number of the others."""
    sizes = [len(problem.where) + len(problem.why) + len(problem.fix) for problem in problems]
    if len(problems) <= MOST_PROBLEMS and sum(sizes) <= _MOST_TEXT:
        return problems
    # Reserve room for the last one, so that a truncated list is not truncated again.
    room = accumulate(sizes[: MOST_PROBLEMS - 1])
    kept = max(1, sum(size <= _MOST_TEXT - 200 for size in room))
    if kept == len(problems):
        return problems
    why = f"{len(problems) - kept} more problems are not listed"
    return (*problems[:kept], Problem(problems[kept].code, "", why, "correct these first"))
