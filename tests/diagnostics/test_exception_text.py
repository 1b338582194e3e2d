"""An exception is described with the line of the user's code; texts do not control a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fxpart.checkpoint import files, safetensors_header
from fxpart.diagnostics.exception_text import describe_exception, find_user_line
from fxpart.errors import FxpartError, Problem
from fxpart.plan.model import Plan
from fxpart.runtime.heartbeat.call_tracker import TrainerCallTracker
from fxpart.runtime.transport.agreement import agree
from fxpart.runtime.transport.in_process import InProcess


class Unprintable(Exception):
    """Its text is an error, too."""

    def __str__(self) -> str:
        raise KeyError("text")


def caught(do: Callable[[], object]) -> BaseException:
    try:
        do()
    except BaseException as cause:
        return cause
    raise AssertionError("nothing was raised")


def fail(kind: type[BaseException], *given: object) -> Callable[[], object]:
    def raise_it() -> object:
        raise kind(*given)

    return raise_it


LINE = fail.__code__.co_firstlineno + 2


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        (ValueError, ("bad row",), "ValueError: bad row"), (SystemExit, (3,), "SystemExit: 3"),
        (KeyboardInterrupt, (), "KeyboardInterrupt"), (StopIteration, ("x",), "StopIteration: x"),
        (ValueError, ("a file \udcff",), "ValueError: a file \\udcff"),
        (Unprintable, (), "Unprintable: its text is not available: KeyError in __str__"),
    ],
)  # fmt: skip
def test_the_users_line(kind: type[BaseException], given: tuple[object, ...], text: str) -> None:
    cause = caught(fail(kind, *given))
    assert describe_exception(cause) == f"{text} ({__file__}, line {LINE})"


def test_the_innermost_line_outside_of_packages() -> None:
    cause = caught(lambda: torch.zeros(2) @ torch.zeros(3))
    assert find_user_line(cause).startswith(f"{__file__}, line ")
    cause = caught(lambda: json.loads("{"))  # raised in Python's library
    assert find_user_line(cause).startswith(f"{__file__}, line ")
    cause = caught(lambda: exec(compile("1 / 0", "<generated>", "exec")))
    assert find_user_line(cause).startswith(f"{__file__}, line ")
    assert describe_exception(ValueError("never raised")) == "ValueError: never raised"


def test_a_call_that_fails_on_one_rank_names_the_line() -> None:
    tracker = TrainerCallTracker()
    tracker.begin("trainer.fit")
    tracker.fail(caught(fail(SystemExit, "\ud800\x1b[31m")))
    tracker.end()
    assert tracker.last_problem == (
        f"SystemExit: \\ud800\\x1b[31m ({__file__}, line {LINE}) in trainer.fit()"
    )
    tracker.begin("trainer.close")
    tracker.end()
    assert tracker.last_problem == ""


def test_texts_of_problems_do_not_control_a_terminal() -> None:
    problem = Problem("FXP510", "\x1b]0;title\x07", "a\tb\nc\r\x9b2J\x7f", "")
    assert (problem.where, problem.why) == ("\\x1b]0;title\\x07", "a\tb\nc\\x0d\\x9b2J\\x7f")
    with pytest.raises(ValueError, match="bad"):  # one process raises what it got
        agree(InProcess(2), "it", fail(ValueError, "bad"))


def header(text: str) -> bytes:
    raw = text.encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


ENTRY = '"{}":{{"dtype":"F32","shape":[{}],"data_offsets":[{},{}]}}'


def test_a_tensor_that_is_there_twice() -> None:
    one, two = ENTRY.format("a", 1, 0, 4), ENTRY.format("a", 0, 4, 4)
    raw = header(f"{{{one},{two}}}")
    with pytest.raises(ValueError, match="the key 'a' occurs twice"):
        safetensors_header.decode(raw, len(raw) + 4)
    # A tensor may have this name.
    raw = header(f"{{{ENTRY.format('data_offsets', 1, 0, 4)}}}")
    assert list(safetensors_header.decode(raw, len(raw) + 4)) == ["data_offsets"]


@pytest.mark.parametrize("shape", [f"0,{1 << 62}", f"{1 << 62},0", f"{1 << 40},0,{1 << 40}"])
def test_an_empty_tensor_with_sizes_that_torch_cannot_have(shape: str) -> None:
    raw = header(f"{{{ENTRY.format('a', shape, 0, 0)}}}")
    with pytest.raises(ValueError, match="the sizes of 'a' are too large"):
        safetensors_header.decode(raw, len(raw))


def test_a_plan_with_a_key_that_is_there_twice() -> None:
    with pytest.raises(FxpartError, match="'version' occurs twice"):
        Plan.loads('{"format":"fxpart-plan","version":9,"version":9}')


def test_a_link_in_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    with (
        pytest.raises(OSError, match="it is a symbolic link"),
        files.open_for_reading(tmp_path / "link"),
    ):
        pass
