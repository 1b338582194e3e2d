"""Files changed as accidents and attackers change them: each change follows from its seed alone."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Kind = Literal["json", "lines", "toml", "text", "binary"]
Path = tuple[Any, ...]

# As JSON writes values; numbers stand in texts and TOML too.
NUMBERS = (
    b"0", b"-1", b"1", b"2", b"7", b"-0.0", b"0.5", b"1e308", b"-1e308", b"1e999", b"1e-999",
    b"NaN",
    b"Infinity", b"-Infinity", b"127", b"128", b"255", b"65536", b"2147483647", b"2147483648",
    b"4294967296",
    b"9007199254740993", b"9223372036854775807", b"9223372036854775808", b"18446744073709551616",
    b"1000000", b"1000000000", b"1000000000000000", b"9" * 40, b"9" * 400, b"9" * 5000, b"0x7f",
    b"1_0", b"1e",
)  # fmt: skip
VALUES = (
    b"null", b"true", b"false", b'""', b'"x"', b'"7"', b"[]", b"{}", b"[[]]", b"[null]",
    b'{"":null}', b"[1,2]",
    b"[-1,0]", b'{"a":1}', b'"\\ud800"', b'"\\u0000"', b'"\xc3\xa9"', b'"../../x"', b'"/x"',
    b'"a b"', b'"*"',
    b'"nan"', b'"1e999"', b'"float32"', b'"F32"', b'"0F0"',
)  # fmt: skip
# Long and deep ones take their time: they come up less often.
HEAVY = (
    b'"' + b"x" * 100_000 + b'"',
    b'"' + b"\\u0000" * 20_000 + b'"',
    b"[" * 500 + b"]" * 500,
    b"[" * 100_000 + b"]" * 100_000,
    b"[" * 50_000,
    b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    b'{"a":' * 200 + b"1" + b"}" * 200,
    b"[" + b"0," * 20_000 + b"0]",
    b"[" + b'"",' * 20_000 + b'""]',
    b"[" + b"[]," * 20_000 + b"[]]",
    b"{" + b",".join(b'"k%d":0' % i for i in range(5_000)) + b"}",
    b"9" * 100_000,
)
TOKENS: dict[Kind, tuple[bytes, ...]] = {
    "json": (b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"null", b"//", b"\xff", b"\x00",
    b"\xef\xbb\xbf"),
    "toml": (
        b"\n[[", b"\n[", b"]", b"=", b'"""', b"'''", b'"', b"\n", b"#", b".", b"{", b"}", b",",
        b"\\", b"\xff", b"\x00",
        b"1979-05-27T07:32:00Z", b"\n[[devices]]\n", b"\n[links]\n", b"\na.b.c = 1\n", b"inf",
        b"nan", b"0b1", b"a = 1",
        b"\n[[links]]\n", b"'",
    ),
    "text": (
        b"\n", b"\t", b" ", b",", b";", b":", b"-", b"#", b"=", b"[", b"]", b"{", b"}", b"(",
        b")", b"|", b"@", b">", b"X",
        b"NV99", b"GPU0", b"N/A", b"nan", b"inf", b"\r\n", b"\x00", b"\xff", b"\x1b[4m",
        b"\xd9\xa1", b"\xe2\x80\xa8",
        b"size", b"0-99999999", b"[0-999999999]", b"SLURM", b"0F0", b"1SEND_B0", b"@9", b'"',
    ),
    "binary": (b"\x00" * 8, b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x00\x00\x00\x80", b"\x01",
    b"PK\x03\x04", b"\x80\x04"),
}  # fmt: skip
TOKENS["lines"] = (*TOKENS["json"], b"\n", b"\n\n", b"\r\n")
LONG_TOKENS: dict[Kind, tuple[bytes, ...]] = {
    "json": HEAVY,
    "lines": (*HEAVY, b"\n" * 20_000, b"{}\n" * 5_000),
    "toml": (
        b"\nx = " + b"[" * 50_000, b"\nx = " + b"[" * 300 + b"]" * 300,
        b"\nx = " + b"{a=" * 3_000, b"\n[" + b"a." * 3_000 + b"a]",
        b"\n" + b"a." * 3_000 + b"a = 1", b"\nx = '" + b"x" * 100_000 + b"'",
        b"\n[[links]]" * 2_000,
        b"\nx = " + b"9" * 10_000, b"\n#" + b"#" * 100_000, b"\n" * 20_000,
    ),
    "text": (
        b"x" * 100_000, b"9" * 10_000, b"\n" * 20_000, b"," * 20_000, b"[" * 20_000,
        b" " * 50_000, b"a[0-9]," * 3_000,
        b"0F0 " * 10_000, b"\t" * 20_000, b"-" * 50_000,
    ),
    "binary": (b"\x00" * 65_536, b"\xff" * 65_536, b"[" * 65_536),
}  # fmt: skip
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


@dataclass(frozen=True)
class Sample:
    """A good file. kind: how to change it by its structure.

    seal: makes the file of the changed data, digests and lengths put right again, so that what
    stands behind them is reached; None where the data is the file.
    """

    data: bytes
    kind: Kind
    seal: Callable[[bytes], bytes] | None = None
    _places: list[tuple[Any, list[Path]]] = field(default_factory=list, compare=False, repr=False)

    def documents(self) -> list[tuple[Any, list[Path]]]:
        """Each JSON document with the paths of all its values; parsed once."""
        if not self._places:
            parts = self.data.splitlines() if self.kind == "lines" else [self.data]
            documents = [msgspec.json.decode(part) for part in parts if part.strip()]
            self._places.extend((each, list(paths(each))) for each in documents)
        return self._places


def paths(value: Any, start: Path = ()) -> Sequence[Path]:
    """The paths of a JSON value and of all in it, the whole first."""
    found = [start]
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            found += paths(inner, (*start, key))
    return found


def mutated(samples: Sequence[Sample], seed: str) -> bytes:
    """One of the samples, changed; the same for the same seed."""
    rng = random.Random(seed)
    sample = rng.choice(samples)
    data = sample.data
    structured = sample.kind in ("json", "lines") and rng.random() < 0.7
    if structured:
        data = _document_changed(sample, rng)
    if not structured or rng.random() < 0.05:
        other = rng.choice(samples).data
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            data = _bytes_changed(data, sample.kind, other, rng)
    if sample.seal is None:
        return data
    sealed = sample.seal(data)
    if rng.random() < 0.1:
        return _bytes_changed(sealed, "binary", sealed, rng)
    return sealed


def _document_changed(sample: Sample, rng: random.Random) -> bytes:
    """A place of a JSON document, or of one of its lines, changed."""
    documents = sample.documents()
    number = rng.randrange(len(documents))
    document, places = documents[number]
    for _ in range(rng.choice((1, 1, 1, 2))):
        document = _value_changed(document, _place(document, places, rng), places, rng)
        places = [()] if not isinstance(document, dict | list) else places
    made = [msgspec.json.encode(each) for each, _ in documents]
    made[number] = _encoded(document)
    if sample.kind == "json":
        return made[0]
    if rng.random() < 0.1:
        made.insert(rng.randrange(len(made) + 1), made[number])
    if rng.random() < 0.1:
        rng.shuffle(made)
    return b"".join(line + b"\n" for line in made)


def _encoded(document: Any) -> bytes:
    return bytes(document) if isinstance(document, msgspec.Raw) else msgspec.json.encode(document)


def _place(document: Any, places: list[Path], rng: random.Random) -> Path:
    """Any place, or one that is found by going down: shallow places come up as often as deep."""
    if rng.random() < 0.5:
        return rng.choice(places)
    path: Path = ()
    while isinstance(document, dict | list) and document and rng.random() < 0.85:
        key = rng.choice(list(document) if isinstance(document, dict) else range(len(document)))
        path, document = (*path, key), document[key]
    return path


def _at(document: Any, path: Path) -> Any:
    """What stands there; null where an earlier change took it away."""
    for key in path:
        try:
            document = document[key]
        except (KeyError, IndexError, TypeError):
            return None
    return document


def _with(document: Any, path: Path, change: Callable[[Any, Any], None]) -> Any:
    """A copy, along the path alone, with ``change`` applied to the container and the key."""
    if isinstance(document, dict):
        copy: Any = dict(document)
    elif isinstance(document, list):
        copy = list(document)
    else:
        return document
    try:
        if len(path) == 1:
            change(copy, path[0])
        else:
            copy[path[0]] = _with(copy[path[0]], path[1:], change)
    except (KeyError, IndexError, TypeError):
        return document
    return copy


def _value_changed(document: Any, path: Path, places: list[Path], rng: random.Random) -> Any:
    """The document with one place replaced, removed, renamed, doubled, wrapped or swapped."""
    old = _at(document, path)
    if not path:
        return _strange(old, rng)
    other = rng.choice(places)

    def replace(held: Any, key: Any) -> None:
        held[key] = _strange(old, rng)

    def remove(held: Any, key: Any) -> None:
        del held[key]

    def rename(held: Any, key: Any) -> None:
        if isinstance(held, dict):
            held[_renamed(str(key), rng)] = held.pop(key)
        else:
            held.insert(rng.randrange(len(held) + 1), held.pop(key))

    def double(held: Any, key: Any) -> None:
        if isinstance(held, list):
            held.extend([old] * rng.choice((1, 1, 2, 100)))
            return
        again = msgspec.json.encode(key) + b":" + _encoded(_strange(old, rng))
        whole = msgspec.json.encode(held[key]) if not isinstance(held[key], msgspec.Raw) else b"1"
        held[key] = msgspec.Raw(whole + b"," + again)  # the same key twice

    def copy(held: Any, key: Any) -> None:
        held[key] = _at(document, other)

    change = rng.choices((replace, remove, rename, double, copy), weights=(10, 2, 2, 2, 3))[0]
    return _with(document, path, change)


def _renamed(key: str, rng: random.Random) -> str:
    return rng.choice((key + "x", key[:-1], key.upper(), "", "extra", "é", "x" * 500, "../" + key))


def _strange(old: Any, rng: random.Random) -> Any:
    """A value instead of another: near it, of another kind, or monstrous."""
    draw = rng.random()
    if draw < 0.35 and isinstance(old, int | float) and not isinstance(old, bool):
        near = (old + 1, old - 1, -old, old * 2, old / 2, float(old), str(old), [old], old * 10**6)
        return _finite(rng.choice(near))
    if draw < 0.35 and isinstance(old, str):
        cut = rng.randrange(len(old) + 1)
        near_text = (
            old[:cut],
            old[cut:],
            old + old,
            old[:cut] + "\n" + old[cut:],
            [old],
            {old: old},
        )
        return rng.choice(
            (*near_text, old[:cut] + chr(rng.choice((0, 27, 34, 47, 255, 8232))) + old[cut:])
        )
    if draw < 0.35 and isinstance(old, list) and old:
        return rng.choice(
            (old[::-1], old[1:], old * 2, [old], old[0], sorted(old, key=str), old * 50)
        )
    if draw < 0.4:
        return [old]
    if draw < 0.45:
        return {"a": old}
    if draw < 0.70:
        return msgspec.Raw(rng.choice(NUMBERS))
    if draw < 0.97:
        return msgspec.Raw(rng.choice(VALUES))
    return msgspec.Raw(rng.choice(HEAVY))


def _finite(value: Any) -> Any:
    """What msgspec can write: integers of 64 bits."""
    large = isinstance(value, int) and not -(2**63) <= value < 2**64
    return msgspec.Raw(str(value).encode()) if large else value


def _bytes_changed(data: bytes, kind: Kind, other: bytes, rng: random.Random) -> bytes:
    """The data with one range of its bytes changed, whatever they mean."""
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice((0, 1, 1, 2, 4, 8, 16, 64, 500)))
    match rng.randrange(11):
        case 0:
            return data[:start]
        case 1:
            return data[:start] + data[end:]
        case 2:
            return data[:end] + data[start:end] * rng.choice((1, 1, 2, 30)) + data[end:]
        case 3 if start < len(data):
            flipped = bytes([data[start] ^ 1 << rng.randrange(8)])
            return data[:start] + flipped + data[start + 1 :]
        case 4:
            return data[:start] + rng.randbytes(max(1, end - start)) + data[end:]
        case 5:
            later = rng.randrange(end, len(data) + 1)
            last = min(len(data), later + end - start)
            return data[:start] + data[later:last] + data[end:later] + data[start:end] + data[last:]
        case 6:
            cut = rng.randrange(len(other) + 1)
            return (
                data[:start]
                + other[cut : cut + rng.choice((8, 100, 1000, len(other)))]
                + data[end:]
            )
        case 7 | 8 if kind != "binary" and (number := _NUMBER.search(data, start)):
            return data[: number.start()] + rng.choice(NUMBERS) + data[number.end() :]
        case 9 if rng.random() < 0.15:
            return data[:start] + rng.choice(LONG_TOKENS[kind]) + data[end:]
        case _:
            return data[:start] + rng.choice(TOKENS[kind]) + data[end:]
