"""The command line ``fxpart VERB``: the only code that prints, with one module per verb.

Installed packages add commands through the entry point group "fxpart.commands". An entry names the
command and refers to a click command, which is imported when it is used.

Exit status: 0 success, 1 difference found, 2 invalid input, 3 infeasible, 4 environment, 5 failed
run, 6 run that ended unsaved or not finite, 70 internal error.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import click

from fxpart._version import __version__
from fxpart.cli import output
from fxpart.errors import EXIT_INPUT, EXIT_OURS, FxpartError, error, find_missing_package
from fxpart.registry import Registry


@dataclass(frozen=True)
class CommandSpec:
    """A command. summary: its line in `fxpart --help`. module: imported on use."""

    summary: str
    module: str

    def load(self) -> click.Command:
        """Import the command's module and return the command."""
        command = importlib.import_module(self.module).command
        assert isinstance(command, click.Command), self.module
        return command


_SUMMARIES = {
    "doctor": "Check whether a model can be captured, and show problems with fixes.",
    "profile": "Measure a model's ops and stages on this machine, and write a profile.",
    "plan": "Plan stages, devices and microbatches for a model, and write the plan.",
    "explain": "Explain a plan, an error code or a page of the documentation.",
    "validate": "Check plan files and list all problems.",
    "export": "Write each rank's program as Python, or a plan for another engine.",
    "train": "Train a target with a plan, in one process or several.",
    "launch": "Write a job for SLURM, Kubernetes or Ray, and submit it.",
    "scale": "Change the number of ranks of a running job.",
    "emulate": "Emulate the effect of stale weights on a model's loss, in one process.",
    "ckpt": "Inspect, verify, convert and prune a run's checkpoints.",
    "verify": "Compare partitioned training with single-process training.",
    "simulate": "Simulate a plan's schedule: step time and pipeline bubble.",
    "schedule": "Show, validate, simulate and convert schedules.",
    "postmortem": "Find the rank that failed first in a run, and the reason.",
    "report": "Write a plan as one HTML file.",
    "whatif": "Estimate a plan with other devices, links or decisions.",
    "diff": "Show the differences between two plans.",
    "cluster": "Detect, measure, import, export and show clusters.",
    "rules": "List ops with sharding rules; propose a rule for an op.",
    "completion": "Print the script that completes commands in a shell.",
    "env": "Show versions and devices for a bug report.",
}


def _check_command(name: str, entry: object) -> None:
    """Raise FXP109 for an entry point whose object is not a click command."""
    if not isinstance(entry, click.Command):
        raise error(
            "FXP109",
            where=f"command {name!r}",
            why=f"The entry is {type(entry).__name__} and not a click command.",
            fix="Use an entry point that refers to a function with the decorator click.command.",
        )


VERBS: Registry[CommandSpec | click.Command] = Registry(
    "command",
    {verb: CommandSpec(text, f"fxpart.cli.{verb}") for verb, text in _SUMMARIES.items()},
    group="fxpart.commands",
    check=_check_command,
)


class TopLevelCommands(click.Group):
    """A group whose verbs are modules of this package, imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order of the table."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a verb; None if it is unknown."""
        if cmd_name not in VERBS:
            return None
        entry = VERBS[cmd_name]
        return entry if isinstance(entry, click.Command) else entry.load()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of verbs without importing them."""
        installed = [name for name in VERBS if name not in VERBS.builtin]
        with formatter.section("Commands"):
            formatter.write_dl(list(_SUMMARIES.items()))
        if installed:
            with formatter.section("Commands of installed packages"):
                formatter.write_dl([(name, f"See `fxpart {name} --help`.") for name in installed])


@click.group(
    cls=TopLevelCommands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="TARGET is file.py:function or package.module:function; the function returns the "
    "model, (model, example inputs), or a fxpart.Workload. "
    "`fxpart explain FXP204` explains an error, `fxpart explain glossary` the terms.",
)
@click.version_option(__version__, prog_name="fxpart")
@click.option("--traceback", "show", is_flag=True, help="Show the Python traceback of errors.")
def cli(show: bool) -> None:
    """Partition an unmodified PyTorch model over devices and train it there."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    from fxpart.environment import take_launcher_pid

    parent = take_launcher_pid()
    if parent is not None:
        from fxpart.launch import die_with_parent

        die_with_parent(parent)
    status = run(sys.argv[1:] if arguments is None else list(arguments))
    sys.exit(status)


def run(arguments: list[str]) -> int:
    """Run the command line and return the exit status; user errors show no traceback."""
    verb = next((i for i, a in enumerate(arguments) if not a.startswith("-")), len(arguments))
    show = "--traceback" in arguments[:verb]
    as_json = "--json" in arguments
    try:
        return int(cli.main(arguments, prog_name="fxpart", standalone_mode=False) or 0)
    except click.ClickException as fault:
        fault.show()
        return EXIT_INPUT
    except (click.Abort, KeyboardInterrupt):
        output.note("interrupted")
        return 130
    except FxpartError as fault:
        if show:
            traceback.print_exc()
        output.failure(fault, as_json=as_json)
        return fault.exit_code
    except BrokenPipeError:
        # The reader has exited (`| head`): print nothing, also in Python's flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as fault:
        missing = find_missing_package(fault) if isinstance(fault, ModuleNotFoundError) else None
        if missing is not None:
            output.failure(missing, as_json=as_json)
            return missing.exit_code
        if show:
            traceback.print_exc()
        output.note(f"internal error of fxpart: {type(fault).__name__}: {fault}")
        output.note("please report it with the output of `fxpart --traceback VERB ...`")
        return EXIT_OURS
