"""``fxpart completion``: the script that completes commands and options in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from fxpart.cli import output
from fxpart.cli.options import json_option

_FILES = {
    "bash": "~/.local/share/bash-completion/completions/fxpart",
    "zsh": "a folder of $fpath, as _fxpart",
    "fish": "~/.config/fish/completions/fxpart.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(list(_FILES)))
@json_option
def command(shell: str, as_json: bool) -> int:
    """Print the completion script of a shell.

    `eval "$(fxpart completion bash)"` completes in this shell; write the output to a file for all:
    ~/.local/share/bash-completion/completions/fxpart, a folder of $fpath as _fxpart, or
    ~/.config/fish/completions/fxpart.fish.
    """
    from fxpart.cli import cli

    made = get_completion_class(shell)
    assert made is not None, shell
    script = made(cli, {}, "fxpart", "_FXPART_COMPLETE").source()
    if as_json:
        output.data({"shell": shell, "file": _FILES[shell], "script": script})
    else:
        output.text(script.strip("\n"))
    return 0
