"""A checkpoint that the user saves into a folder, outside of a run."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpart.checkpoint import files, folder
from fxpart.checkpoint.run_directory import RunDir
from fxpart.checkpoint.signature import KeySource, SigningKey
from fxpart.errors import error
from fxpart.runtime.checkpointing.saver import Saver
from fxpart.runtime.checkpointing.shared_folder import wait_until_shared
from fxpart.runtime.checkpointing.snapshot import flush_before_snapshot
from fxpart.runtime.transport.agreement import agree, convert_transport_errors

if TYPE_CHECKING:
    from fxpart.runtime.trainer import Trainer
    from fxpart.runtime.transport.interface import Transport


def save_once(trainer: Trainer, root: Path, extra: dict[str, Any], sign: KeySource = None) -> Path:
    """Implement :meth:`fxpart.runtime.trainer.Trainer.save_checkpoint`."""
    # First: update counts are equal on all ranks only without minibatches in flight.
    flush_before_snapshot(trainer)
    step = trainer.updates
    root = root.absolute()
    final = root / folder.step_name(step)

    def check() -> tuple[SigningKey | None, str]:
        run = RunDir(root.parent)
        of_run = root == run.checkpoints and run.generations.exists()
        if trainer.rank == 0 and (of_run or final.exists()):
            why = "a run resumes from that folder" if of_run else "the checkpoint exists already"
            raise error("FXP513", where=str(final), why=why, fix="use another folder")
        return SigningKey.load(sign), f"step {step}"

    key = agree(trainer.transport, "where a checkpoint is saved", check)
    if trainer.transport.ranks > len(trainer.transport.local):
        _check_shared(trainer.transport, root)
    Saver(trainer, root, keep=0, strict=True, key=key).save(step, extra, wait=True)
    return final


def _check_shared(transport: Transport, root: Path) -> None:
    """Raise FXP501 if the ranks have different folders; only paths that differ are examined."""
    own = f"{secrets.token_hex(8)} {root}".encode(errors="surrogateescape")
    with convert_transport_errors(transport, "comparing where a checkpoint is saved"):
        found = [raw.split(b" ", 1) for raw in transport.exchange_bytes(own)]
    if all(path == found[0][1] for _, path in found):
        return
    rank, mark = transport.local[0], root / f".shared-{found[0][0].decode()}"

    def begin() -> tuple[None, str]:
        if rank == 0:
            with files.convert_save_errors(str(root)):
                root.mkdir(parents=True, exist_ok=True)
                mark.touch()
        return None, ""

    def look() -> tuple[None, str]:
        other = found[0][1].decode(errors="replace")
        why = f"rank 0 saves the checkpoint in another folder, {other}"
        wait_until_shared(mark.exists, rank, root, why)
        return None, ""

    try:
        agree(transport, "where a checkpoint is saved", begin)
        agree(transport, "where a checkpoint is saved", look)
    finally:
        if rank == 0:
            mark.unlink(missing_ok=True)
