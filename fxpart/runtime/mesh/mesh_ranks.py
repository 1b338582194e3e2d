"""Lanes: the pipelines that share the work of every stage, and the threads that run them here."""

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
Ranks = tuple[tuple[int, ...], ...]  # [stage][lane]


@dataclass(frozen=True)
class MeshRank:
    """One lane of every stage: a pipeline of its own, whose stages share work with the other lanes.

    index: its place in the mesh of a stage. spec: its program, with local shapes. modules: the
    stage modules of this process, by stage.
    """

    index: int
    spec: ProgramSpec
    modules: Mapping[int, nn.Module]


def get_stage_mesh(spec: ProgramSpec) -> Mesh:
    """The mesh of every stage; one lane where the program is not sharded."""
    return Mesh() if spec.sharding is None else Mesh.parse(spec.sharding.mesh)


def build_rank_table(ranks: Sequence[int | Sequence[int]], lanes: int) -> Ranks:
    """The rank of each stage's lanes; a number stands for itself and those that follow it.

    A rank may hold several stages (virtual stages), always of the same lane. Raises FXP109 where a
    stage has too few ranks or a rank runs two lanes.
    """
    table = tuple(
        tuple(range(given, given + lanes)) if isinstance(given, int) else tuple(given)
        for given in ranks
    )
    places = {(rank, lane) for stage in table for lane, rank in enumerate(stage)}
    if any(len(stage) != lanes for stage in table) or len({r for r, _ in places}) != len(places):
        raise error(
            "FXP109",
            where=f"ranks={table}",
            why=f"each stage needs {lanes} of its own, one a lane, and a rank is of one lane",
            fix="ranks[stage][lane]",
        )
    return table


def get_pipeline_ranks(ranks: Ranks, lane: int) -> tuple[int, ...]:
    """The ranks of a lane's stages."""
    return tuple(stage[lane] for stage in ranks)


def encode_common_spec(spec: ProgramSpec) -> str:
    """What is equal in all lanes' programs, as text: all of it but the local shapes."""
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
    """The threads of this process's lanes, one for each; kept, since a new one starts slowly.

    A single lane runs in the caller's own thread.
    """

    def __init__(
        self, lanes: Sequence[int], leave: Callable[[int, BaseException | str], Any]
    ) -> None:
        """leave: called with the lane and the reason when a task ends: no other waits for it."""
        self._lanes = tuple(lanes)
        self._leave = leave
        self._pool = None if len(lanes) == 1 else ThreadPoolExecutor(len(lanes), "lane")

    def together(self, tasks: Mapping[int, Callable[[], T]]) -> dict[int, T]:
        """Run each lane's task at the same time, since they wait for each other; by lane.

        If any raises, the first exception is raised when all have ended.
        """
        assert tuple(tasks) == self._lanes, "one task for each lane"
        if self._pool is None:
            return {lane: task() for lane, task in tasks.items()}
        raised: list[BaseException] = []
        modes = torch.is_grad_enabled(), is_flush_denormal_set()
        running = {
            lane: self._pool.submit(self._run, lane, task, modes, raised)
            for lane, task in tasks.items()
        }
        try:
            wait(running.values())
        except BaseException as cause:  # Ctrl-C: the lanes must not go on without their caller
            for lane in tasks:
                self._leave(lane, cause)
            wait(running.values())
            raise
        if raised:
            raise raised[0]
        return {lane: future.result() for lane, future in running.items()}

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _run(
        self,
        lane: int,
        task: Callable[[], T],
        modes: tuple[bool, bool],
        raised: list[BaseException],
    ) -> T:
        """modes: of the caller's thread: whether gradients are on and denormal numbers flushed."""
        gradients, flushed = modes
        if is_flush_denormal_set() != flushed:
            torch.set_flush_denormal(flushed)
        # A backward runs in its lane's own thread: torch has one thread for each GPU, and a lane
        # that waits in it for another would keep the other out.
        with torch.set_grad_enabled(gradients), torch.autograd.set_multithreading_enabled(False):
            try:
                result = task()
                self._leave(lane, "it has ended")
                return result
            except BaseException as cause:
                raised.append(cause)
                self._leave(lane, cause)
                raise
