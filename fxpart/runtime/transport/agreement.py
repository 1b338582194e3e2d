"""Agreement of ranks: disagreement raises the same error on every rank before any transfer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from fxpart.diagnostics.exception_text import describe_exception
from fxpart.errors import CODES, FxpartError, Problem, error
from fxpart.runtime import heartbeat
from fxpart.runtime.heartbeat.call_tracker import calls
from fxpart.runtime.transport.interface import PeerLostError, TransferTimeoutError, Transport

_BITS = 63
T = TypeVar("T")


def digest(text: str) -> int:
    """Return a 63-bit digest of a text."""
    raw = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little") >> (64 - _BITS)


class AllRanksError(FxpartError):
    """An error that every rank raises at this point, so that no rank must be informed."""


class RankAgreement(Generic[T]):
    """A comparison between processes that is in flight; :meth:`confirm` completes it.

    Nothing is compared if one process runs all ranks. confirmed: whether all processes agreed.
    """

    def __init__(self, transport: Transport, what: str, make: Callable[[], tuple[T, str]]) -> None:
        """Run ``make``, which returns a value and its description, and start the comparison.

        what: what is compared, for the message. An exception of ``make`` is reported to all ranks:
        the problems of an FxpartError, FXP507 with the type and text of any other.
        """
        self._transport = transport
        self._what = what
        self._text = ""
        self._value: list[T] = []
        self._problems: Sequence[Problem] = ()
        self._cause: Exception | None = None
        self._alone = transport.ranks == len(transport.local)
        self._handle: Any = None
        self.confirmed = self._alone
        try:
            value, self._text = make()
            self._value.append(value)
        except FxpartError as failure:
            if self._alone:
                raise
            self._problems = failure.problems
        except Exception as failure:
            if self._alone:
                raise
            self._problems = (make_exception_problem(transport.local[0], what, failure),)
            self._cause = failure
        if not self._alone:
            row = [len(self._problems), *self._digests(), *self._make_extra_integers()]
            with convert_transport_errors(transport, f"comparing {what}"):
                self._handle = transport.begin_exchange(row)
            if self._problems:
                self.confirm()

    @property
    def value(self) -> T:
        """The value that ``make`` returned."""
        return self._value[0]

    def confirm(self) -> None:
        """Wait for all processes; raise the same error on every process unless all agree.

        It has the problems of all processes (each once, in order of rank), or is FXP501 with the
        differing descriptions.
        """
        if self._alone or self._handle is None:
            return
        handle, self._handle = self._handle, None
        with convert_transport_errors(self._transport, f"comparing {self._what}"):
            rows = self._transport.end_exchange(handle)
            if any(row[0] for row in rows):
                problems = encode_problems(self._problems)
                raise AllRanksError(
                    merge_problems(self._transport.exchange_bytes(problems), names_ranks=True)
                ) from self._cause
            self._compare(rows)
            self.confirmed = True

    def _digests(self) -> list[int]:
        """Return two integers that represent the description in this process's row."""
        return [digest(self._text), 0]

    def _make_extra_integers(self) -> list[int]:
        """Return two integers that are sent along without comparison."""
        return [0, 0]

    def _compare(self, rows: list[list[int]]) -> None:
        """Raise FXP501 unless all rows are equal."""
        if any(row != rows[0] for row in rows):
            self._raise_difference(self._text)

    def _raise_difference(self, text: str) -> NoReturn:
        """Gather the descriptions of all processes and raise FXP501; collective."""
        message = msgspec.json.encode((calls.name, text))
        raws = self._transport.exchange_bytes(message)
        reports = [msgspec.json.decode(raw, type=tuple[str, str]) for raw in raws]
        names = [name for name, _ in reports]
        if all(names) and len(set(names)) > 1:
            raise AllRanksError(make_call_mismatch_problem(names))
        raise AllRanksError(_make_difference_problem(self._what, [text for _, text in reports]))


def agree(transport: Transport, what: str, make: Callable[[], tuple[T, str]]) -> T:
    """Run ``make`` on every process; return its value if all succeed with the same description.

    Raises as :meth:`RankAgreement.confirm` does, on every process.
    """
    pending = RankAgreement(transport, what, make)
    pending.confirm()
    return pending.value


@contextmanager
def convert_transport_errors(transport: Transport, what: str) -> Iterator[None]:
    """Convert a transport's exceptions to FXP503 and FXP504; what: the activity, for messages."""
    try:
        yield
    except (TransferTimeoutError, PeerLostError) as cause:
        raise make_lost_peer_error(transport.local[0], what, cause) from cause


def make_lost_peer_error(
    rank: int, what: str, cause: TransferTimeoutError | PeerLostError
) -> FxpartError:
    """Return the error of a rank that waited for another without success.

    FXP514 or FXP515 with the failed rank if the ranks monitor each other, else FXP503 or FXP504.
    what: the activity, for the message.
    """
    found = heartbeat.diagnose_failed_wait(
        what, cause.seconds if isinstance(cause, TransferTimeoutError) else None
    )
    if found is not None:
        return found
    where = f"rank {rank}, {what}"
    if isinstance(cause, TransferTimeoutError):
        return error(
            "FXP503",
            where=where,
            why=cause.detail
            if cause.explained
            else f"no data was transferred for {cause.seconds:g} seconds",
            fix="see the messages of the other ranks; use a larger timeout if a step is that slow",
        )
    return error(
        "FXP504",
        where=where,
        why=f"the connection to another rank was lost: {cause}",
        fix="see the messages of the other ranks, one of which ended first",
    )


def encode_problems(problems: Sequence[Problem]) -> bytes:
    """Encode problems as a message."""
    return msgspec.json.encode([(p.code, p.where, p.why, p.fix) for p in problems])


def merge_problems(messages: Sequence[bytes], *, names_ranks: bool = False) -> list[Problem]:
    """Return the problems of all messages, each once.

    names_ranks: add the ranks to a problem that only some ranks have, unless it names a rank.
    """
    found: dict[Problem, list[int]] = {}
    for rank, message in enumerate(messages):
        for code, where, why, fix in msgspec.json.decode(
            message, type=list[tuple[str, str, str, str]]
        ):
            problem = Problem(code if code in CODES else "FXP504", where, why, fix)
            found.setdefault(problem, []).append(rank)
    if not names_ranks:
        return list(found)
    return [
        problem if len(set(ranks)) == len(messages) else _add_ranks(problem, ranks)
        for problem, ranks in found.items()
    ]


def _add_ranks(problem: Problem, ranks: Sequence[int]) -> Problem:
    """Return the problem with its ranks, before the location unless that is in a batch."""
    if problem.where.startswith("rank "):
        return problem
    names = f"rank {', '.join(map(str, ranks))}"
    if problem.code == "FXP105":
        return replace(problem, why=f"{problem.why} (on {names})")
    return replace(problem, where=f"{names}, {problem.where}")


def make_exception_problem(rank: int, what: str, cause: BaseException) -> Problem:
    """Return FXP507 for an exception of one rank that is not an FxpartError."""
    return Problem(
        "FXP507",
        f"rank {rank}, {what}",
        describe_exception(cause),
        "correct the cause on this rank; every rank has left this call, and none is waiting",
    )


def make_call_mismatch_problem(names: Sequence[str]) -> Problem:
    """Return FXP501 with the trainer call of each rank."""
    return Problem(
        "FXP501",
        "calls of the trainer",
        "\n".join(f"rank {rank} called {name}()" for rank, name in enumerate(names)),
        "make the call on every rank, in the same order; use `if rank == 0:` only for the code "
        "that uses its result",
    )


def _make_difference_problem(what: str, texts: Sequence[str]) -> Problem:
    """Return FXP501 with the differing parts of the descriptions and their ranks."""
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    start = _find_difference(list(groups))
    lines = [
        f"rank {', '.join(map(str, ranks))}: ...{text[start : start + 160]}"
        for text, ranks in groups.items()
    ]
    return Problem(
        "FXP501",
        what,
        "\n".join(lines),
        "run every rank with the same script, arguments and batches in the same order",
    )


def _find_difference(texts: list[str]) -> int:
    """Return the index at which the texts start to differ, minus some context."""
    shortest = min(map(len, texts))
    for at in range(shortest):
        if len({text[at] for text in texts}) > 1:
            return max(0, at - 20)
    return max(0, shortest - 20)
