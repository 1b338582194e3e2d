"""Compile a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fxpart.api.program import Program, check_precision, plan_program, settle_microbatches
from fxpart.cluster.model import Cluster
from fxpart.codegen.generated_program import (
    apply_plan,
    fields_of,
)
from fxpart.diagnostics.progress import log_phase
from fxpart.plan.model import Plan
from fxpart.plan.runtime_support import require
from fxpart.planner.constraint_check import check_plan
from fxpart.planner.constraints import (
    check_trainable,
    with_coupling,
    with_numbers,
)
from fxpart.planner.execution_mode import with_mode
from fxpart.planner.plan_agreement import is_multi_rank_job
from fxpart.planner.prepared_model import (
    PlanningArguments,
    prepare_model,
)
from fxpart.runtime.torch_modes import guard_compile
from fxpart.solver.progress import planning_progress

if TYPE_CHECKING:
    from fxpart.costs import CostModel
    from fxpart.plan.staleness_penalty import StalenessPenalty
    from fxpart.solver.progress import Progress


@guard_compile
def compile(
    model: nn.Module,
    cluster: Cluster | str | Path = "auto",
    *,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    batch_size: int | None = None,
    microbatches: int | None = None,
    optimizer: Any = None,
    cost_model: str | Path | CostModel = "auto",
    plan: Plan | str | Path | None = None,
    constraints: Mapping[str, int | float | str | bool] | None = None,
    seed: int = 0,
    batch_dims: Mapping[str, int | None] | None = None,
    precision: str | None = None,
    transfer_dtype: str | None = None,
    mode: str | None = None,
    weights: str | None = None,
    staleness_penalty: str | Path | Mapping[str, Any] | StalenessPenalty | None = None,
    check: str = "auto",
    batch_coupling: str | None = None,
    progress: Callable[[Progress], None] | bool | None = None,
) -> Program:
    """Partition ``model`` over ``cluster`` and return the program to train.

    cluster: a Cluster, a preset ("local:4", "16x8xh100", "auto") or a file. example_inputs (a tuple
    of positional inputs, or a dict) and example_kwargs: one batch, with the targets of ``loss``
    last or under its parameter names; inferred for models that carry examples. loss: a function of
    the output and the targets; by default the output's own loss. batch_size: rows of the global
    batch, by default those of the example. microbatches: a fixed number, by default selected by the
    planner. optimizer: a torch optimizer's class, name, factory or instance, for the memory
    estimate and as the trainer's default. cost_model: a name ("auto"
    or one of ``fxpart.costmodels.COST_MODELS``), an instance, or a file that ``fxpart profile``
    wrote. plan: a Plan or its file to apply instead of solving. constraints:
    fixed decisions; the solver decides all others: ``tp``, ``dp`` (data-parallel ranks of each
    block, or replicas), ``stages``, ``zero``, ``schedule`` ("1f1b,zb-v"), ``ranks`` (of the
    whole program); ``forbid`` ("zero; cut=h.3"), ``stage`` ("h.0-5=0"), ``layout`` (Megatron-LM's
    notation); ``offload``, ``granularity`` ("block", "op"), ``solver``, ``time_limit`` (CPU
    seconds). ``mesh`` ("dp=2,tp=2", or "none" for one rank per stage) fixes the mesh of each stage.
    It allows ``annotations`` (a file or text, in addition to those of :func:`fxpart.annotate`),
    ``zero`` (0 to 3) over ``zero_axis``, and ``placements`` ("solver", or "annotated" to replicate
    what propagation leaves open). seed: of all random ops. batch_dims: the batch dim per input
    name; None for an input that every microbatch gets whole. precision: "bf16" runs model and loss
    under torch.autocast in bfloat16 (parameters and optimizer state keep their dtype); "fp8"
    computes linear products in 8 bits, too, by torchao; by default the plan's, or "fp32", which
    changes nothing. transfer_dtype: "bfloat16" sends float32 values and
    gradients between ranks in bfloat16; by default the plan's, or their own dtype. mode: "sync"
    (default); "async" (1F1B without flushes); "auto", the faster of both by simulation; or "queue",
    in which the first free replica of a stage takes the next microbatch, with the constraint
    ``staleness`` ("2" updates that gradients may miss on all stages, "2,0" by stage; 0 by default).
    weights: the weight mode of an asynchronous or queue plan, a name of
    :mod:`fxpart.schedule.weight_modes`, by default "spectrain", for queues "stash".
    staleness_penalty: a file of ``fxpart emulate --penalty`` or its content; "auto" then compares
    step times multiplied by steps to a target loss. check: "auto" compares the captured program
    with the original module over two steps on a slice of the example (FXP113 if they differ),
    unless the module has no data or the check is expensive; "on" always compares, "off" never; the
    plan records the result. batch_coupling: "per-microbatch" computes what couples the rows of a
    batch (batch statistics, a loss over pairs of rows) for each microbatch; by default such a batch
    is one microbatch. progress: whether a progress bar is shown on stderr, by default on terminals
    and in notebooks; or a function called with each :class:`~fxpart.solver.progress.Progress` of
    the solver. The logger "fxpart" reports seconds by phase (INFO) and details (DEBUG).

    Raises FxpartError: FXP1xx for the model or its inputs, FXP2xx if no plan fits, FXP3xx for the
    plan, FXP4xx for the cluster.
    """
    chosen = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
    with planning_progress(progress) as listener:
        front = prepare_model(
            model,
            cluster,
            chosen,
            (example_inputs, example_kwargs),
            PlanningArguments(
                batch_size, microbatches, optimizer, cost_model,
                with_coupling(
                    with_mode(
                        with_numbers(constraints, precision, transfer_dtype, chosen), mode, weights,
                        chosen, staleness_penalty,
                    ),
                    batch_coupling,
                ),
                seed,
            ),
            {"loss": loss, "batch_dims": batch_dims},
            check,
        )  # fmt: skip
        check_precision(front.request)
        if chosen is not None:
            require(chosen, f"plan for {chosen.model.name}")
            check_plan(chosen, front.request.constraints, front.blocks, "FXP305")
            settle_microbatches(front, chosen.microbatches, chosen)
            if not (
                is_multi_rank_job() and chosen.check is not None and chosen.check.status == "passed"
            ):
                front.compare()
            with log_phase("generate the program", area="codegen"):
                parts = apply_plan(front.captured, front.graph, front.info, chosen)
            return Program(chosen, request=front.request, **fields_of(parts))
        check_trainable(front.request.constraints)
        return plan_program(front, microbatches, listener)


def propose(model: nn.Module, cluster: Cluster | str | Path = "auto", **options: Any) -> Program:
    """Return ``compile(model, cluster, **options)``, for code that only reads its ``plan``."""
    return compile(model, cluster, **options)
