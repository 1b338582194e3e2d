"""The wheel and the sdist hold everything, and work where nothing else of the checkout is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("fxpart", "passes", "costmodels")
pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    """The command's output; it must succeed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def installed_files() -> set[str]:
    """What an installation must hold, by its place there: code, documents, device data."""
    found = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".svg", ".toml") or path.name == "py.typed":
                where = path.relative_to(ROOT).as_posix()
                found.add(where if folder == "fxpart" else f"fxpart/{where}")
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist of a copy of the tree, and a wheel made from that sdist."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    dist = tmp_path_factory.mktemp("dist")
    build = "import sys, setuptools.build_meta as b; b.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, dist, cwd=source)
    (sdist,) = dist.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps")
    run(*pip, "--no-build-isolation", "--wheel-dir", dist, sdist, cwd=dist)
    (wheel,) = dist.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def environment(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel; the dependencies are lent by this one."""
    where = tmp_path_factory.mktemp("environment")
    venv.create(where, with_pip=False)
    python = where / "bin" / "python"
    (site,) = where.glob("lib/python*/site-packages")
    # A path from a .pth file is searched, but .pth files in it (our editable install) are not run.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    run(*pip, "--no-index", "--no-deps", "--ignore-installed", built[1], cwd=where)
    return where


def test_wheel_holds_the_tree(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
        extra = [n for n in archive.namelist() if n.endswith("licenses/LICENSE")]
    assert names == installed_files()
    assert extra


def test_sdist_holds_the_tree(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    tree = {
        n.removeprefix("fxpart/") if n.split("/")[1] in FOLDERS else n for n in installed_files()
    }
    assert tree <= names
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE"} <= names


# Modules of fxpart/integrations, and the packages without which they raise FXP601.
TOOLS = {
    "accelerate": ("accelerate",),
    "global_batch_accelerator": ("accelerate",),
    "lightning": ("lightning",),
    "transformers": ("accelerate", "transformers"),
}


def lacks_its_tool(name: str) -> bool:
    """Whether a module of fxpart/integrations is for a tool that is not installed."""
    needed = TOOLS.get(Path(name).stem, ()) if name.startswith("fxpart/integrations/") else ()
    return any(find_spec(package) is None for package in needed)


def test_every_module_imports(environment: Path) -> None:
    names = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in installed_files()
        # Running it is the command line.
        if name.endswith(".py") and not name.endswith("__main__.py") and not lacks_its_tool(name)
    )
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "import fxpart; print(fxpart.__file__, len(fxpart.__path__))"
    )
    out = run(environment / "bin" / "python", "-c", code, cwd=environment).split()
    assert out[0].startswith(str(environment)) and out[1] == "1"


def test_the_command_works(environment: Path) -> None:
    command = environment / "bin" / "fxpart"
    assert "doctor" in run(command, "--help", cwd=environment)
    assert "FXP204" in run(command, "explain", "FXP204", cwd=environment)
    assert "fxpart" in run(
        environment / "bin" / "python", "-m", "fxpart", "--version", cwd=environment
    )


def test_device_data_is_there(environment: Path) -> None:
    code = "import fxpart; print(len(fxpart.Cluster.parse('2x8xh100').devices))"
    assert run(environment / "bin" / "python", "-c", code, cwd=environment).strip() == "16"


def test_a_bare_checkout_works(tmp_path: Path) -> None:
    """Without any installation: the top-level folders are found beside the package."""
    code = "import fxpart.passes, fxpart.costmodels; print(fxpart.passes.__file__)"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    clean["PYTHONPATH"] = str(ROOT)
    # -S: no .pth file is read, so no editable install; the dependencies come by path.
    paths = f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})\n"
    done = subprocess.run(
        [sys.executable, "-S", "-c", paths + code],
        cwd=tmp_path, env=clean, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == str(ROOT / "passes" / "__init__.py"), done.stderr
