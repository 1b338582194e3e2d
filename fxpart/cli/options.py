"""Options that several verbs share, and what they make of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fxpart.cli import output
from fxpart.errors import error
from fxpart.plan.constraint_table import CONSTRAINTS
from fxpart.planner.execution_mode import WEIGHTS
from fxpart.schedule.weight_modes import MODES

if TYPE_CHECKING:
    from fxpart.api import PlanProposal, Program
    from fxpart.capture.workload import Workload
    from fxpart.plan.model import Plan

Command = TypeVar("Command", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Answer as JSON on stdout.")


@dataclass(frozen=True)
class CommandLineRequest:
    """What is to be compiled, from the command line."""

    target: str
    cluster: str
    batch_size: int | None
    microbatches: int | None
    optimizer: str | None
    cost_model: str
    constraint: tuple[str, ...]
    seed: int
    plan: str | Plan | None = None
    mesh: str | None = None
    annotations: str | None = None
    zero: int | None = None
    fix: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    stage: tuple[str, ...] = ()
    layout: str | None = None
    time_limit: float | None = None
    precision: str | None = None
    transfer_dtype: str | None = None
    mode: str | None = None
    weights: str | None = None
    check: str = "auto"
    batch_coupling: str | None = None

    def workload(self) -> Workload:
        """The target, loaded."""
        from fxpart.capture.workload import load_target

        return load_target(self.target)

    @property
    def constraints(self) -> dict[str, int | float | str | bool]:
        """What is fixed, by --constraint and --fix and by the options for single decisions."""
        own: dict[str, int | float | str | None] = {
            "mesh": self.mesh,
            "annotations": self.annotations,
            "zero": self.zero,
            "forbid": ";".join(self.forbid) or None,
            "stage": ";".join(self.stage) or None,
            "layout": self.layout,
            "time_limit": self.time_limit,
        }
        given = {key: value for key, value in own.items() if value is not None}
        return {**(parse_constraints((*self.constraint, *self.fix)) or {}), **given}

    def on_ranks(self, ranks: int, option: str) -> CommandLineRequest:
        """The same for this many ranks; FXP502 where the mesh does not fit."""
        from fxpart.sharding.mesh import Mesh

        text = str(self.constraints.get("mesh", "auto"))
        lanes = 1 if text in ("auto", "none") else Mesh.parse(text).size
        if ranks % lanes:
            raise error(
                "FXP502",
                where=f"{option} {ranks}",
                why=f"each stage has {lanes} ranks",
                fix=f"give a multiple of {lanes}, or another --mesh",
            )
        items = tuple(c for c in self.constraint if not c.startswith(("stages=", "ranks=")))
        cluster = f"local:{ranks}" if self.cluster == "auto" else self.cluster
        if text == "auto":
            return replace(self, cluster=cluster, constraint=(*self.constraint, f"ranks={ranks}"))
        stages = f"stages={ranks // lanes}"
        return replace(self, cluster=cluster, constraint=(*items, stages))

    def arguments(self) -> list[str]:
        """As they are given on the command line, TARGET first; without --plan."""
        found = [self.target]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("target", "plan") or value is None:
                continue
            for item in value if isinstance(value, tuple) else (value,):
                # One argument each: a value may begin with a dash.
                found.append(f"--{field.name.replace('_', '-')}={item}")
        return found

    def on_each_rank(
        self, verb: str, plan: str, options: Mapping[str, object], as_json: bool
    ) -> list[str]:
        """The command line of each rank, which runs the plan in that file on the plan's cluster.

        options: further ones by name, left out where None or False.
        """
        found = [verb, self.target, "--plan", plan]
        check = None if self.check == "auto" else self.check
        given = {**options, "--optimizer": self.optimizer, "--check": check}
        for name, value in given.items():
            if value is True:
                found.append(name)
            elif value is not None and value is not False:
                found += [name, str(value)]
        return [*found, "--json"] if as_json else found

    def propose(self, workload: Workload) -> PlanProposal:
        """The best plan of all that the planner knows, trainable or not."""
        from fxpart.api import propose

        with output.show_solver_progress(f"planning {self.target}") as progress:
            return propose(**self._arguments(workload), progress=progress)

    def _arguments(self, workload: Workload) -> dict[str, Any]:
        return {
            "model": workload.model,
            "cluster": self.cluster,
            "example_inputs": workload.example,
            "example_kwargs": workload.example_kwargs,
            "loss": workload.loss,
            "batch_size": self.batch_size or workload.batch_size,
            "microbatches": self.microbatches,
            "optimizer": self.optimizer or workload.optimizer,
            "cost_model": self.cost_model,
            "constraints": self.constraints,
            "seed": self.seed,
            "precision": self.precision,
            "transfer_dtype": self.transfer_dtype,
            "mode": self.mode,
            "weights": self.weights,
            "check": self.check,
            "batch_coupling": self.batch_coupling,
        }

    def compile(self, workload: Workload, *, quiet: bool = False) -> Program:
        """The workload, compiled as the options say; quiet: without a word meanwhile."""
        from fxpart.api import compile

        doing = f"{'applying the plan to' if self.plan else 'planning'} {self.target}"
        with (
            nullcontext(output.ignore) if quiet else output.show_solver_progress(doing) as progress
        ):
            return compile(**self._arguments(workload), plan=self.plan, progress=progress)


check_option = click.option(
    "--check", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True,
    help="Compare the captured program with the module over two steps.",
)  # fmt: skip
# Help lists the built-in modes, so that it looks for no installed packages.
_BUILTIN = [MODES[name] for name in MODES.builtin]
_STREAM_MODES = [mode.name for mode in _BUILTIN if not mode.flush]
_QUEUE_MODES = [mode.name for mode in _BUILTIN if mode.supports_queues]
_MODES = (
    click.option(
        "--mode", type=click.Choice(CONSTRAINTS["mode"].list_choices()),
        help="async never drains the pipeline; auto is what is faster; in queue whichever copy of "
        "a stage is free takes the next microbatch. By default sync.",
    ),
    click.option(
        "--weights", metavar="NAME",
        help=f"The weight mode of async: {', '.join(_STREAM_MODES)}. "
        f"By default {WEIGHTS}; of queue: {', '.join(_QUEUE_MODES)}.",
    ),
    click.option(
        "--batch-coupling", type=click.Choice(("per-microbatch",)),
        help="Compute batch statistics and losses over pairs of rows for each microbatch; by "
        "default such a batch is one microbatch.",
    ),
)  # fmt: skip


def compile_options(command: Command) -> Command:
    """Add the options that say what is compiled; they arrive as keywords of
    :class:`CommandLineRequest`.
    """
    for option in reversed(
        (
            click.argument("target"),
            click.option(
                "--cluster", "-c", default="auto", show_default=True,
                help="local:4, 16x8xh100, auto, or a cluster file.",
            ),
            click.option("--batch-size", "-b", type=click.IntRange(1), help="Global batch."),
            click.option("--microbatches", "-m", type=click.IntRange(1), help="Fix their number."),
            click.option("--optimizer", help="Its name, such as adamw; decides memory and update."),
            click.option(
                "--cost-model", "--profile", "cost_model", default="auto", show_default=True,
                metavar="NAME|FILE", help="auto, a cost model, or a file of fxpart profile.",
            ),
            click.option(
                "--constraint", multiple=True, metavar="KEY=VALUE",
                help="Such as solver=cp-sat; `fxpart plan --help` lists all. May be repeated.",
            ),
            click.option(
                "--fix", multiple=True, metavar="KEY=VALUE[,VALUE]",
                help="Fix a decision: tp, dp, stages, zero, microbatches, schedule.",
            ),
            click.option(
                "--forbid", multiple=True, metavar="KEY[=VALUE]",
                help="Rule a decision out: tp, zero=2, stages=1, cut=layers.5.",
            ),
            click.option(
                "--stage", multiple=True, metavar="BLOCKS=STAGE",
                help="Put blocks on a stage: layers.0-11=0, lm_head=-1.",
            ),
            click.option("--layout", metavar="TEXT", help="Megatron's notation: Ett|tt|ttL."),
            click.option("--time-limit", type=click.FloatRange(0), help="Seconds of solving."),
            click.option(
                "--mesh", metavar="AXES",
                help="Ranks of each stage, such as dp=2,tp=2; the axis dp cuts the batch.",
            ),
            click.option(
                "--annotations", type=click.Path(),
                help="A TOML or JSON file that says how weights and inputs are sharded.",
            ),
            click.option(
                "--zero", type=click.IntRange(0, 3),
                help="Cut optimizer state (1), gradients too (2), parameters too (3) over dp.",
            ),
            click.option(
                "--precision", metavar="NAME",
                help="bf16 for autocast in bfloat16, fp32 for the model as it is.",
            ),
            click.option(
                "--transfer-dtype", metavar="NAME",
                help="bfloat16 sends float32 between ranks as that.",
            ),
            *_MODES,
            check_option,
            click.option("--seed", type=int, default=0, show_default=True),
        )
    ):  # fmt: skip
        command = option(command)
    return command


_SECONDS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|m|min)?")


def parse_seconds(text: str, option: str) -> float:
    """ "60s", "2m" or "30" as seconds, at most a day. Raises FXP109."""
    found = _SECONDS.fullmatch(text.strip())
    value = float(found[1]) * (60 if found[2] in ("m", "min") else 1) if found else 0.0
    if not 0 < value <= 86400:
        raise error(
            "FXP109",
            where=f"{option} {text}",
            why="it is not a time above 0 and up to a day",
            fix="write it as 60s or 2m",
        )
    return value


def parse_constraints(items: tuple[str, ...]) -> dict[str, int | float | str | bool] | None:
    """``("stages=3", "recompute=true")`` as a dict; None where there are none. Raises FXP109."""
    if not items:
        return None
    found: dict[str, int | float | str | bool] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key:
            fix = "write KEY=VALUE, for example stages=3"
            raise error("FXP109", where=f"--constraint {item}", why="there is no =", fix=fix)
        found[key.strip()] = _scalar(value.strip())
    return found


def _scalar(text: str) -> int | float | str | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
