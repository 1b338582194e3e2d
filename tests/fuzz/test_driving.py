"""The fuzzer finds tracebacks, endless loops and floods of memory, and can repeat itself."""

from __future__ import annotations

import re
import zlib
from base64 import b85decode

import pytest

from fuzz.driving import MEMORY, bounded, fault, fuzz, repro
from fuzz.mutations import Sample, mutated
from fxpart.errors import FxpartError, Problem, error

SAMPLES = [Sample(b'{"a":[1,2,{"b":"x"}],"c":null}', "json"), Sample(b"a = 1\n", "toml")]


def test_the_same_seed_gives_the_same_file() -> None:
    files = [mutated(SAMPLES, f"x:{n}") for n in range(500)]
    assert files == [mutated(SAMPLES, f"x:{n}") for n in range(500)]
    assert len(set(files)) > 350


@pytest.mark.slow
def test_a_traceback_is_told_with_the_smallest_file() -> None:
    def read(data: bytes) -> None:
        if b"NaN" in data:
            raise KeyError("NaN")

    with pytest.raises(AssertionError) as caught:
        fuzz("reader", read, SAMPLES, 5000)
    said = str(caught.value)
    assert "KeyError: 'NaN'" in said and "data = b'NaN'" in said
    made = re.search(r"mutation '(reader:0:\d+)'", said)
    assert made and b"NaN" in mutated(SAMPLES, made[1])


class Chatty(FxpartError):
    """Says far too much."""

    def __str__(self) -> str:
        return "x" * 150_001


@pytest.mark.slow
def test_what_takes_too_long_or_too_much() -> None:
    def endless(_: bytes) -> None:
        while True:
            pass

    def greedy(_: bytes) -> None:
        bytes(2 * MEMORY)

    def ours(_: bytes) -> None:
        raise error("FXP900", where="", why="")

    def chatty(_: bytes) -> None:
        raise Chatty(Problem("FXP109", "", "x", ""))

    with bounded():
        assert "TooLong" in fault(endless, b"")[1]
        assert "MemoryError" in fault(greedy, b"")[1]
        assert "fault of its own" in fault(ours, b"")[1]
        assert "its message has 150001 characters" in fault(chatty, b"")[1]
        assert fault(lambda _: None, b"") == ("read", "")
    assert bytes(MEMORY + 1)


@pytest.mark.parametrize("data", [b"\x00\xff'", bytes(range(256)) * 9])
def test_what_is_printed_can_be_pasted(data: bytes) -> None:
    namespace: dict[str, object] = {}
    exec(f"import zlib, base64\n{repro(data)}", namespace)
    assert namespace["data"] == data
    assert len(data) < 600 or zlib.decompress(b85decode(repro(data).split("'")[1])) == data
