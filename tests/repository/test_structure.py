"""Who may import whom, who may print, and what nobody may do: read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structure
from structure import ROOT, imports_of, module_of, nodes_of, part_of, sources, text_of, tree_of

# Tables are the only way to a pass or a cost model.
TABLES = ("fxpart.passes", "fxpart.costmodels")

TORCH_FREE = (
    "errors", "files", "units", "cluster", "plan", "costs", "schedule", "solver", "report",
    "sharding", "checkpoint", "diagnostics", "program",
)  # fmt: skip
MODULES_OF_DANGER = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "yaml"}


def test_passes_and_cost_models_are_reached_through_their_tables() -> None:
    entries = {
        f"{table}.{node.module}"
        for table in TABLES
        for node in nodes_of(ROOT / table.removeprefix("fxpart.") / "__init__.py")
        if isinstance(node, ast.ImportFrom) and node.level == 1
    }
    assert entries
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources()
        for name in imports_of(path)
        if name in entries and part_of(name) != part_of(module_of(path))
    ]
    assert not wrong


def test_inside_the_two_folders_siblings_are_imported_relatively() -> None:
    wrong = []
    for path in [*ROOT.glob("passes/**/*.py"), *ROOT.glob("costmodels/**/*.py")]:
        own = module_of(path).split(".")[1]
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                if node.module.startswith(f"fxpart.{own}"):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


def test_no_torch_where_none_is_needed() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources()
        if part_of(module_of(path)) in set(TORCH_FREE)
        for name in imports_of(path)
        # Detection asks torch for GPUs, and only when it is called.
        if name.split(".")[0] == "torch" and path.name != "gpu_detection.py"
    ]
    assert not wrong


def of_ortools(path: Path) -> bool:
    """Whether a file may import OR-Tools: ``ilp.py`` and ``*_ilp.py`` of the solver."""
    return part_of(module_of(path)) == "solver" and path.stem.split("_")[-1] == "ilp"


def test_ortools_stands_in_its_files() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources()
        for name in imports_of(path)
        if name.split(".")[0] == "ortools" and not of_ortools(path)
    ]
    assert not wrong


def test_import_loads_neither_torch_nor_solver() -> None:
    """All of the torch-free modules at once, in a fresh interpreter."""
    free = set(TORCH_FREE)
    names = [module_of(p) for p in sources() if part_of(module_of(p)) in free and not of_ortools(p)]
    code = (
        "import importlib, sys\n"
        f"for name in {['fxpart', 'fxpart.cli', *names]!r}: importlib.import_module(name)\n"
        "print([m for m in ('torch', 'ortools', 'sympy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """Each call of a file with the called expression as text."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            yield node, text_of(node.func)


@pytest.mark.slow
def test_ranks_that_start_load_no_compiler() -> None:
    """Training an exported program needs neither capture nor passes, nor sympy by itself."""
    code = (
        "import sys, fxpart.training.trainer_factory, fxpart.runtime.training_run\n"
        "compiler = ('fxpart.capture', 'fxpart.passes', 'fxpart.compiler', 'sympy', 'ortools')\n"
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
        and part_of(module_of(path)) != "cli"
    ]
    assert not wrong


def test_environment_is_read_in_one_file() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "putenv", "environb")
        and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv", "os.environb")
        and path.name != "environment.py"
    ]
    assert not wrong


def test_nothing_that_runs_what_it_reads() -> None:
    wrong = []
    for path in sources():
        where = path.relative_to(ROOT)
        wrong += [
            f"{where} imports {n}" for n in imports_of(path) if n.split(".")[0] in MODULES_OF_DANGER
        ]
        wrong += [
            f"{where}:{call.lineno} calls {name}"
            for call, name in calls(path)
            if name in ("eval", "exec", "torch.load", "builtins.eval", "builtins.exec")
            # Stage modules that fxpart has just written, or whose digest it has just compared.
            and (str(where), name) != ("fxpart/codegen/stage_loader.py", "exec")
        ]
    assert not wrong


@pytest.mark.parametrize("word", ["utils", "util", "common", "helpers", "helper", "misc"])
def test_no_module_without_a_subject(word: str) -> None:
    assert not [p for p in sources() if word in p.stem.split("_") or p.parent.name == word]


LAWS = (
    "cycles of files", "cycles of packages", "upward imports", "duplicate class names",
    "gerunds and participles", "small files with one importer", "functions over 60 lines",
)  # fmt: skip

# What runs before training starts; program/ is what it shares with the runtime.
COMPILE_TIME = (
    "annotations", "capture", "codegen", "compiler", "costmodels", "passes", "plan", "planner",
    "pricing", "program", "solver",
)  # fmt: skip


@pytest.fixture(scope="module")
def measured() -> structure.Structure:
    """The measurements of `python -m tests.support.structure`."""
    return structure.measure()


@pytest.mark.parametrize("law", LAWS)
def test_law(measured: structure.Structure, law: str) -> None:
    assert not measured.offenders[law]


def test_compile_time_imports_no_runtime() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources()
        if part_of(module_of(path)) in COMPILE_TIME
        for name in imports_of(path)
        if part_of(name) in ("runtime", "training")
    ]
    assert not wrong


def test_few_modules_at_the_root(measured: structure.Structure) -> None:
    assert len(measured.offenders["root modules"]) <= structure.ROOT_MODULES


def documented(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Public names of a file that need a docstring, the file itself included."""
    tree = tree_of(path)
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
