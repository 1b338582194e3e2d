"""``fxpart ckpt convert``: convert checkpoints to and from other formats."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from fxpart.cli import output
from fxpart.cli.options import json_option, load_key, sign_option

FORMATS = ("fxpart", "hf", "dcp", "paddle", "whole")


@click.command()
@click.argument("source", type=click.Path())
@click.argument("target", type=click.Path())
@click.option("--to", type=click.Choice(FORMATS), required=True, help="Format of TARGET.")
@click.option(
    "--from", "form", type=click.Choice(FORMATS), help="Format of SOURCE, detected by default."
)
@click.option("--model-only", is_flag=True, help="Convert only the model.")
@click.option(
    "--model-prefix",
    default="model.",
    show_default=True,
    help="Prefix of parameter names in a dcp folder; '' for none.",
)
@click.option(
    "--optimizer-prefix",
    default="optimizer.state.",
    show_default=True,
    help="Prefix of NAME.SLOT in a dcp folder; '' omits the optimizer.",
)
@click.option(
    "--strategy",
    type=click.Path(),
    help="JSON file of PaddlePaddle's converter dictionaries with the sharding of paddle.",
)
@click.option("--config", type=click.Path(), help="A config.json to copy into an hf folder.")
@click.option(
    "--file-bytes",
    type=click.IntRange(1),
    default=5_000_000_000,
    show_default=True,
    help="Maximum bytes of a file in an hf or dcp folder.",
)
@sign_option("Verify an fxpart SOURCE and sign an fxpart TARGET with the secret key in this file.")
@json_option
def convert(
    source: str,
    target: str,
    to: str,
    form: str | None,
    model_only: bool,
    model_prefix: str,
    optimizer_prefix: str,
    strategy: str | None,
    config: str | None,
    file_bytes: int,
    sign: str | None,
    as_json: bool,
) -> int:
    """Convert the checkpoint SOURCE to another format in TARGET, bit by bit.

    \b
    fxpart  fxpart's own format: SOURCE may be a run, TARGET is a folder for checkpoints
    hf      a Hugging Face folder of safetensors, or one such file, with only the model
    dcp     torch.distributed.checkpoint through its HuggingFaceStorageWriter and -Reader
    paddle  PaddlePaddle's converter dictionaries (.json) with each rank's arrays (.npz)
    whole   one safetensors file with everything

    Only one tensor is in memory at a time, and no pickled data are read.
    `fxpart explain checkpoint_format` describes the formats.
    """
    from fxpart.checkpoint.exchange import conversion as exchange
    from fxpart.checkpoint.exchange.huggingface import KeyPrefixes
    from fxpart.checkpoint.exchange.paddle_files import read_strategies
    from fxpart.units import plural, size

    options = exchange.ConversionOptions(
        model_only=model_only,
        prefixes=KeyPrefixes(model_prefix, optimizer_prefix),
        strategies={} if strategy is None else read_strategies(Path(strategy)),
        config=None if config is None else Path(config),
        file_bytes=file_bytes,
        key=load_key(sign),
    )
    formats = {name: name for name in exchange.FORMATS}
    with _progress(f"converting {source}") as progress:
        done = exchange.convert(
            Path(source), Path(target), formats[to], form=formats[form] if form else None,  # type: ignore[index]
            options=options, progress=progress,
        )  # fmt: skip
    if as_json:
        output.data({
            "path": str(done.path), "from": done.source, "to": done.target,
            "tensors": done.tensors, "bytes": done.bytes, "left_out": sorted(done.left_out),
        })  # fmt: skip
    else:
        output.text(f"{done.path}: {plural(done.tensors, 'tensor')}, {size(done.bytes)}")
    if done.left_out and not as_json:
        kinds = sorted({key.split("/")[0] for key in done.left_out})
        count = plural(len(done.left_out), "tensor")
        output.note(
            f"note: the format {done.target} cannot represent {count} of {', '.join(kinds)}"
        )
    return 0


@contextmanager
def _progress(message: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show progress, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    with output.show_messages(message, True) as show:
        assert show is not None
        yield lambda done, total: show(f"{done * 100 // max(total, 1)} %")
