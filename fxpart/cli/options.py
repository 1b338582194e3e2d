"""Options shared by several verbs, and the request that they form."""

from __future__ import annotations

import re
import warnings
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
    from fxpart.api import Program
    from fxpart.capture.workload import Workload
    from fxpart.checkpoint.signature import SigningKey
    from fxpart.plan.model import Plan

Command = TypeVar("Command", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout.")


def sign_option(meaning: str) -> Callable[[Command], Command]:
    """Return the option --sign. meaning: what the key does."""
    return click.option("--sign", type=click.Path(), metavar="KEYFILE", help=meaning)


def load_key(path: str | None) -> SigningKey | None:
    """Return the key in a file, and print a warning if others can read it. FXP109."""
    from fxpart.checkpoint.signature import SigningKey

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: output.note(f"warning: {message}")
        return SigningKey.load(path)


@dataclass(frozen=True)
class CommandLineRequest:
    """A compilation request from the command line."""

    target: str
    cluster: str
    batch_size: int | None
    microbatches: int | None
    optimizer: str | None
    cost_model: str
    constraint: tuple[str, ...]
    seed: int | None
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
    staleness_penalty: str | None = None
    check: str = "auto"
    batch_coupling: str | None = None

    def workload(self) -> Workload:
        """Load the target."""
        from fxpart.capture.workload import load_target

        return load_target(self.target)

    @property
    def constraints(self) -> dict[str, int | float | str | bool]:
        """The constraints from --constraint, --fix and the options of single decisions."""
        own: dict[str, int | float | str | None] = {
            "mesh": self.mesh,
            "annotations": self.annotations,
            "zero": self.zero,
            "forbid": ";".join(self.forbid) or None,
            "stage": ";".join(self.stage) or None,
            "layout": self.layout,
            "time_limit": self.time_limit,
            "staleness_penalty": self.staleness_penalty,
        }
        given = {key: value for key, value in own.items() if value is not None}
        return {**(parse_constraints((*self.constraint, *self.fix)) or {}), **given}

    def on_ranks(self, ranks: int, option: str) -> CommandLineRequest:
        """Return the request for a number of ranks; FXP502 if the mesh does not divide it."""
        from fxpart.sharding.mesh import Mesh

        text = str(self.constraints.get("mesh", "auto"))
        mesh_ranks = 1 if text in ("auto", "none") else Mesh.parse(text).size
        if ranks % mesh_ranks:
            raise error(
                "FXP502",
                where=f"{option} {ranks}",
                why=f"each stage has {mesh_ranks} ranks",
                fix=f"use a multiple of {mesh_ranks} ranks, or another --mesh",
            )
        items = tuple(c for c in self.constraint if not c.startswith(("stages=", "ranks=")))
        cluster = f"local:{ranks}" if self.cluster == "auto" else self.cluster
        if text == "auto":
            return replace(self, cluster=cluster, constraint=(*self.constraint, f"ranks={ranks}"))
        stages = f"stages={ranks // mesh_ranks}"
        return replace(self, cluster=cluster, constraint=(*items, stages))

    def arguments(self) -> list[str]:
        """Return the command-line arguments, TARGET first, without --plan."""
        found = [self.target]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("target", "plan") or value is None:
                continue
            for item in value if isinstance(value, tuple) else (value,):
                # One argument each, as a value may begin with a dash.
                found.append(f"--{field.name.replace('_', '-')}={item}")
        return found

    def on_each_rank(
        self, verb: str, plan: str, options: Mapping[str, object], as_json: bool
    ) -> list[str]:
        """Return the command line of each rank, which runs the plan file on the plan's cluster.

        options: further options by name, omitted if None or False.
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
            "seed": self.seed or 0,
            "precision": self.precision,
            "transfer_dtype": self.transfer_dtype,
            "mode": self.mode,
            "weights": self.weights,
            "check": self.check,
            "batch_coupling": self.batch_coupling,
        }

    def compile(self, workload: Workload, *, quiet: bool = False) -> Program:
        """Compile the workload as requested. quiet: without progress messages."""
        from fxpart.api import compile

        doing = f"{'applying the plan to' if self.plan else 'planning'} {self.target}"
        with (
            nullcontext(output.ignore) if quiet else output.show_solver_progress(doing) as progress
        ):
            return compile(**self._arguments(workload), plan=self.plan, progress=progress)


class CountsType(click.ParamType[tuple[int, ...]]):
    """Distinct positive numbers, separated by commas."""

    name = "N[,N]"

    def __init__(self, most: int | None = None) -> None:
        self._most = most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the numbers; a usage error for anything else."""
        if isinstance(value, tuple):
            return value
        kind = click.IntRange(1, self._most)
        return tuple(dict.fromkeys(kind.convert(word, param, ctx) for word in value.split(",")))


check_option = click.option(
    "--check", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True,
    help="Compare the captured program with the module over two steps.",
)  # fmt: skip
# Help lists only built-in modes, to not search installed packages.
_BUILTIN = [MODES[name] for name in MODES.builtin]
_ASYNC_MODES = [mode.name for mode in _BUILTIN if not mode.flush]
_QUEUE_MODES = [mode.name for mode in _BUILTIN if mode.supports_queues]
_MODES = (
    click.option(
        "--mode", type=click.Choice(CONSTRAINTS["mode"].list_choices()),
        help="sync (default); async: without pipeline flushes; auto: the faster of both; queue: "
        "the first free replica of a stage takes the next microbatch.",
    ),
    click.option(
        "--weights", metavar="NAME",
        help=f"Weight mode of async: {', '.join(_ASYNC_MODES)}, by default {WEIGHTS}; of queue: "
        f"{', '.join(_QUEUE_MODES)}.",
    ),
    click.option(
        "--staleness-penalty", type=click.Path(),
        help="File of `fxpart emulate --penalty`: auto compares the time to its target loss.",
    ),
    click.option(
        "--batch-coupling", type=click.Choice(("per-microbatch",)),
        help="Compute batch statistics and losses over pairs of rows per microbatch; by default, "
        "such a batch is a single microbatch.",
    ),
)  # fmt: skip


def compile_options(command: Command) -> Command:
    """Add the options of compilation; they are keywords of :class:`CommandLineRequest`."""
    for option in reversed(
        (
            click.argument("target"),
            click.option(
                "--cluster", "-c", default="auto", show_default=True,
                help="local:4, 16x8xh100, auto, or a cluster file.",
            ),
            click.option("--batch-size", "-b", type=click.IntRange(1), help="Global batch."),
            click.option("--microbatches", "-m", type=click.IntRange(1), help="Their number."),
            click.option("--optimizer", help="Its name, such as adamw; for memory and update."),
            click.option(
                "--cost-model", "--profile", "cost_model", default="auto", show_default=True,
                metavar="NAME|FILE", help="auto, a cost model, or a file of fxpart profile.",
            ),
            click.option(
                "--constraint", multiple=True, metavar="KEY=VALUE",
                help="Such as solver=cp-sat; listed by `fxpart plan --help`; may be repeated.",
            ),
            click.option(
                "--fix", multiple=True, metavar="KEY=VALUE[,VALUE]",
                help="Fix a decision: tp, dp, stages, zero, microbatches, schedule.",
            ),
            click.option(
                "--forbid", multiple=True, metavar="KEY[=VALUE]",
                help="Forbid a decision: tp, zero=2, stages=1, cut=layers.5.",
            ),
            click.option(
                "--stage", multiple=True, metavar="BLOCKS=STAGE",
                help="Assign blocks to a stage: layers.0-11=0, lm_head=-1.",
            ),
            click.option("--layout", metavar="TEXT", help="Megatron-LM's notation: Ett|tt|ttL."),
            click.option("--time-limit", type=click.FloatRange(0), help="CPU seconds to solve."),
            click.option(
                "--mesh", metavar="AXES",
                help="Mesh of each stage, such as dp=2,tp=2; the batch is sharded over dp.",
            ),
            click.option(
                "--annotations", type=click.Path(),
                help="TOML or JSON file with the sharding of weights and inputs.",
            ),
            click.option(
                "--zero", type=click.IntRange(0, 3),
                help="Shard optimizer state (1), also gradients (2), also parameters (3) over dp.",
            ),
            click.option(
                "--precision", metavar="NAME",
                help="fp32: unchanged; bf16: autocast; fp8: linear layers in 8 bits, too.",
            ),
            click.option(
                "--transfer-dtype", metavar="NAME",
                help="bfloat16: convert float32 transfers between ranks.",
            ),
            *_MODES,
            check_option,
            click.option("--seed", type=int, help="Seed of random ops.  [default: 0]"),
        )
    ):  # fmt: skip
        command = option(command)
    return command


_SECONDS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|m|min)?")


def parse_seconds(text: str, option: str) -> float:
    """Parse "60s", "2m" or "30" as seconds, at most a day. Raises FXP109."""
    found = _SECONDS.fullmatch(text.strip())
    value = float(found[1]) * (60 if found[2] in ("m", "min") else 1) if found else 0.0
    if not 0 < value <= 86400:
        raise error(
            "FXP109",
            where=f"{option} {text}",
            why="it is not a time above 0 and at most a day",
            fix="write it as 60s or 2m",
        )
    return value


def parse_constraints(items: tuple[str, ...]) -> dict[str, int | float | str | bool] | None:
    """Parse ``("stages=3", "recompute=true")`` as a dict; None if empty. Raises FXP109."""
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
