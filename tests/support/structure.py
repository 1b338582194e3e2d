"""Measure the structure of the package: layers, cycles, names, lengths.

    python -m tests.support.structure            (--list prints every offender)

Prints one row per law of the structure with its number and its limit. Everything is read from the
source by :mod:`ast`; nothing is imported.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("fxpart", "passes", "costmodels")

# From the bottom up: a part imports its own layer and those below.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "errors",
        "files",
        "units",
        "accelerator",
        "rng",
        "environment",
        "registry",
        "_version",
        "compat",
        "optim",
    ),
    ("cluster", "schedule", "sharding", "checkpoint", "diagnostics", "launch"),
    ("plan", "program", "solver", "costs"),
    ("collectives", "compiler", "capture", "annotations"),
    ("passes", "costmodels", "codegen"),
    ("pricing", "runtime", "training"),
    ("planner", "verification", "profiling", "elastic", "interop"),
    ("api", "emulator", "report", "integrations", "cli", "__main__"),
)
ROOT_MODULES = 12
LONGEST_FUNCTION = 60  # lines without the docstring
SMALL_FILE = 60  # lines
# Nouns that end like a gerund or a participle.
NOUNS = frozenset(
    (
        "checkpointing", "deepspeed", "embedding", "embeddings", "feed", "lightning", "lowering",
        "mapping", "pipelining", "pricing", "profiling", "ring", "routing", "seed", "sharding",
        "speed", "stopping", "string", "training",
    )
)  # fmt: skip
PARTICIPLES = frozenset(
    (
        "again", "alike", "built", "chosen", "cut", "dealt", "drawn", "found", "given", "held",
        "here", "kept", "known", "seen", "sent", "taken", "told", "written",
    )
)  # fmt: skip


@dataclass
class Structure:
    """What was measured. offenders: by law, what breaks it; figures: by name, a number."""

    figures: dict[str, float] = field(default_factory=dict)
    offenders: dict[str, list[str]] = field(default_factory=dict)


def sources() -> list[Path]:
    """Return every Python file of the package."""
    return sorted(p for folder in FOLDERS for p in ROOT.glob(f"{folder}/**/*.py"))


def module_of(path: Path) -> str:
    """Return the dotted name: ``passes/rules/view.py`` is ``fxpart.passes.rules.view``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "fxpart" else ("fxpart", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(name: str) -> str:
    """Return the part of a module: ``fxpart.plan.files`` is of ``plan``; ``fxpart`` of ``""``."""
    return (*name.split("."), "")[1]


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def all_nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of a file."""
    return tuple(ast.walk(tree_of(path)))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of a file that run: without those below ``if TYPE_CHECKING:``."""
    waiting: list[ast.AST] = [tree_of(path)]
    found = []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            waiting += node.orelse
            continue
        found.append(node)
        waiting += ast.iter_child_nodes(node)
    return tuple(found)


def text_of(node: ast.expr) -> str:
    """Return an expression as text, as ``ast.unparse``, which takes long for many names."""
    parts: list[str] = []
    owner = node
    while isinstance(owner, ast.Attribute):
        parts.append(owner.attr)
        owner = owner.value
    return (
        ".".join((owner.id, *reversed(parts))) if isinstance(owner, ast.Name) else ast.unparse(node)
    )


def _is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name | ast.Attribute) and "TYPE_CHECKING" in ast.unparse(test)


def _absolute(path: Path, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module that an import names."""
    if not node.level:
        return node.module or ""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    base = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*base, *filter(None, [node.module])])


def imports_of(path: Path) -> Iterator[str]:
    """Yield the absolute names of what a file imports, also inside of functions."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = _absolute(path, node)
            known = _modules()
            for alias in node.names:
                full = f"{name}.{alias.name}"
                yield full if full in known or name == "fxpart" else name


@cache
def _modules() -> Mapping[str, Path]:
    return {module_of(path): path for path in sources()}


@cache
def arrows() -> Mapping[str, frozenset[str]]:
    """Return by module the modules of the package that it imports."""
    known = _modules()
    found = {}
    for name, path in known.items():
        theirs = {n for n in imports_of(path) if n in known and n != name}
        found[name] = frozenset(theirs)
    return found


def layer_of(part: str) -> int:
    """Return the number of a part's layer, from 1 at the bottom; ValueError without a layer."""
    for number, layer in enumerate(LAYERS, 1):
        if part in layer:
            return number
    raise ValueError(f"{part!r} has no layer in tests/support/structure.py")


def upward_imports() -> list[str]:
    """Return the imports that run upwards, and those between pricing and runtime."""
    found = []
    for name, theirs in arrows().items():
        mine = part_of(name)
        for other in sorted(theirs):
            part = part_of(other)
            if not mine or not part or mine == part:
                continue
            apart = {mine, part} == {"pricing", "runtime"}
            if layer_of(part) > layer_of(mine) or apart:
                found.append(f"{name} imports {other}")
    return found


def components(graph: Mapping[str, frozenset[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node (Tarjan, iterative)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found = []
    for root in graph:
        if root in index:
            continue
        work = [(root, iter(sorted(graph[root])))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            for other in rest:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(sorted(graph.get(other, ())))))
                    break
                if other in on_stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.append(member)
                        if member == node:
                            break
                    if len(component) > 1:
                        found.append(sorted(component))
    return found


def part_cycles() -> list[list[str]]:
    """Return the cycles between parts: packages and modules at the root of the package."""
    graph: dict[str, set[str]] = defaultdict(set)
    for name, theirs in arrows().items():
        graph[part_of(name)] |= {part_of(t) for t in theirs}
    graph.pop("", None)
    plain = {p: frozenset(t - {p, ""}) for p, t in graph.items()}
    return components(plain)


def duplicate_classes() -> list[str]:
    """Return names that several top-level classes share."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path.relative_to(ROOT).as_posix())
    return [f"{name}: {', '.join(paths)}" for name, paths in found.items() if len(paths) > 1]


def is_participle(name: str) -> bool:
    """Return whether a module or a class is named by a gerund or a participle.

    name: ``held``, ``stage_timing``, ``Told``. The last word counts: ``SharedMemory`` is a noun.
    """
    words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)
    last = words[-1].lower() if words else ""
    if last in NOUNS:
        return False
    return last in PARTICIPLES or bool(re.fullmatch(r"\w{2,}(ing|ed)", last))


def participles() -> list[str]:
    """Return modules, packages and classes that are named by a gerund or a participle."""
    found = []
    for path in sources():
        where = path.relative_to(ROOT).as_posix()
        name = path.parent.name if path.name == "__init__.py" else path.stem
        if is_participle(name):
            found.append(where)
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and is_participle(node.name):
                found.append(f"{where}: {node.name}")
    return found


def small_files() -> list[str]:
    """Return files of fewer than 60 lines that exactly one other file imports."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name, theirs in arrows().items():
        for other in theirs:
            importers[other].add(name)
    found = []
    for path in sources():
        name = module_of(path)
        lines = len(path.read_text(encoding="utf-8").splitlines())
        # The compat package is one file per private part of torch, whoever needs it.
        if path.name in ("__init__.py", "__main__.py") or part_of(name) == "compat":
            continue
        if lines < SMALL_FILE and len(importers[name]) == 1:
            (only,) = importers[name]
            if _modules()[only].name != "__init__.py":  # an entry of a table
                found.append(f"{path.relative_to(ROOT)} ({lines} lines) is imported by {only} only")
    return found


def long_functions() -> list[str]:
    """Return functions of more than 60 lines, docstrings apart."""
    found = []
    for path in sources():
        for node in all_nodes_of(path):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            lines = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                text = node.body[0]
                lines -= (text.end_lineno or 0) - text.lineno + 1
            if lines > LONGEST_FUNCTION:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines}")
    return found


def root_modules() -> list[str]:
    """Return the modules at the root of the package."""
    return [p.name for p in sorted((ROOT / "fxpart").glob("*.py"))]


def measure() -> Structure:
    """Measure everything."""
    found = Structure()
    files = sources()
    lengths = sorted(len(p.read_text(encoding="utf-8").splitlines()) for p in files)
    found.figures = {
        "files": len(files),
        "lines": sum(lengths),
        "median file length": statistics.median(lengths),
        "90th percentile of file length": lengths[int(0.9 * len(lengths))],
        "longest file": lengths[-1],
    }
    found.offenders = {
        "root modules": root_modules(),
        "cycles of files": [" ".join(c) for c in components(arrows())],
        "cycles of packages": [" ".join(c) for c in part_cycles()],
        "upward imports": upward_imports(),
        "duplicate class names": duplicate_classes(),
        "gerunds and participles": participles(),
        "small files with one importer": small_files(),
        "functions over 60 lines": long_functions(),
    }
    return found


LIMITS = {"root modules": ROOT_MODULES}


def main() -> int:
    """Print the table; the exit code is 1 if a law is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print every offender")
    options = parser.parse_args()
    found = measure()
    for name, figure in found.figures.items():
        print(f"{name:34} {figure:8g}")
    broken = False
    for law, offenders in found.offenders.items():
        limit = LIMITS.get(law, 0)
        broken |= len(offenders) > limit
        print(f"{law:34} {len(offenders):8d}   (at most {limit})")
        if options.list and len(offenders) > limit:
            print(*(f"    {each}" for each in offenders), sep="\n")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
