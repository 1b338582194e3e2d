"""What a run leaves: checkpoints in every format, rings of events, failures, ledgers, wishes."""

from __future__ import annotations

import fcntl
import random
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import msgspec

from fuzz.mutations import Kind, Sample
from fuzz.reading import plain, scratch

Files = dict[str, bytes]


@cache
def checkpoint() -> Files:
    """A checkpoint of two ranks, with a part of every kind."""
    from checkpoint_files import Sample as Tensors

    folder = Tensors.make(0, most=3, count=5).save(scratch() / "checkpoints", world=2)
    return _contents(folder)


@cache
def partial() -> Files:
    """What two ranks have written, before it is put together."""
    from checkpoint_files import Sample as Tensors

    from fxpart.checkpoint import folder
    from fxpart.checkpoint.writer import write_rank

    path = folder.begin(scratch() / "begun", 1, 0)
    pieces = Tensors.make(0, most=3, count=5).pieces(2, random.Random(0))
    for rank, mine in enumerate(pieces):
        write_rank(path, rank, mine)
    return _contents(path)


@cache
def converted(form: str) -> Files:
    """The same checkpoint in another tool's format."""
    from checkpoint_files import Sample as Tensors

    from fxpart.checkpoint.exchange.conversion import convert

    kinds = ("float32", "int64", "bfloat16", "uint8")
    folder = Tensors.make(0, most=3, count=4, seen=kinds).save(scratch() / f"for-{form}", world=2)
    target = scratch() / f"as-{form}{'.safetensors' if form == 'whole' else ''}"
    convert(folder, target, form)  # type: ignore[arg-type]
    return _contents(target) if target.is_dir() else {target.name: target.read_bytes()}


def _contents(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_key(path: Path) -> object:
    """A key file; that others can read it is not the matter here."""
    from fxpart.checkpoint.signature import SigningKey

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SigningKey.load(path)


def keys() -> list[Sample]:
    """A key as text."""
    return plain("text", "0123456789abcdef" * 4 + "\n")


@cache
def signed() -> Files:
    """The checkpoint with a signature."""
    from fxpart.checkpoint.signature import SIGNATURE, SigningKey

    files = checkpoint()
    return {**files, SIGNATURE: SigningKey("key", b"k" * 32).sign(files["manifest.json"])}


def read_signed(folder: Path) -> object:
    """Open it with the key."""
    from fxpart.checkpoint.reader import Checkpoint
    from fxpart.checkpoint.signature import SigningKey

    return Checkpoint.open(folder, SigningKey("key", b"k" * 32))


def beside(
    name: str, files: Callable[[], Files], load: Callable[[Path], object]
) -> Callable[[bytes], object]:
    """A reader of a folder of which one file is changed."""
    made: list[Path] = []

    def read(data: bytes) -> object:
        if not made:
            folder = Path(mkdtemp(prefix="folder-", dir=scratch())) / "step-0000000001"
            folder.mkdir()
            for other, held in files().items():
                (folder / other).write_bytes(held)
            made.append(folder)
        (made[0] / name).write_bytes(data)
        return load(made[0])

    return read


def sealed(data: bytes) -> bytes:
    """A manifest with the digest of what it says now."""
    from fxpart.checkpoint import manifest_codec

    try:
        document = msgspec.json.decode(data)
        bare = msgspec.json.encode({**document, "digest": ""}, order="sorted")
        return manifest_codec.insert_digest(bare)
    except (TypeError, ValueError, AssertionError, RecursionError, OverflowError):
        return data


def read_checkpoint(folder: Path) -> object:
    """Open, compare and read all of it."""
    from fxpart.checkpoint.reader import Checkpoint

    found = Checkpoint.open(folder)
    problems = found.verify()
    return problems or [found.read(key) for key in found.manifest.tensors]


def read_newest(folder: Path) -> object:
    """As a run does that goes on; nothing of what is damaged may raise anything else."""
    from fxpart.checkpoint.folder import newest

    return newest(folder.parent)


def manifests() -> list[Sample]:
    """Changed with and without their digest put right."""
    data = checkpoint()["manifest.json"]
    return [Sample(data, "json", sealed), Sample(data, "json", sealed), *plain("json", data)]


def tensors() -> list[Sample]:
    """A rank's file."""
    return plain("binary", checkpoint()["rank-00000.safetensors"])


def read_header(path: Path) -> object:
    """One file of safetensors, as converting reads it."""
    from fxpart.checkpoint.exchange.tensor_files import read_header, read_place

    return [read_place(place) for place in read_header(path)[0].values()]


def read_told(folder: Path) -> object:
    """What ranks have written, put together."""
    from fxpart.checkpoint.manifest_merge import merge, read_rank_manifests

    rest = {"step": 1, "calls": 1, "seed": 0, "fingerprint": "", "plan": "", "generation": 0}
    return merge(read_rank_manifests(folder, 2), **rest)


def read_foreign(form: str) -> Callable[[Path], object]:
    """Another tool's checkpoint, recognised and read as converting it does."""

    def load(folder: Path) -> object:
        from fxpart.checkpoint.exchange.conversion import ConversionOptions, _open_source, detect

        detect(folder)
        source = _open_source(folder, form, ConversionOptions())  # type: ignore[arg-type]
        return [(source.read(key), source.layout(key)) for key in source.tensors]

    return load


def of(files: Callable[[], Files], name: str, kind: Kind) -> Callable[[], list[Sample]]:
    """One file of a folder as a sample."""
    return lambda: plain(kind, files()[name])


def header_of(files: Callable[[], Files], name: str) -> Callable[[], list[Sample]]:
    """A safetensors file of which the header is changed, or any byte."""

    def samples() -> list[Sample]:
        data = files()[name]
        length = 8 + int.from_bytes(data[:8], "little")

        def whole(header: bytes) -> bytes:
            return len(header).to_bytes(8, "little") + header + data[length:]

        return [Sample(data[8:length].strip(), "json", whole), *plain("binary", data)]

    return samples


# Events and ledgers


def read_ring(path: Path) -> object:
    """A rank's last events."""
    from fxpart.diagnostics.flight_recorder import read

    return [event.words for event in read(path).events]


def rings() -> list[Sample]:
    """One that is full and one that is not."""
    from fxpart.diagnostics.flight_recorder import FlightRecorder

    found = []
    for count in (3, 20):
        ring = FlightRecorder.create(scratch() / f"made-{count}.ring", 1, 8, generation=2)
        for number in range(count):
            ring.put("F#", "begin" if number % 2 else "wait", stage=1, microbatch=number, peer=0)
        found.append(Path(str(ring.path)).read_bytes())
    return plain("binary", *found)


def read_failure(path: Path) -> object:
    """What a rank said of its end."""
    from fxpart.diagnostics.failure_record import read_failure

    return read_failure(path)


def failures() -> list[Sample]:
    """One of ours and one of the user's."""
    from fxpart.diagnostics.failure_record import record_failure
    from fxpart.errors import error

    causes = (error("FXP514", where="rank 1", why="gone"), ValueError("no"))
    for number, cause in enumerate(causes):
        path = scratch() / f"made-{number}.failure.json"
        record_failure(path, cause, rank=number, generation=1, lost=(1,), peers={1: "F0"})
    return plain("json", *(p.read_bytes() for p in sorted(scratch().glob("made-*.failure.json"))))


def read_ledger(path: Path) -> object:
    """Every step once?"""
    from fxpart.runtime.training_run.ledger import check_ledger, read_updates

    return check_ledger(path), read_updates(path)


def ledgers() -> list[Sample]:
    """A run that went on once."""
    from fxpart.runtime.training_run.ledger import Ledger, LedgerGeneration, LedgerUpdate

    path = scratch() / "made-steps.jsonl"
    path.unlink(missing_ok=True)
    ledger = Ledger(path)
    for generation, (start, stop) in enumerate([(0, 4), (2, 5)], 1):
        ledger.begin(LedgerGeneration(generation=generation, after=start, world=2, same="s"))
        for n in range(start, stop):
            ledger.write(
                LedgerUpdate(step=n + 1, epoch=0, first=n, batches=1, rows=4, loss=0.5, digest="d")
            )
    ledger.close()
    return plain("lines", path.read_bytes())


def read_generations(path: Path) -> object:
    """How often a run was started, and how that ended."""
    from fxpart.runtime.training_run.generations import load_generations

    return [generation.how for generation in load_generations(path)]


def generations() -> list[Sample]:
    """Two lives of a run."""
    from fxpart.runtime.training_run.generations import GenerationWriter

    path = scratch() / "made-generations.jsonl"
    path.unlink(missing_ok=True)
    made = GenerationWriter(path)
    for number in (1, 2):
        made.begin(number, world=2, step=3, reached=4, plan="p")
        made.end(number, step=5, how="failed", why="FXP514")
    made.close()
    return plain("lines", path.read_bytes())


def read_progress(data: bytes) -> object:
    """The same two files, looked at from outside."""
    from fxpart.checkpoint.run_directory import RunDir
    from fxpart.elastic import progress

    run = RunDir(scratch() / "progress")
    run.path.mkdir(exist_ok=True)
    for path in (run.ledger, run.generations):
        path.write_bytes(data)
    return (
        progress.read_ledger_step(run),
        progress.read_end_reason(run),
        progress.read_checkpoint_step(run),
    )


def lines() -> list[Sample]:
    """Ledger and generations."""
    return [*ledgers(), *generations()]


def read_wish(data: bytes) -> object:
    """How many ranks are wished for, and what plans were asked for."""
    from fxpart.checkpoint.run_directory import RunDir
    from fxpart.checkpoint.run_lock import RunLock
    from fxpart.elastic.plan_cache import _read_key_digest
    from fxpart.elastic.rank_bounds import RankBounds
    from fxpart.elastic.scale_request import LauncherLock

    run = RunDir(scratch() / "wishes")
    run.path.mkdir(exist_ok=True)
    for name in ("scale.json", "asked.json"):
        (run.path / name).write_bytes(data)
    return LauncherLock(run, RankBounds(1, 8), RunLock(run, None)).read_request(), _read_key_digest(
        run.path / "asked.json"
    )


def wishes() -> list[Sample]:
    """Each kind."""
    return plain("json", '{"ranks":3}', '{"digest":"abc","asked":{"target":"x"}}')


def read_slow(data: bytes) -> object:
    """Which ranks have become slow."""
    from fxpart.checkpoint.run_directory import RunDir
    from fxpart.elastic.slow_rank_report import read_slow_rank_report

    run = RunDir(scratch() / "slow")
    run.path.mkdir(exist_ok=True)
    (run.path / "slow.json").write_bytes(data)
    return read_slow_rank_report(run)


def slow() -> list[Sample]:
    """One of two ranks."""
    return plain(
        "json", '{"step":9,"seconds":{"0":0.1,"1":0.3},"past":{"0":0.1,"1":0.1},"slow":[1]}'
    )


def read_launcher(data: bytes) -> object:
    """Who runs a run: a file that is locked for as long as that is so."""
    from fxpart.checkpoint.run_directory import RunDir
    from fxpart.checkpoint.run_lock import _read_record, read_launcher_record

    run = RunDir(scratch() / "launched")
    run.path.mkdir(exist_ok=True)
    with (run.path / "supervisor.json").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(data)
        file.flush()
        _read_record(run.lock)
        return read_launcher_record(run)


def launchers() -> list[Sample]:
    """A launcher's own words."""
    return plain("json", '{"pid":12,"least":1,"most":4,"ranks":2}')
