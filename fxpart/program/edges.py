"""Values that cross stage boundaries of a program, in an order that is equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxpart.errors import error
from fxpart.plan.precision import wire_dtype
from fxpart.program.spec import Dim, ProgramSpec, StageSpec, ValueSpec
from fxpart.schedule.action import StageEdge, list_group_stages


@dataclass(frozen=True)
class ValueEdge:
    """One value sent from one stage to another.

    output: index among the source's outputs. input: index among the target's inputs. gradient:
    whether the value's gradient is sent back. sent: dtype of value and gradient in transfers.

    back: the stage that receives the gradient. This is the source, or, if several stages use the
    value, the previous user, which adds its own gradient and sends the sum on. So gradients are
    added in the order of single-process autograd (later uses first), and sums are bit-equal.
    """

    name: str
    source: int
    target: int
    output: int
    input: int
    dtype: str
    shape: tuple[Dim, ...]
    gradient: bool
    sent: str
    back: int = -1


def find_value_edges(spec: ProgramSpec) -> tuple[ValueEdge, ...]:
    """Return all edges by source, target and output; FXP900 if two stages disagree."""
    found: list[ValueEdge] = []
    copies = {group[0]: list_group_stages(group) for group in spec.replicas}
    for stage in spec.stages:
        for position, (value, source) in enumerate(zip(stage.inputs, stage.sources, strict=True)):
            for copy in copies.get(source, (source,)) if source >= 0 else ():
                found.append(_link(spec, stage, position, value, copy))
    found.sort(key=lambda link: (link.source, link.target, link.output))
    # Replicas take different microbatches, so they cannot add each other's gradients.
    return (
        tuple(replace(f, back=f.source) for f in found)
        if spec.replicas
        else _set_gradient_targets(found)
    )


def _set_gradient_targets(found: list[ValueEdge]) -> tuple[ValueEdge, ...]:
    """Set ``back`` to the previous user, if it receives gradients from the target anyway."""
    pairs = {(link.source, link.target) for link in found if link.gradient}
    users: dict[tuple[int, int], list[int]] = {}
    for link in found:
        if link.gradient:
            users.setdefault((link.source, link.output), []).append(link.target)

    def back(link: ValueEdge) -> int:
        before = [u for u in users.get((link.source, link.output), ()) if u < link.target]
        last = max(before, default=link.source)
        return last if (last, link.target) in pairs else link.source

    return tuple(replace(link, back=back(link)) for link in found)


def is_gradient_order_exact(spec: ProgramSpec) -> bool:
    """Return whether all gradients are summed in the order of single-process training."""
    if spec.replicas:
        return False
    found = [link for link in find_value_edges(spec) if link.gradient]
    direct: dict[tuple[int, int], int] = {}
    for link in found:
        if link.back == link.source:
            key = (link.source, link.output)
            direct[key] = direct.get(key, 0) + 1
    return all(count == 1 for count in direct.values())


def find_stage_edges(spec: ProgramSpec) -> tuple[StageEdge, ...]:
    """Return the stage graph: one edge per pair of stages with a value edge between them."""
    backward: dict[tuple[int, int], bool] = {}
    for link in find_value_edges(spec):
        pair = (link.source, link.target)
        backward[pair] = backward.get(pair, False) or link.gradient
    return tuple(StageEdge(*pair, backward=back) for pair, back in sorted(backward.items()))


def _link(
    spec: ProgramSpec, stage: StageSpec, position: int, value: ValueSpec, source: int
) -> ValueEdge:
    names = [output.name for output in spec.stages[source].outputs]
    if source >= stage.index or value.name not in names:
        raise error(
            "FXP900",
            where=f"stage {stage.index}, input {value.name}",
            why=f"stage {source} does not produce it in an earlier stage",
            fix="",
        )
    output = names.index(value.name)
    made = spec.stages[source].outputs[output]
    if (made.dtype, made.shape) != (value.dtype, value.shape):
        raise error(
            "FXP900",
            where=f"value {value.name} from stage {source} to stage {stage.index}",
            why=f"the source has {made.dtype} {made.shape}, the target {value.dtype} {value.shape}",
            fix="",
        )
    sent = wire_dtype(value.dtype, spec.transfer_dtype)
    return ValueEdge(
        value.name, source, stage.index, output, position,
        value.dtype, value.shape, value.requires_grad and made.requires_grad,
        sent,
    )  # fmt: skip
