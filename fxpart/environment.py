"""The process environment, as set by torchrun, SLURM and fxpart's own launcher.

Only this module reads environment variables.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fxpart.errors import FxpartError, Problem

_HEAP = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX")
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def get_variables() -> Mapping[str, str]:
    """Return all variables, current at each access; a user's module may read any of them."""
    return os.environ


@dataclass(frozen=True)
class Launch:
    """A process of a job started by torchrun.

    rank, world: its rank, and the number of processes. local_rank, local_world: the same on this
    machine. address, port: where the job's store listens. restarts: how often torchrun has
    restarted the job here. host: group rank of this machine's launcher. supervised: a launcher
    restarts or ends the job if one of its processes fails. keeps_store: the launcher owns the
    store, not rank 0.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    restarts: int = 0
    host: int = 0
    supervised: bool = False
    keeps_store: bool = False

    @property
    def one_machine(self) -> bool:
        """Return whether all processes of the job run on this machine."""
        return self.local_world == self.world


def read_launch() -> Launch | None:
    """Return what torchrun set for this process, or None outside torchrun.

    If only some variables are set, raises FXP602 with every variable that is missing or not a
    number.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    problems = [_make_problem(name, "it is not set") for name in _NEEDED if name not in os.environ]
    numbers: dict[str, int] = {}
    for name, fallback in _NUMBERS:
        text = os.environ.get(name, os.environ.get(fallback, "0"))
        if text.isascii() and text.isdigit():
            numbers[name] = int(text)
        else:
            problems.append(_make_problem(name, f"{text!r} is not a number"))
    if not problems and numbers["RANK"] >= numbers["WORLD_SIZE"]:
        problems.append(
            _make_problem("RANK", f"it is not less than WORLD_SIZE={numbers['WORLD_SIZE']}")
        )
    if problems:
        raise FxpartError(problems)
    return Launch(
        rank=numbers["RANK"],
        world=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        local_world=numbers["LOCAL_WORLD_SIZE"],
        address=os.environ["MASTER_ADDR"],
        port=numbers["MASTER_PORT"],
        restarts=numbers["TORCHELASTIC_RESTART_COUNT"],
        host=numbers["GROUP_RANK"],
        supervised="TORCHELASTIC_RUN_ID" in os.environ,
        keeps_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


# Each number and the variable to use if it is not set, for a job started by hand on one machine.
_NUMBERS = (
    ("RANK", "RANK"),
    ("WORLD_SIZE", "WORLD_SIZE"),
    ("LOCAL_RANK", "RANK"),
    ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    ("MASTER_PORT", "MASTER_PORT"),
    ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"),
    ("GROUP_RANK", "GROUP_RANK"),
)


def _make_problem(name: str, why: str) -> Problem:
    return Problem(
        "FXP602",
        f"environment variable {name}",
        why,
        "start with torchrun --nproc-per-node N script.py, or unset all of its variables",
    )


@dataclass(frozen=True)
class Slurm:
    """The job's description by SLURM, as text; "" for unset variables.

    nodes: such as "node[01-03,7]". node: the name of this node. gpus: of this node. tasks: per
    node, if uniform. cpus: per node, such as "40(x2),20".
    """

    nodes: str
    node: str = ""
    gpus: str = ""
    tasks: str = ""
    cpus: str = ""


# Each field and its variables; the first that is set counts.
_SLURM = {
    "nodes": ("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    "node": ("SLURMD_NODENAME",),
    "gpus": ("SLURM_GPUS_ON_NODE",),
    "tasks": ("SLURM_NTASKS_PER_NODE",),
    "cpus": ("SLURM_JOB_CPUS_PER_NODE",),
}


def read_slurm(variables: Mapping[str, str] | None = None) -> Slurm | None:
    """Return what SLURM set for this process, or None outside SLURM.

    variables: read these instead of the process environment.
    """
    given = os.environ if variables is None else variables
    found = {
        field: next((given[name].strip() for name in names if given.get(name)), "")
        for field, names in _SLURM.items()
    }
    return Slurm(**found) if found["nodes"] else None


def bind_to_loopback() -> None:
    """Let gloo listen only on the loopback interface, unless the user chose an interface.

    gloo reads the variable when the process group is created and has no argument for it.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def is_heap_configured() -> bool:
    """Return whether the user has configured glibc's heap (mallopt(3), "Environment variables")."""
    return any(name in os.environ for name in _HEAP)


_THREADS = "OMP_NUM_THREADS"
_limited: str | None = None  # The number of threads that fxpart set, as opposed to the user.


def limit_threads(processes: int) -> None:
    """Share this machine's cores among ``processes`` children, unless the user set a number.

    Each call replaces the number of the previous call. torch reads OMP_NUM_THREADS when it is
    loaded, so the variable must be set in the environment of the children.
    """
    global _limited
    if os.environ.get(_THREADS) != _limited:
        return
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    _limited = os.environ[_THREADS] = str(max(1, cores // processes))


# Variables of a launcher for its own processes, which must not reach other processes.
_OF_LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def make_rank_environment(
    rank: int, world: int, port: int, threads: int, path: Sequence[str] = ()
) -> dict[str, str]:
    """Return the environment of one of ``world`` processes on this machine, as set by torchrun.

    It is this process's environment without variables of another launcher. port: where the job's
    store listens on 127.0.0.1. threads: of computation. path: folders to import from.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_LAUNCHERS and not name.startswith("TORCHELASTIC_")
    }
    kept.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return {
        **kept,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(path),
    }


def make_independent_rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the environment of one of ``world`` processes that may end independently.

    As :func:`make_rank_environment`, but with this process's number of threads, and without an
    agent that supervises the process. port: where this process serves the job's store on 127.0.0.1.
    """
    own = {name: os.environ[name] for name in (_THREADS, "PYTHONPATH") if name in os.environ}
    found = make_rank_environment(rank, world, port, 1)
    for name in (_THREADS, "MKL_NUM_THREADS", "PYTHONPATH"):
        del found[name]
    keeps = {"TORCHELASTIC_USE_AGENT_STORE": "True", _LAUNCHER: str(os.getpid())}
    return {**found, **own, **keeps}


_LAUNCHER = "FXPART_LAUNCHER"
_HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # Signals that torch's agent handles itself.
_launched = False


def take_launcher_pid() -> int | None:
    """Return the process that started this one as a rank (:mod:`fxpart.launch`), or None.

    The first call removes the variable, so that children of this process do not inherit it.
    """
    global _launched
    text = os.environ.pop(_LAUNCHER, "")
    found = int(text) if text.isascii() and text.isdigit() else None
    _launched = _launched or found is not None
    return found


def is_launched_by_fxpart() -> bool:
    """Return whether fxpart's launcher started this process and therefore handles its exit."""
    return _launched


@contextmanager
def set_launcher_variables(signals: str) -> Iterator[None]:
    """Set the launcher's variables for ranks started in this context.

    signals: names of those that torch's agent handles.
    """
    kept = {name: os.environ.get(name) for name in (_LAUNCHER, _HANDLED)}
    os.environ.update({_LAUNCHER: str(os.getpid()), _HANDLED: signals})
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def hide_launcher_variables() -> Iterator[None]:
    """Hide the launcher's variables, so that this process is not a rank of any job."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _OF_LAUNCHERS or name.startswith("TORCHELASTIC_")
    }
    for name in kept:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(kept)
