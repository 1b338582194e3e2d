"""Every reader of files in fxpart: a new one is one line in READERS.

A reader takes the bytes of a file (or of one file of a folder, the others being right) and does
what a verb would do with them: read, check, and where that is cheap show.
"""

from __future__ import annotations

import hashlib
import json
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fuzz.mutations import Kind, Sample

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Reader:
    """One kind of file.

    read: of a file's bytes. samples: good ones, which the project itself wrote. opens: the
    functions below fxpart that open such files. share: how much of the usual number of changes is
    tried, below 1 only where one reading takes milliseconds.
    """

    read: Callable[[bytes], object]
    samples: Callable[[], list[Sample]]
    opens: tuple[str, ...]
    share: float = 1.0


@cache
def scratch() -> Path:
    """A folder of this process; what readers do outside of it is a fault."""
    keep = tempfile.TemporaryDirectory(prefix="fuzz-")
    _KEPT.append(keep)
    return Path(keep.name).resolve()


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def in_file(name: str, load: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A reader of paths: the bytes are written to a file first."""

    def read(data: bytes) -> object:
        path = scratch() / name
        path.write_bytes(data)
        return load(path)

    return read


def plain(kind: Kind, *data: bytes | str) -> list[Sample]:
    """Samples whose data is the whole file."""
    return [Sample(d.encode() if isinstance(d, str) else d, kind) for d in data]


# Plans


def _read_plan(data: bytes) -> object:
    from fxpart.plan import Plan
    from fxpart.report.explain import explain

    return explain(Plan.loads(data))


def _plans() -> list[Sample]:
    import sample_plans

    golden = sorted((TESTS / "golden").glob("plan_version_*.json"))
    return plain("json", sample_plans.plan(2, 2).dumps(), *(p.read_bytes() for p in golden))


# Clusters


def _read_cluster(suffix: str) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        from fxpart.cluster_io.files import decode, to_json
        from fxpart.report.cluster import shown

        found = decode(data, suffix)
        return to_json(found), shown(found, ())

    return read


def _clusters(suffix: str) -> Callable[[], list[Sample]]:
    def samples() -> list[Sample]:
        from fxpart.cluster import Cluster
        from fxpart.cluster_io.files import to_json, to_toml

        found = [Cluster.parse(name) for name in ("2x2xh100", "local:2", "2xa100+1xt4")]
        if suffix == ".json":
            return plain("json", *map(to_json, found))
        return plain("toml", *map(to_toml, found))

    return samples


def _read_import(form: str) -> Callable[[bytes], object]:
    def load(path: Path) -> object:
        from fxpart.cluster_io.facts import Facts
        from fxpart.cluster_io.importers import load

        facts = Facts(
            device="a100", pcie=1e10, nvlink=1e10, per_host=2, memory=1e12, operation="broadcast"
        )
        return load(path, form, facts)

    return in_file("import.txt", load)


def _imports(*patterns: str) -> Callable[[], list[Sample]]:
    def samples() -> list[Sample]:
        paths = [p for pattern in patterns for p in sorted((TESTS / "cluster/data").glob(pattern))]
        return [Sample(p.read_bytes(), "json" if p.suffix == ".json" else "text") for p in paths]

    return samples


def _slurm() -> list[Sample]:
    listed = "SLURM_JOB_NODELIST=node[01-04,7]\nSLURM_GPUS_ON_NODE=2\nSLURM_JOB_NUM_NODES=5\n"
    return plain("text", "gpu-[1-3],login2", "rack[0-1]n[08-11]", listed)


# Schedules and recordings


def _read_schedule(path: Path) -> object:
    from fxpart.schedule.files import implied_edges, load
    from fxpart.schedule.verify import check

    found = load(path)
    return check(found, implied_edges(found))


def _schedules(csv: bool) -> Callable[[], list[Sample]]:
    def samples() -> list[Sample]:
        from fxpart.schedule.action import StageEdge
        from fxpart.schedule.make import make
        from fxpart.schedule.text import to_text
        from fxpart.schedule.torch_csv import to_torch_csv

        edges = [StageEdge(k, k + 1) for k in range(2)]
        made = [make("1f1b", (0, 1), 3, edges[:1]), make("gpipe", (0, 1, 2), 2, edges)]
        return plain("text", *(to_torch_csv(s) if csv else to_text(s) for s in made))

    return samples


def _read_recording(data: bytes) -> object:
    from fxpart.report.measured import decode

    return decode(data, "trace")


def _recordings() -> list[Sample]:
    import msgspec
    import sample_plans
    from recordings import recorded

    return plain("json", msgspec.json.encode(recorded(sample_plans.plan(2, 2), 1).chrome_trace()))


# Problems of the solver, and others' priced graphs


def _read_problem(kind: str) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        from fxpart.solver import archive, placement
        from fxpart.solver.joint import archive as joint

        readers: dict[str, Callable[[bytes], object]] = {
            "partition": archive.problem_from_json,
            "placement": placement.problem_from_json,
            "joint": joint.from_json,
        }
        return readers[kind](data)

    return read


def _problems(kind: str) -> Callable[[], list[Sample]]:
    def samples() -> list[Sample]:
        import joint_problems
        import partition_problems
        import placement_problems

        from fxpart.solver.archive import encode

        make = {
            "partition": lambda n: partition_problems.random_problem(n, 4),
            "placement": lambda n: placement_problems.problem(n, 3, points=n == 1),
            "joint": joint_problems.rich_problem,
        }[kind]
        return plain("json", *(encode(make(n)) for n in range(3)))

    return samples


def _read_instance(data: bytes) -> object:
    from fxpart.solver.maxload.formats import parse_instance
    from fxpart.solver.maxload.formats.given import Given

    devices = Given() if data.lstrip()[:1] == b"{" else Given(accelerators=2, bandwidth=1e6)
    return parse_instance(data, "file", devices)


def _instances() -> list[Sample]:
    folder = TESTS / "fuzz" / "data"
    texts = plain("text", (folder / "pipedream.txt").read_bytes())
    return texts + plain("json", *(p.read_bytes() for p in sorted(folder.glob("instance_*.json"))))


# Annotations


def _read_annotations(suffix: str) -> Callable[[bytes], object]:
    def load(path: Path) -> object:
        from fxpart.annotations.files import load_annotations

        return load_annotations(path)

    return in_file(f"annotations{suffix}", load)


def _annotations(suffix: str) -> Callable[[], list[Sample]]:
    toml = (
        'format = "fxpart annotations 1"\nmesh = "dp=2,tp=2"\n[annotations]\n'
        '"layers.*.up.weight" = "tp:S(0)"\n"input:x" = "dp:S(0)"\n"op:linear" = "tp:R"\n'
    )
    document = (
        '{"format":"fxpart annotations 1","mesh":"dp=2,tp=2","annotations":'
        '{"layers.*.up.weight":"tp:S(0)","input:x":"dp:S(0),tp:R","module:mlp":"tp:S(1)"}}'
    )
    return lambda: plain("json", document) if suffix == ".json" else plain("toml", toml)


# Profiles


def _read_profile(path: Path) -> object:
    from fxpart.profile import Profile
    from fxpart.report.profiled import contents, describe_profile

    with Profile(path) as profile:
        return contents(profile), describe_profile(profile)


def _profiles() -> list[Sample]:
    from fxpart.profile import Calibration, Crowding, Profile, Setting, StageTiming, Timing

    path = scratch() / "made.profile"
    path.unlink(missing_ok=True)
    here = Setting(device="cpu", chip="chip", threads=1, torch="2.13.0")
    timing = Timing(0.5, 0.25, 1.0, 3)
    key = '["aten.relu.default",[["float32",[2,3]]],[["float32",[2,3]]],[],[0]] forward'
    with Profile(path, create=True) as profile:
        profile.put("ops", here, {key: timing}, "2026-01-01")
        whole = StageTiming(
            forward=timing, backward=timing, optimizer=timing, rows=2, parts={"a": 1.0}
        )
        profile.put("stages", here, {"stage": whole})
        profile.put("calibrations", here, {"": Calibration(residuals=(("s", 1.0, 2.0),))})
        profile.put("crowding", here, {"": Crowding(slowdown=(1.0, 1.5))})
    return plain("binary", path.read_bytes())


# Weights and programs


def with_length(header: bytes) -> bytes:
    """A safetensors file with this header and 64 bytes of data."""
    return struct.pack("<Q", len(header)) + header + bytes(64)


HEADER = (
    b'{"__metadata__":{"format":"pt"},"a.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
    b'"b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}}'
)


def _read_weights(path: Path) -> object:
    from fxpart.codegen.tensor_files import TensorFiles

    files = TensorFiles(path)
    return [files.read(name) for name in files.names()]


def _weights() -> list[Sample]:
    return [Sample(HEADER, "json", with_length), *plain("binary", with_length(HEADER))]


def _read_index(data: bytes) -> object:
    from fxpart.codegen.tensor_files import INDEX, TensorFiles

    folder = scratch() / "indexed"
    folder.mkdir(exist_ok=True)
    (folder / INDEX).write_bytes(data)
    (folder / "one.safetensors").write_bytes(with_length(HEADER))
    return TensorFiles(folder).names()


def _index() -> list[Sample]:
    return plain(
        "json", '{"metadata":{},"weight_map":{"a.weight":"one.safetensors","b":"one.safetensors"}}'
    )


@cache
def _program() -> dict[str, bytes]:
    """The files of an exported program of two stages, the manifest left out."""
    import torch
    from stage_runs import Stages, assigned, captured_of, prepared

    from fxpart.codegen import constants_of, export

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
    captured = captured_of(model, (torch.randn(4, 3),), torch.mean, batch_size=4)
    built = Stages(captured, assigned(prepared(captured), (0, 1)))
    export(
        scratch() / "exported", plan="{}\n", spec=built.spec, sources=built.sources,
        actions=["0F0\n", "1F0\n"], constants=constants_of(built.spec, built.captured.state),
    )  # fmt: skip
    files = {p.name: p.read_bytes() for p in (scratch() / "exported").iterdir()}
    del files["manifest.json"]
    return files


def _manifest(files: dict[str, bytes]) -> bytes:
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    return json.dumps({"format": "fxpart-program", "version": 1, "files": digests}).encode()


def _read_program(name: str) -> Callable[[bytes], object]:
    """A program of which one file is changed; its digest is right, so that the file is read."""

    def read(data: bytes) -> object:
        from fxpart.codegen import load_exported

        folder = scratch() / f"program-{name}"
        if not folder.exists():
            folder.mkdir()
            for other, held in _program().items():
                (folder / other).write_bytes(held)
        files = {**_program(), name: data}
        (folder / name).write_bytes(data)
        if name != "manifest.json":
            (folder / "manifest.json").write_bytes(_manifest(files))
        found = load_exported(folder, stages=())  # the stages' own text would be run
        return [found.lane(lane) for lane in range(2)]

    return read


def _programs(name: str) -> Callable[[], list[Sample]]:
    return lambda: plain(
        "json", _manifest(_program()) if name == "manifest.json" else _program()["program.json"]
    )


@cache
def _reproducer() -> dict[str, bytes]:
    """The files that a failing pass leaves."""
    import torch
    from stage_runs import captured_of

    from fxpart.pipeline.reproduce import write_reproducer

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
    captured = captured_of(model, (torch.randn(4, 3),), torch.mean, batch_size=4)
    folder = write_reproducer(scratch(), captured.graph, "simplify", "it failed")
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def _read_reproducer(name: str) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        from fxpart.pipeline.reproduce import read_reproducer

        folder = scratch() / "reproducer"
        folder.mkdir(exist_ok=True)
        for other, held in {**_reproducer(), name: data}.items():
            (folder / other).write_bytes(held)
        return read_reproducer(folder)

    return read


def _reproducers(name: str) -> Callable[[], list[Sample]]:
    return lambda: plain("json", _reproducer()[name])


READERS: dict[str, Reader] = {
    "plan": Reader(_read_plan, _plans, ("plan_io.files.load",)),
    "cluster-json": Reader(_read_cluster(".json"), _clusters(".json"), ("cluster_io.files.load",)),
    "cluster-toml": Reader(_read_cluster(".toml"), _clusters(".toml"), ("cluster_io.files.load",)),
    "nccl": Reader(_read_import("nccl-tests"), _imports("nccl_*"), ("cluster_io.importers.load",)),
    "topology": Reader(_read_import("topo"), _imports("topo_*"), ("cluster_io.importers.load",)),
    "slurm": Reader(_read_import("slurm"), _slurm, ("cluster_io.importers.load",)),
    "paddle": Reader(_read_import("paddle"), _imports("paddle_2*"), ("cluster_io.importers.load",)),
    "recognised": Reader(
        _read_import("auto"),
        _imports("nccl*", "topo_*", "paddle_2*"),
        ("cluster_io.importers.load",),
    ),
    "schedule": Reader(
        in_file("schedule.txt", _read_schedule), _schedules(csv=False), ("schedule.files.contents",)
    ),
    "schedule-csv": Reader(
        in_file("schedule.csv", _read_schedule), _schedules(csv=True), ("schedule.files.contents",)
    ),
    "recording": Reader(_read_recording, _recordings, ("report.measured.load",)),
    "partition-problem": Reader(
        _read_problem("partition"), _problems("partition"), ("solver.archive.read",)
    ),
    "placement-problem": Reader(
        _read_problem("placement"), _problems("placement"), ("solver.archive.read",)
    ),
    "joint-problem": Reader(_read_problem("joint"), _problems("joint"), ("solver.archive.read",)),
    "instance": Reader(_read_instance, _instances, ("solver.maxload.formats.read_instance",)),
    "annotations-json": Reader(
        _read_annotations(".json"), _annotations(".json"), ("annotations.files.load_annotations",)
    ),
    "annotations-toml": Reader(
        _read_annotations(".toml"), _annotations(".toml"), ("annotations.files.load_annotations",)
    ),
    "profile": Reader(
        in_file("some.profile", _read_profile), _profiles, ("profile.Profile.__init__",)
    ),
    "weights": Reader(
        in_file("some.safetensors", _read_weights),
        _weights,
        ("codegen.tensor_files._header", "codegen.tensor_files.TensorFiles._rows"),
    ),
    "program": Reader(
        _read_program("program.json"), _programs("program.json"), ("codegen.export._verified",)
    ),
    "program-lane": Reader(
        _read_program("program_lane1.json"),
        _programs("program.json"),
        ("codegen.export._verified",),
    ),
    "program-manifest": Reader(
        _read_program("manifest.json"), _programs("manifest.json"), ("codegen.export._verified",)
    ),
    "reproducer": Reader(
        _read_reproducer("graph.json"),
        _reproducers("graph.json"),
        ("pipeline.reproduce.read_reproducer",),
        0.02,
    ),
    "reproducer-pipeline": Reader(
        _read_reproducer("pipeline.json"),
        _reproducers("pipeline.json"),
        ("pipeline.reproduce.read_reproducer",),
        0.1,
    ),
    "weights-index": Reader(_read_index, _index, ("codegen.tensor_files._index",)),
}
