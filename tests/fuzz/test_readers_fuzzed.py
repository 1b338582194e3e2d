"""Many changed files through every reader: an FxpartError or an object, soon, in bounds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from structure import text_of, tree_of

from fuzz.driving import fuzz
from fuzz.readers import READERS
from fuzz.trusted import TRUSTED

ROOT = Path(__file__).resolve().parents[2]
COUNTS = (250, 5_000)  # the second is left to `make long`
# What reads files, as it is written; `open` counts unless it writes.
OPENING = {
    "open", "os.open", "io.open", "read_bytes", "read_text",
    "open_regular_file", "open_for_reading",
    "sqlite3.connect", "mmap.mmap", "load_file", "safe_open", "np.load", "numpy.load",
    "np.memmap", "np.fromfile", "json.load",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", READERS)
def test_changed_files(name: str, count: int) -> None:
    reader = READERS[name]
    samples = reader.samples()
    for sample in samples:
        reader.read(sample.seal(sample.data) if sample.seal else sample.data)  # good ones are read
    outcome = fuzz(name, reader.read, samples, count)
    refused = outcome.codes.total() - outcome.codes["read"]
    assert outcome.codes["read"] and bool(refused) is not reader.lenient


def opened(path: Path) -> Iterator[str]:
    """``module.function`` of each place of a source file that opens a file to read it."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    module = ".".join(parts[1:] if parts[0] == "fxpart" else parts)
    todo: list[tuple[str, ast.AST]] = [(module, tree_of(path))]
    while todo:
        where, node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            where = f"{where}.{node.name}" if where else node.name
        if isinstance(node, ast.Call) and _opens(node):
            yield where
        todo += [(where, child) for child in ast.iter_child_nodes(node)]


def _opens(call: ast.Call) -> bool:
    name = text_of(call.func)
    owner, _, last = name.rpartition(".")
    ours = owner[:1].isupper() and not owner.startswith("Path(")  # Checkpoint.open is our own
    if name not in OPENING and (last not in OPENING or ours):
        return False
    words = ast.unparse(ast.Tuple([*call.args, *(k.value for k in call.keywords)], ast.Load()))
    writing = ("'w", "'a'", "'ab'", "'x", "O_WRONLY", "O_CREAT", "O_DIRECTORY", "os.devnull")
    return not any(mode in words for mode in writing)


@pytest.mark.slow
def test_every_place_that_reads_a_file_is_known() -> None:
    """A new reader gets a line in READERS, or one in TRUSTED that says who wrote its files."""
    folders = ("fxpart", "passes", "costmodels")
    paths = [path for folder in folders for path in ROOT.glob(f"{folder}/**/*.py")]
    found = {place for path in paths for place in opened(path)}
    fuzzed = {place for reader in READERS.values() for place in reader.opens}
    known = fuzzed | {
        place for place in found for each in TRUSTED if f"{place}.".startswith(f"{each}.")
    }
    assert not found - known, "give them a line in tests/fuzz/readers.py"
    assert not fuzzed - found, "these read no file (any more)"
    assert not [each for each in TRUSTED if not any(f"{p}.".startswith(f"{each}.") for p in found)]
