"""The command line: ``fxpart VERB``. The only place that prints; one file for each verb.

Installed packages add commands through the entry point group "fxpart.commands": the name of the
entry is the command's, its object a click command, which is imported when the command is used.

Exit status: 0 done, 1 a difference found, 2 bad input, 3 infeasible, 4 environment, 5 the run
failed, 70 our fault.
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
from fxpart.errors import EXIT_INPUT, EXIT_OURS, FxpartError, error
from fxpart.registry import Registry


@dataclass(frozen=True)
class CommandSpec:
    """A command of fxpart. summary: its line in `fxpart --help`; module: imported on use."""

    summary: str
    module: str

    def load(self) -> click.Command:
        """Import the command's module and return the command."""
        command = importlib.import_module(self.module).command
        assert isinstance(command, click.Command), self.module
        return command


_SUMMARIES = {
    "doctor": "Can this model be captured? Says what was tried and what stands in the way.",
    "profile": "Measure a model's ops and stages on the devices at hand; write a profile.",
    "plan": "Choose stages, devices and microbatches for a model; write the plan.",
    "explain": "Say what a plan decides and why, or what an error code means.",
    "validate": "Check plan files; every fault, not the first.",
    "export": "Write each rank's program as readable Python.",
    "train": "Train a target by a plan, in this process or on several.",
    "scale": "Ask a run that is under way to go on with another number of ranks.",
    "emulate": "Say what stale weights would do to a model's loss, in one process.",
    "ckpt": "Look at a run's checkpoints, compare every digest, drop old ones.",
    "verify": "Compare partitioned training with one process, number by number.",
    "simulate": "Run a plan's schedule in time: step, bubble, who waits.",
    "schedule": "Show, prove, time and convert schedules: built ones, and files.",
    "postmortem": "Say who stopped first in a run that failed, and why.",
    "report": "Draw a plan as one HTML file.",
    "whatif": "Ask what a plan would be with other devices, links or decisions.",
    "diff": "Show what differs between two plans.",
    "cluster": "Find out what a cluster is, measure it, write it down, look at it.",
    "rules": "Say which ops have sharding rules; propose one for an op that has none.",
    "env": "Show versions and devices, for a bug report.",
}


def _check_command(name: str, entry: object) -> None:
    """Raise FXP109 for an entry point whose object is not a click command."""
    if not isinstance(entry, click.Command):
        raise error(
            "FXP109",
            where=f"command {name!r}",
            why=f"The entry is not a click command but {type(entry).__name__}.",
            fix="Let the entry point name a function decorated with click.command.",
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
        """The verbs in the order of the table."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's command, None where there is no such verb."""
        if cmd_name not in VERBS:
            return None
        entry = VERBS[cmd_name]
        return entry if isinstance(entry, click.Command) else entry.load()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of verbs, without loading them."""
        installed = [name for name in VERBS if name not in VERBS.builtin]
        with formatter.section("Verbs"):
            formatter.write_dl(list(_SUMMARIES.items()))
        if installed:
            with formatter.section("Commands of installed packages"):
                formatter.write_dl([(name, f"See `fxpart {name} --help`.") for name in installed])


@click.group(
    cls=TopLevelCommands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="TARGET is file.py:function or package.module:function; the function returns the "
    "model, (model, example inputs), or a fxpart.Workload. "
    "`fxpart explain FXP204` explains an error, `fxpart explain glossary` the words.",
)
@click.version_option(__version__, prog_name="fxpart")
@click.option("--traceback", "show", is_flag=True, help="Show where an error came from.")
def cli(show: bool) -> None:
    """Partition an unmodified PyTorch model over devices and train it with the numbers of one."""


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
    """Run the command line; the exit status. A user's mistake shows no traceback."""
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
        # The reader has gone (`| head`): say nothing, and let Python's own flush at exit be quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as fault:
        if show:
            traceback.print_exc()
        output.note(f"internal error of fxpart: {type(fault).__name__}: {fault}")
        output.note("`fxpart --traceback VERB ...` shows where; please report it")
        return EXIT_OURS
