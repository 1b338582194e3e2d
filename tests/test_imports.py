"""Who may import whom, who may print, and what nobody may do: read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the top down: a part may import those below its own line.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("elastic",),
    ("emulate",),
    ("report", "api"),
    ("measuring",),
    ("weighing",),
    ("queueing",),
    ("deciding",),
    ("mixing",),
    ("verify", "running", "interop", "front", "exact", "choosing", "whatif"),
    ("streaming", "evaluating"),
    ("reranking", "arranging"),
    ("folding", "parts"),
    ("sharded", "verification"),
    ("rounding",),
    ("double",),
    ("planning", "price", "seating"),
    ("planning_joint",),
    ("requests",),
    ("constraints",),
    ("modes",),
    ("capture", "codegen", "runtime", "pricing", "reference", "target"),
    ("temporaries",),
    ("passes", "costmodels", "optimizers"),
    ("annotations",),
    ("pipeline", "plan", "program", "costs", "profile"),
    ("collectives",),
    ("launching",),
    ("compat", "rng", "solver"),
    ("schedule",),
    ("sharding",),
    ("cluster",),
    ("checkpoint", "events"),
    ("rundir",),
    ("environment",),
    ("bounded",),
    ("errors", "_version"),
)
# Beside that: the manager reads the table of passes, and these build on the captured graph.
ALSO = {
    ("pipeline", "passes"), ("codegen", "capture"), ("reference", "capture"),
    # how numbers are written in words
    ("planning_joint", "report"), ("mixing", "report"), ("queueing", "report"),
}  # fmt: skip
# A part and the package that holds its reading, writing and checking.
SAME = {
    "cluster_io": "cluster", "plan_io": "plan", "prediction": "plan", "planned": "planning_joint",
}  # fmt: skip
# A training job needs a program and actions, not a compiler.
RUNTIME = {
    "bounded",
    "environment",
    "errors",
    "program",
    "rng",
    "schedule",
    "optimizers",
    "plan",
    "cluster",
    "compat",
    "sharding",
    "collectives",
    "checkpoint",
    "events",
    "rundir",
    "launching",  # how a rank dies with its launcher, and what Linux says of a process
}
# Tables are the only way to a pass or a cost model.
TABLES = ("fxpart.passes", "fxpart.costmodels")

TORCH_FREE = (
    "errors", "cluster", "cluster_io", "plan", "plan_io", "program", "costs", "schedule", "solver",
    "report", "sharding", "planning_joint", "profile", "checkpoint", "events", "rundir",
    "bounded",
)  # fmt: skip
MODULES_OF_DANGER = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "yaml"}
LONGEST_FUNCTION = 60


def sources() -> list[Path]:
    """Every Python file of the package."""
    return sorted(
        p for folder in ("fxpart", "passes", "costmodels") for p in ROOT.glob(f"{folder}/**/*.py")
    )


def module(path: Path) -> str:
    """``passes/rules/view.py`` -> ``fxpart.passes.rules.view``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "fxpart" else ("fxpart", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part(name: str) -> str:
    """``fxpart.plan_io.files`` -> ``plan``; ``fxpart`` itself is ``""``."""
    first = (*name.split("."), "")[1]
    return SAME.get(first, first)


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The nodes of a file that run, without ``if TYPE_CHECKING:``."""
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    found = []
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        found.append(node)
        todo += ast.iter_child_nodes(node)
    return tuple(found)


def imports(path: Path) -> Iterator[str]:
    """Absolute names of what a file imports, lazily or not; relative ones resolved."""
    package = module(path) if path.name == "__init__.py" else module(path).rpartition(".")[0]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            name = ".".join([*base, *filter(None, [node.module])]) if node.level else node.module
            assert name is not None
            yield from ([f"fxpart.{a.name}" for a in node.names] if name == "fxpart" else [name])


def level(name: str) -> int:
    """The line of LAYERS that a part stands on."""
    found = [i for i, layer in enumerate(LAYERS) if name in layer]
    assert found, f"{name} has no place in LAYERS: give it one"
    return found[0]


@pytest.mark.slow
def test_parts_import_downwards_only() -> None:
    wrong = []
    for path in sources():
        mine = part(module(path))
        for name in imports(path):
            theirs = part(name)
            if name.split(".")[0] != "fxpart" or not mine or not theirs or theirs == mine:
                continue
            if level(theirs) <= level(mine) and (mine, theirs) not in ALSO:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


@pytest.mark.slow
def test_runtime_needs_no_compiler() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources()
        if part(module(path)) == "runtime"
        for name in imports(path)
        if name.startswith("fxpart.") and part(name) not in RUNTIME | {"runtime"}
    ]
    assert not wrong


@pytest.mark.slow
def test_passes_and_cost_models_are_reached_through_their_tables() -> None:
    entries = {
        f"{table}.{node.module}"
        for table in TABLES
        for node in nodes(ROOT / table.removeprefix("fxpart.") / "__init__.py")
        if isinstance(node, ast.ImportFrom) and node.level == 1
    }
    assert entries
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources()
        for name in imports(path)
        if name in entries and part(name) != part(module(path))
    ]
    assert not wrong


def test_inside_the_two_folders_siblings_are_imported_relatively() -> None:
    wrong = []
    for path in [*ROOT.glob("passes/**/*.py"), *ROOT.glob("costmodels/**/*.py")]:
        own = module(path).split(".")[1]
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                if node.module.startswith(f"fxpart.{own}"):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


def test_no_torch_where_none_is_needed() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources()
        if part(module(path)) in {part(f"fxpart.{p}") for p in TORCH_FREE}
        for name in imports(path)
        # Detection asks torch for GPUs, and only when it is called.
        if name.split(".")[0] == "torch" and path.name != "detect.py"
    ]
    assert not wrong


def of_ortools(path: Path) -> bool:
    """Whether a file may import OR-Tools: ``ilp.py`` and ``*_ilp.py`` of the solver."""
    return part(module(path)) == "solver" and path.stem.split("_")[-1] == "ilp"


def test_ortools_stands_in_its_files() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources()
        for name in imports(path)
        if name.split(".")[0] == "ortools" and not of_ortools(path)
    ]
    assert not wrong


def test_import_loads_neither_torch_nor_solver() -> None:
    """All of the torch-free modules at once, in a fresh interpreter."""
    free = {part(f"fxpart.{p}") for p in TORCH_FREE}
    names = [module(p) for p in sources() if part(module(p)) in free and not of_ortools(p)]
    code = (
        "import importlib, sys\n"
        f"for name in {['fxpart', 'fxpart.cli', *names]!r}: importlib.import_module(name)\n"
        "print([m for m in ('torch', 'ortools', 'sympy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """Each call of a file with the called expression as text."""
    for node in nodes(path):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


@pytest.mark.slow
def test_ranks_that_start_load_no_compiler() -> None:
    """Training an exported program needs neither capture nor passes, nor sympy by itself."""
    code = (
        "import sys, fxpart.running, fxpart.runtime.run\n"
        "compiler = ('fxpart.capture', 'fxpart.passes', 'fxpart.pipeline', 'sympy', 'ortools')\n"
        "print([m for m in (*compiler, 'torch.distributed.tensor') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_only_the_command_line_prints() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sources()
        for call, name in calls(path)
        if name in ("print", "sys.stdout.write", "sys.stderr.write", "builtins.print")
        and part(module(path)) != "cli"
    ]
    assert not wrong


def test_environment_is_read_in_one_file() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv", "os.environb")
        and path.name != "environment.py"
    ]
    assert not wrong


def test_nothing_that_runs_what_it_reads() -> None:
    wrong = []
    for path in sources():
        where = path.relative_to(ROOT)
        wrong += [
            f"{where} imports {n}" for n in imports(path) if n.split(".")[0] in MODULES_OF_DANGER
        ]
        wrong += [
            f"{where}:{call.lineno} calls {name}"
            for call, name in calls(path)
            if name in ("eval", "exec", "torch.load", "builtins.eval", "builtins.exec")
            # Stage modules that fxpart has just written, or whose digest it has just compared.
            and (str(where), name) != ("fxpart/codegen/load.py", "exec")
        ]
    assert not wrong


@pytest.mark.parametrize("word", ["utils", "util", "common", "helpers", "helper", "misc"])
def test_no_module_without_a_subject(word: str) -> None:
    assert not [p for p in sources() if word in p.stem.split("_") or p.parent.name == word]


def test_functions_are_short() -> None:
    long = []
    for path in sources():
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                if ast.get_docstring(node) is not None:
                    text = node.body[0]
                    assert text.end_lineno is not None
                    lines -= text.end_lineno - text.lineno + 1
                if lines > LONGEST_FUNCTION:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines}")
    assert not long


def documented(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Public names of a file that need a docstring, the file itself included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield "module", tree
    todo: list[tuple[str, ast.AST]] = [("", tree)]
    while todo:
        prefix, parent = todo.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                if not node.name.startswith("_"):
                    yield f"{prefix}{node.name}", node
                    if isinstance(node, ast.ClassDef):
                        todo.append((f"{prefix}{node.name}.", node))


@pytest.mark.slow
def test_every_public_name_is_described() -> None:
    wrong = []
    for path in sources():
        for name, node in documented(path):
            assert isinstance(
                node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            )
            decorated = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
            if any(d.endswith((".setter", "overload")) for d in decorated):
                continue
            text = (ast.get_docstring(node) or "").strip()
            # The first sentence may go on over lines, but a paragraph ends like one.
            first = text.split("\n\n")[0].rstrip()
            if not text or first[-1] not in ".?!:)`":
                wrong.append(f"{path.relative_to(ROOT)}: {name}: {first[-40:]!r}")
    assert not wrong


@pytest.mark.slow
def test_public_names() -> None:
    code = (
        "import fxpart, sys\n"
        "assert len(fxpart.__all__) <= 20 and fxpart.__all__ == dir(fxpart)\n"
        "assert fxpart.__version__ and 'torch' not in sys.modules\n"
        "for name in fxpart.__all__: assert getattr(fxpart, name) is not None, name\n"
        "try: fxpart.nothing\n"
        "except AttributeError as e: print('ok', e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("ok"), done.stderr
