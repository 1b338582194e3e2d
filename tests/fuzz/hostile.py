"""Files that want to be more than data, read in a process of its own under an audit hook.

``python hostile.py FOLDER COUNT`` reads those of all readers, COUNT good ones with a hostile word
each, and prints as JSON what else happened: a process, a socket, a file outside, an import, code
that was compiled or run.
"""

from __future__ import annotations

import json
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "support")]

from fuzz.mutations import Sample, mutated  # noqa: E402
from fuzz.readers import READERS  # noqa: E402
from fuzz.reading import scratch  # noqa: E402
from fxpart.errors import FxpartError  # noqa: E402

# What may happen while a file is read; everything else that Python audits is a finding.
HARMLESS = {
    "object.__getattr__", "object.__setattr__", "sys._getframe", "sqlite3.connect/handle",
    "builtins.id", "fcntl.flock",
}  # fmt: skip
# Allowed within the folder of the readers' own files.
WITHIN = {"open", "os.mkdir", "os.listdir", "os.scandir", "sqlite3.connect", "pathlib.Path.glob"}
# torch.fx writes and compiles code of its own for a graph; what a graph names is looked at before.
# NumPy parses an array's header as a literal.
COMPILES = {
    "reproducer": {"compile", "exec"},
    "reproducer-pipeline": {"compile", "exec"},
    "paddle-arrays": {"compile"},
    "paddle-dictionaries": {"compile"},
}


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        import os

        return os.system, (self.command,)


def words(canary: Path) -> list[str]:
    """Texts that are code, paths, markup or orders to something that reads them carelessly."""
    touch = f"touch {canary}"
    return [
        f"__import__('os').system('{touch}')",
        f"');__import__('os').system('{touch}')#",
        f'"+__import__("os").system("{touch}")+"',
        f"x=__import__('os').system('{touch}')",
        f"\n__import__('os').system('{touch}')\n",
        f"{{0.__class__.__init__.__globals__}}{{__import__('os').system('{touch}')}}",
        f"$({touch})",
        f"`{touch}`",
        f"; {touch} #",
        f"| {touch}",
        f"!!python/object/apply:os.system ['{touch}']",
        f"os:system {touch}",
        "os:system",
        "builtins:exec",
        "load_library",
        "aten.save",
        f"file://{canary}",
        str(canary),
        f"../../../../../..{canary}",
        "../../../../../../../etc/passwd",
        "/etc/passwd",
        "/dev/stdin",
        "\\\\host\\share",
        "http://127.0.0.1:9/x",
        "antigravity",
        "__main__",
        "__class__.__base__.__subclasses__",
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "]]></style><svg onload=alert(1)>",
        "\x1b]0;title\x07\x1b[2J",
        "%s%n%x%d",
        "a'; DROP TABLE ops; --",
        "\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
        "\x00",
        "..",
        ".",
        "CON",
        "x" * 70_000,
    ]


def files(samples: list[Sample], canary: Path, count: int) -> Iterator[bytes]:
    """Hostile files for a reader: whole ones, and good ones with a word in a place of theirs."""
    rng = random.Random(str(len(samples)))
    evil = words(canary)
    for protocol in range(6):
        yield pickle.dumps(Payload(f"touch {canary}"), protocol)
    yield b"PK\x03\x04" + pickle.dumps(Payload(f"touch {canary}"))
    yield f"!!python/object/apply:os.system ['touch {canary}']".encode()
    yield b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><x>&e;</x>'
    yield from (word.encode() for word in evil)
    for _ in range(count):
        sample, word = rng.choice(samples), rng.choice(evil)
        yield _placed(sample, word, rng)


def _placed(sample: Sample, word: str, rng: random.Random) -> bytes:
    """The sample with the word in place of a value or a key."""
    if sample.kind in ("json", "lines"):
        documents = [json.loads(json.dumps(document)) for document, _ in sample.documents()]
        number = rng.randrange(len(documents))
        paths = [path for path in sample.documents()[number][1] if path]
        if paths:
            path = rng.choice(paths)
            held: Any = documents[number]
            for key in path[:-1]:
                held = held[key]
            if isinstance(held, dict) and rng.random() < 0.4:
                held[word] = held.pop(path[-1])
            else:
                held[path[-1]] = rng.choice((word, [word], {word: word}))
        data = b"\n".join(json.dumps(document).encode() for document in documents)
    else:
        start = rng.randrange(len(sample.data) + 1)
        end = start + rng.choice((0, 4, 20))
        data = sample.data[:start] + word.encode() + sample.data[end:]
    return sample.seal(data) if sample.seal else data


@dataclass
class Watch:
    """The audit hook: what happens while :attr:`reader` is set and is no part of reading."""

    inside: str
    reader: str = ""
    seen: set[str] = field(default_factory=set)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        reader = self.reader
        if not reader or event in HARMLESS or event in COMPILES.get(reader, ()):
            return
        # A number is a file that is open: opening it was seen.
        first = arguments[0] if arguments else None
        if event in WITHIN and (type(first) is int or str(first).startswith(self.inside)):
            return
        self.reader = ""  # what the next line does is not of the reader
        self.seen.add(f"{event} {str(arguments)[:200]}")
        self.reader = reader


def main(folder: str, changed: int, names: list[str]) -> None:
    """Read every hostile file of the readers, and print what else was done."""
    outside = Path(folder).resolve()
    watch = Watch(str(scratch()))
    sys.addaudithook(watch)
    said = {}
    for name in names:
        reader, watch.seen = READERS[name], set()
        samples = reader.samples()
        for number in range(60):  # loads what is only loaded when it is needed, error paths too
            _tried(reader.read, mutated(samples, f"warm:{number}"))
        for sample in samples:
            reader.read(sample.seal(sample.data) if sample.seal else sample.data)
        wrong, count = [], 0
        for data in list(files(samples, outside / "canary", changed)):
            watch.reader = name
            fault = _tried(reader.read, data)
            watch.reader = ""
            count += 1
            if fault:
                wrong.append(f"{fault} on {data[:300]!r}")
        said[name] = {"files": count, "done": sorted(watch.seen)[:9], "wrong": wrong[:5]}
    sys.stdout.write(json.dumps({"readers": said, "left": [p.name for p in outside.iterdir()]}))


def _tried(read: Callable[[bytes], Any], data: bytes) -> str:
    try:
        read(data)
    except FxpartError:
        return ""
    except Exception as why:
        return f"{type(why).__name__}: {why}"
    return ""


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:] or list(READERS))
