"""Documents, names and, package by package, docstrings and messages use the field's words."""

from __future__ import annotations

from pathlib import Path

import pytest
from language import BANNED_NAMES, names, parts, prose, sentences, texts, violations, words

ROOT = Path(__file__).resolve().parents[2]

# Packages whose docstrings, comments and messages have been rewritten: "fxpart/solver", ...
CHECKED_PACKAGES: tuple[str, ...] = (
    "costmodels", "fxpart/annotations", "fxpart/capture", "fxpart/checkpoint", "fxpart/cli",
    "fxpart/cluster", "fxpart/codegen", "fxpart/collectives", "fxpart/compat",
    "fxpart/compiler", "fxpart/diagnostics", "fxpart/elastic", "fxpart/emulator",
    "fxpart/integrations", "fxpart/interop", "fxpart/launch", "fxpart/plan", "fxpart/planner",
    "fxpart/pricing", "fxpart/profiling", "fxpart/program", "fxpart/report", "fxpart/runtime",
    "fxpart/schedule", "fxpart/sharding", "fxpart/solver", "fxpart/training",
    "fxpart/verification", "passes",
)  # fmt: skip
# Names that are still to be changed, with the consent; nothing is ever added.
PENDING_NAMES: frozenset[str] = frozenset()

DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("fxpart/docs/**/*.md")]
)
# Generated from docstrings, which are checked where they are written.
FROM_DOCSTRINGS = {"fxpart/docs/api.md"}
PAGES = [name for name in DOCUMENTS if name.startswith("fxpart/docs/")]
# All tables of measurements, beside the data that they are written from.
RESULTS = "tests/benchmarks/RESULTS.md"
PAGE_LINES, README_LINES = 150, 250
ALL_WORDS = 26_700
SENTENCE_WORDS = 25  # on average

SOURCES = sorted(
    path for folder in ("fxpart", "passes", "costmodels") for path in ROOT.glob(f"{folder}/**/*.py")
)


def read(name: str) -> str:
    """Return the text of a document."""
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted({*DOCUMENTS, RESULTS} - FROM_DOCSTRINGS))
def test_documents_use_plain_language(name: str) -> None:
    assert not violations(prose(read(name)))


@pytest.mark.parametrize("name", sorted(set(DOCUMENTS) - FROM_DOCSTRINGS))
def test_sentences_are_short(name: str) -> None:
    found = sentences(read(name))
    assert found
    assert sum(len(words(each)) for each in found) / len(found) <= SENTENCE_WORDS


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_short(name: str) -> None:
    assert read(name).count("\n") <= PAGE_LINES


def test_the_readme_is_short() -> None:
    assert read("README.md").count("\n") <= README_LINES


def test_all_documents_together_are_short() -> None:
    assert sum(len(words(read(name))) for name in DOCUMENTS) <= ALL_WORDS


@pytest.mark.parametrize("package", CHECKED_PACKAGES)
def test_docstrings_and_messages_use_plain_language(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{line}: {each}"
        for path in files
        for line, text in texts(path)
        for each in violations(text)
    ]
    assert not found, "\n".join(found)


def test_names_use_plain_language() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in names(path)
        if parts(name) & BANNED_NAMES
    }
    assert found <= PENDING_NAMES, "\n".join(sorted(found - PENDING_NAMES))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("each lane of the mesh", 1),
        ("a CUDA stream overlaps the copy", 0),
        ("the pipeline never drains and the stream goes on", 3),
        ("the held-out data is stored in planes of memory", 0),
        ("the rest is done once a step", 2),
        ("8 rows do not fall into 3", 1),
    ],
)
def test_the_patterns_find_what_they_should(text: str, count: int) -> None:
    assert len(violations(text)) == count


def test_prose_has_no_code() -> None:
    page = "A line with `a lane`.\n\n    lane code\n\n```\nlane\n```\n\n[a page](lane.md)\n"
    assert "lane" not in prose(page) and "a page" in prose(page)


def test_texts_of_a_source_file(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""A docstring here."""\n\n# A comment.\nx = f"message of {1} lane"\n')
    assert [text for _, text in sorted(texts(path))] == [
        "A docstring here.", "# A comment.", "message of ",
    ]  # fmt: skip
