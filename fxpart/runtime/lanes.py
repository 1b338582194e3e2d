"""Lanes: the pipelines that share the work of every stage, and the threads that run them here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import torch
from torch import nn

from fxpart.program import ProgramSpec
from fxpart.sharding import Mesh

T = TypeVar("T")


@dataclass(frozen=True)
class Lane:
    """One lane of every stage: a pipeline of its own, whose stages share work with the other lanes.

    index: its place in the mesh of a stage. spec: its program, with local shapes. modules: the
    stage modules of this process, by stage.
    """

    index: int
    spec: ProgramSpec
    modules: Mapping[int, nn.Module]


def mesh_of(spec: ProgramSpec) -> Mesh:
    """The mesh of every stage; one lane where the program is not sharded."""
    return Mesh() if spec.sharding is None else Mesh.parse(spec.sharding.mesh)


def lane_ranks(ranks: Sequence[int], lane: int) -> tuple[int, ...]:
    """The ranks of a lane's stages. ranks: those of the first lane."""
    return tuple(rank + lane for rank in ranks)


def shared_text(spec: ProgramSpec) -> str:
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


def together(
    tasks: Mapping[int, Callable[[], T]], leave: Callable[[int, BaseException | str], Any]
) -> list[T]:
    """Run each lane's task at the same time, since they wait for each other; results in order.

    A single one runs in this thread. leave: called with the lane and the reason when a task has
    ended, so that no other waits for it. If one raises, the first exception is raised when all have
    ended.
    """
    if len(tasks) == 1:
        return [task() for task in tasks.values()]
    results: dict[int, T] = {}
    raised: list[BaseException] = []
    gradients = torch.is_grad_enabled()

    def run(lane: int, task: Callable[[], T]) -> None:
        # A backward runs in its lane's own thread: torch has one thread for each GPU, and a lane
        # that waits in it for another would keep the other out.
        with torch.set_grad_enabled(gradients), torch.autograd.set_multithreading_enabled(False):
            try:
                results[lane] = task()
                leave(lane, "it has ended")
            except BaseException as cause:
                raised.append(cause)
                leave(lane, cause)

    threads = [
        threading.Thread(target=run, args=each, name=f"lane {each[0]}", daemon=True)
        for each in tasks.items()
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as cause:  # Ctrl-C: the lanes must not go on without their caller
        for lane in tasks:
            leave(lane, cause)
        for thread in threads:
            thread.join()
        raise
    if raised:
        raise raised[0]
    return [results[lane] for lane in tasks]
