"""Mesh ranks: the pipelines that share every stage's work, and their threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import torch
from torch import nn

from fxpart.errors import error
from fxpart.program.spec import ProgramSpec
from fxpart.runtime.torch_modes import is_flush_denormal_set
from fxpart.sharding import Mesh

T = TypeVar("T")
Ranks = tuple[tuple[int, ...], ...]  # [stage][mesh rank]


@dataclass(frozen=True)
class MeshRank:
    """One mesh rank of every stage: a pipeline that shares each stage's work with the others.

    index: its rank in the mesh of a stage. spec: its program, with local shapes. modules: the stage
    modules of this process, by stage.
    """

    index: int
    spec: ProgramSpec
    modules: Mapping[int, nn.Module]

    def list_written(self, stage: int) -> list[torch.Tensor]:
        """Return the state of this process's stage that forward passes write."""
        state = self.spec.stages[stage].state
        return [getattr(self.modules[stage], each.attribute) for each in state if each.written]


def get_stage_mesh(spec: ProgramSpec) -> Mesh:
    """Return the mesh of every stage; of size one if the program is not sharded."""
    return Mesh() if spec.sharding is None else Mesh.parse(spec.sharding.mesh)


def build_rank_table(
    ranks: Sequence[int | Sequence[int]], mesh_ranks: int, stage_ranks: Sequence[int] = ()
) -> Ranks:
    """Return the rank of each stage's mesh ranks; an int denotes consecutive ranks from it.

    A rank may run several stages (virtual stages), always of the same mesh rank. A stage on a
    smaller mesh has fewer ranks, each of which represents consecutive mesh ranks with equal values:
    it runs the first of them. stage_ranks: number of ranks of each stage; 0, and by default: as
    many as mesh ranks. Raises FXP109 if a stage has too few ranks or a rank runs two mesh ranks.
    """
    rows = tuple(
        tuple(range(given, given + mesh_ranks)) if isinstance(given, int) else tuple(given)
        for given in ranks
    )
    table = tuple(_represent(row, mesh_ranks) for row in rows)
    places = {
        (rank, mesh_rank)
        for stage, row in enumerate(table)
        for mesh_rank, rank in enumerate(row)
        if has_mesh_rank(table, stage, mesh_rank)
    }
    counts = [count or mesh_ranks for count in stage_ranks or [0] * len(rows)]
    wrong = len(counts) != len(rows) or any(
        len(set(row)) != count or len(whole) != mesh_ranks or len(row) not in (count, mesh_ranks)
        for row, whole, count in zip(rows, table, counts, strict=False)
    )
    if wrong or len({r for r, _ in places}) != len(places):
        raise error(
            "FXP109",
            where=f"ranks={rows}",
            why=f"each stage needs {mesh_ranks} ranks, and a rank can have only one mesh rank",
            fix="pass ranks[stage][mesh_rank]",
        )
    return table


def _represent(row: Sequence[int], mesh_ranks: int) -> tuple[int, ...]:
    """Return a rank for each mesh rank: each of the row's ranks for consecutive ones."""
    distinct = tuple(dict.fromkeys(row))
    each = mesh_ranks // len(distinct) if distinct else 0
    return tuple(rank for rank in distinct for _ in range(each))


def has_mesh_rank(ranks: Ranks, stage: int, mesh_rank: int) -> bool:
    """Return whether a rank runs this mesh rank of a stage; otherwise another one represents it."""
    return ranks[stage].index(ranks[stage][mesh_rank]) == mesh_rank


def find_receivers(ranks: Ranks, source: int, target: int, mesh_rank: int) -> tuple[int, ...]:
    """Return the ranks of stage ``target`` to which a mesh rank of stage ``source`` sends.

    Each rank receives a value once: from its own mesh rank, or from the rank that represents it.
    """
    sender = ranks[source][mesh_rank]
    return tuple(
        rank
        for at, rank in enumerate(ranks[target])
        if ranks[source][at] == sender and has_mesh_rank(ranks, target, at)
    )


def get_pipeline_ranks(ranks: Ranks, mesh_rank: int) -> tuple[int, ...]:
    """Return the ranks of a mesh rank's stages."""
    return tuple(stage[mesh_rank] for stage in ranks)


def encode_common_spec(spec: ProgramSpec) -> str:
    """Return as text the parts of a program that all mesh ranks share: all but local shapes."""
    if spec.sharding is None:
        return msgspec.json.encode(spec).decode()
    whole = msgspec.structs.replace(spec, inputs=spec.sharding.inputs, stages=())
    stages = [
        (
            stage.index,
            [(value.name, value.dtype, value.requires_grad) for value in stage.inputs],
            stage.sources,
            [(value.name, value.dtype, value.requires_grad) for value in stage.outputs],
            stage.targets,
            [msgspec.structs.replace(state, shape=()) for state in stage.state],
        )
        for stage in spec.stages
    ]
    return msgspec.json.encode([whole, stages]).decode()


class MeshRankThreads:
    """The threads of this process's mesh ranks, reused because starting a thread is slow.

    A single mesh rank runs in the caller's thread.
    """

    def __init__(
        self, mesh_ranks: Sequence[int], leave: Callable[[int, BaseException | str], Any]
    ) -> None:
        """leave: called with the mesh rank and the reason when a task ends, to release waiters."""
        self._mesh_ranks = tuple(mesh_ranks)
        self._leave = leave
        self._pool = (
            None if len(mesh_ranks) == 1 else ThreadPoolExecutor(len(mesh_ranks), "mesh-rank")
        )

    def run_all(self, tasks: Mapping[int, Callable[[], T]]) -> dict[int, T]:
        """Run the tasks of all mesh ranks concurrently, since they wait for each other.

        If any raises, the first exception is raised after all have ended.
        """
        assert tuple(tasks) == self._mesh_ranks, "there must be one task per mesh rank"
        if self._pool is None:
            return {mesh_rank: task() for mesh_rank, task in tasks.items()}
        raised: list[BaseException] = []
        modes = torch.is_grad_enabled(), is_flush_denormal_set()
        running = {
            mesh_rank: self._pool.submit(self._run, mesh_rank, task, modes, raised)
            for mesh_rank, task in tasks.items()
        }
        try:
            wait(running.values())
        except BaseException as cause:  # Ctrl-C: stop the mesh ranks, too.
            for mesh_rank in tasks:
                self._leave(mesh_rank, cause)
            wait(running.values())
            raise
        if raised:
            raise raised[0]
        return {mesh_rank: future.result() for mesh_rank, future in running.items()}

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _run(
        self,
        mesh_rank: int,
        task: Callable[[], T],
        modes: tuple[bool, bool],
        raised: list[BaseException],
    ) -> T:
        """Run a task. modes: the caller's grad mode and denormal flushing."""
        gradients, flushed = modes
        if is_flush_denormal_set() != flushed:
            torch.set_flush_denormal(flushed)
        # Run backwards in this thread: torch has one backward thread per GPU, and a mesh rank that
        # waits in it would block the others.
        with torch.set_grad_enabled(gradients), torch.autograd.set_multithreading_enabled(False):
            try:
                result = task()
                self._leave(mesh_rank, "it has ended")
                return result
            except BaseException as cause:
                raised.append(cause)
                self._leave(mesh_rank, cause)
                raise


def get_devices(
    mesh_ranks: Sequence[MeshRank], ranks: Ranks, local: Sequence[int]
) -> dict[int, torch.device]:
    """Return the device of each local rank's state; the CPU for a rank without state."""
    found = dict.fromkeys(local, torch.device("cpu"))
    for mesh_rank in mesh_ranks:
        for stage, module in mesh_rank.modules.items():
            for tensor in [*module.parameters(), *module.buffers()]:
                found[ranks[stage][mesh_rank.index]] = tensor.device
                break
    return found
