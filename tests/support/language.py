"""The words that fxpart does not use, and the prose of documents and source files.

A pattern stands for a term without meaning in the field; the second item is what to write.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from structure import all_nodes_of

# In prose: documents, docstrings, comments, messages.
BANNED: tuple[tuple[str, str], ...] = (
    (r"lanes?", "mesh rank, mesh coordinate"),
    (r"seats?|seating", "device assignment"),
    (r"unlike (?:devices|ranks|kinds|quotas|cpu)", "heterogeneous devices"),
    (r"in turns?|take turns|takes turns", "round-robin order"),
    (r"wish(?:es|ed)?", "constraint, requested"),
    (r"told|hear of|hears|said of", "reported, received, specified"),
    (r"sums? of gradients|gradient sums", "gradient all-reduce, gradient reduction"),
    (r"sums? of shared parameters", "tied-parameter gradient reduction"),
    (r"the numbers of one(?: process)?", "results identical to single-process training"),
    (r"(?<!cuda )streams?", "asynchronous pipeline"),
    (r"drains?|drained|draining", "flush"),
    (r"talks?(?: to)?", "communicate"),
    (r"crowd(?:s|ed|ing)?", "CPU contention, oversubscribed"),
    (r"rehears(?:e|es|ed|al|als|ing)", "trial run"),
    (r"contests?|playoffs?", "benchmark of candidates"),
    (r"held(?!-out)", "resident, stored, owned"),
    (r"weighs both|weighing", "compare, mode selection"),
    (r"mails?", "message, status"),
    (r"spoil(?:s|ed|ing)?", "abort on all ranks"),
    (r"mend(?:s|ed|ing)?", "correct, fix"),
    (r"set(?:s)? right", "correct"),
    (r"gives? back|given back|gave back", "return, release"),
    (r"go on|goes on|going on|went on|gone on", "resume, continue"),
    (r"falls? into|fell into", "divide into"),
    (r"stands? (?:in|on|at|by|for|still|aside|there|where)", "is stored in, is"),
    (r"stand in", "is stored in, is"),
    (r"lies? (?:in|on|by|beside|between|over|together)", "is in, is stored in"),
    (r"once a step", "per step"),
    (r"(?:ms|s|µs|seconds?|minutes?) an? (?:step|action|microbatch|minibatch|update)", "per step"),
    (r"the rest", "name the thing"),
    (r"in words", "explain, print"),
    (r"sets? the pace|sets? its pace", "is the bottleneck"),
    (r"slowest over mean", "balance (max/mean)"),
    (r"what (?:it|they|each|one|a \w+) holds?", "modules, resident tensors"),
    (r"as ever|nobody|somebody|in vain|takes? nothing along", "plain words"),
    (r"colours?|behaviours?|programmes?|licences?|neighbours?|honours?|favours?", "American"),
    (r"(?:mini|opti|norma|recog|initia|loca|rea|orga)(?:mi|li|ni)s(?:e|es|ed|ing|ation)", "-ize"),
)  # fmt: skip
PATTERNS = tuple((re.compile(rf"(?i)(?<![\w-])(?:{p})(?![\w-])"), say) for p, say in BANNED)
_ANY = re.compile(rf"(?i)(?<![\w-])(?:{'|'.join(p for p, _ in BANNED)})(?![\w-])")

# As a part of a module or class name.
BANNED_NAMES = frozenset(
    (
        "again", "contest", "crowd", "crowded", "crowding", "drain", "drained", "held", "lane",
        "lanes", "mail", "mended", "playoff", "rehearsal", "rehearse", "said", "seat", "seating",
        "seats", "spoil", "spoiled", "stream", "streams", "told", "unlike", "wish", "wished",
        "wishes", "word", "words",
    )
)  # fmt: skip


def violations(text: str) -> list[str]:
    """Return each banned term with what to write in its place."""
    if not _ANY.search(text):
        return []
    return [
        f"{found[0]!r}: write {say}"
        for pattern, say in PATTERNS
        for found in pattern.finditer(text)
    ]


# -- documents ------------------------------------------------------------------------------------


def prose(markdown: str) -> str:
    """Return a page without code, comments and addresses of links."""
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", markdown)
    text = re.sub(r"(?s)<!--.*?-->", "", text)
    text = "\n".join(line for line in text.split("\n") if not line.startswith("    "))
    text = re.sub(r"`[^`]*`", "x", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def sentences(markdown: str) -> list[str]:
    """Return the sentences of paragraphs and list items; tables and headings are none."""
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n|\n(?=[*\d])", prose(markdown)):
        lines = [line.strip() for line in paragraph.split("\n")]
        lines = [line for line in lines if line and line[0] not in "|#![<"]
        text = re.sub(r"^(\*|\d+\.) ", "", " ".join(lines))
        found += [part for part in re.split(r"(?<=[.!?:;])[\s*]+", text) if part.strip()]
    return found


def words(text: str) -> list[str]:
    """Return what is separated by spaces and has a letter or digit."""
    return [word for word in text.split() if re.search(r"\w", word)]


# -- source ---------------------------------------------------------------------------------------


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings, comments and messages of a source file with their lines."""
    source = path.read_text(encoding="utf-8")
    for node in all_nodes_of(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if len(node.value.split()) > 1:
                yield node.lineno, re.sub(r"`[^`]*`", "x", node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def names(path: Path) -> Iterator[str]:
    """Yield the module and the classes of a source file."""
    yield path.stem
    for node in all_nodes_of(path):
        if isinstance(node, ast.ClassDef):
            yield node.name


def parts(name: str) -> set[str]:
    """Return the words of a name in snake case or camel case."""
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
