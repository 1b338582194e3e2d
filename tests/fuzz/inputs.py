"""Plans, clusters, schedules, recordings, problems, annotations and profiles."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from fuzz.mutations import Sample
from fuzz.reading import TESTS, in_file, plain, scratch

# Plans


def read_plan(data: bytes) -> object:
    from fxpart.plan.model import Plan
    from fxpart.report.explanation_text import explain

    return explain(Plan.loads(data))


def plans() -> list[Sample]:
    import sample_plans

    golden = sorted((TESTS / "golden").glob("plan_version_*.json"))
    return plain("json", sample_plans.plan(2, 2).dumps(), *(p.read_bytes() for p in golden))


def read_penalty(path: Path) -> object:
    from fxpart.plan.staleness_penalty import StalenessPenalty

    found = StalenessPenalty.load(path)
    counts = (1, 2, 3, 8)
    return [found.find_relative_steps(w, k, m) for w in found.modes for k in counts for m in counts]


def penalties() -> list[Sample]:
    rows = [
        {"weights": "stash", "stages": 4, "microbatches": 1, "relative_steps": 1.25,
         "interval": [1.1, 1.5], "delay": 1.5, "steps": [50, None]},
        {"weights": "nadam-stash", "stages": 2, "microbatches": 2, "relative_steps": None,
         "optimizer": "nadam", "options": {"lr": 0.1, "betas": [0.9, 0.99], "amsgrad": False}},
    ]  # fmt: skip
    whole = {
        "format": "fxpart-staleness-penalty", "version": 1, "optimizer": "sgd", "batch_size": 8,
        "target_loss": 0.5, "window": 2, "limit": 60, "seeds": [0, 1], "sync_steps": [40, 45],
        "model": "net", "parameters": 100, "measured": rows,
    }  # fmt: skip
    return plain("json", json.dumps(whole))


# Clusters


def read_cluster(suffix: str) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        from fxpart.cluster.files import decode, to_json
        from fxpart.cluster.model import Cluster
        from fxpart.report.cluster import format_cluster

        found = decode(Cluster, data, suffix)
        return to_json(found), format_cluster(found, ())

    return read


def clusters(suffix: str) -> Callable[[], list[Sample]]:
    def samples() -> list[Sample]:
        from fxpart.cluster.files import to_json, to_toml
        from fxpart.cluster.model import Cluster

        found = [Cluster.parse(name) for name in ("2x2xh100", "local:2", "2xa100+1xt4")]
        if suffix == ".json":
            return plain("json", *map(to_json, found))
        return plain("toml", *map(to_toml, found))

    return samples


def read_import(form: str) -> Callable[[bytes], object]:
    def load(path: Path) -> object:
        from fxpart.cluster.importers.registry import load
        from fxpart.cluster.importers.source_facts import ImportOptions

        facts = ImportOptions(
            device="a100", pcie=1e10, nvlink=1e10, per_host=2, memory=1e12, operation="broadcast"
        )
        return load(path, form, facts)

    return in_file("import.txt", load)


def imports(*patterns: str) -> Callable[[], list[Sample]]:
    def samples() -> list[Sample]:
        paths = [p for pattern in patterns for p in sorted((TESTS / "cluster/data").glob(pattern))]
        return [Sample(p.read_bytes(), "json" if p.suffix == ".json" else "text") for p in paths]

    return samples


def slurm() -> list[Sample]:
    listed = "SLURM_JOB_NODELIST=node[01-04,7]\nSLURM_GPUS_ON_NODE=2\nSLURM_JOB_NUM_NODES=5\n"
    return plain("text", "gpu-[1-3],login2", "rack[0-1]n[08-11]", listed)


# Schedules and recordings


def read_engine(path: Path) -> object:
    from fxpart.interop.engines import read_configuration

    _, run = read_configuration(str(path))
    return run.resolve(64)


def engines(*files: str) -> Callable[[], list[Sample]]:
    def samples() -> list[Sample]:
        import sample_plans

        from fxpart.interop.engines import ENGINES, find_degrees

        degrees = find_degrees(sample_plans.plan(4, 8))
        names = {file: ENGINES[file.partition(".")[0]] for file in files}
        return plain("text", *(spec.write(degrees).files[file] for file, spec in names.items()))

    return samples


def read_schedule(path: Path) -> object:
    from fxpart.schedule.files import implied_edges, load
    from fxpart.schedule.verify import check

    found = load(path)
    return check(found, implied_edges(found))


def schedules(csv: bool) -> Callable[[], list[Sample]]:
    def samples() -> list[Sample]:
        from fxpart.schedule.action import StageEdge
        from fxpart.schedule.make import make
        from fxpart.schedule.text import to_text
        from fxpart.schedule.torch_csv import to_torch_csv

        edges = [StageEdge(k, k + 1) for k in range(2)]
        made = [make("1f1b", (0, 1), 3, edges[:1]), make("gpipe", (0, 1, 2), 2, edges)]
        return plain("text", *(to_torch_csv(s) if csv else to_text(s) for s in made))

    return samples


def read_recording(data: bytes) -> object:
    from fxpart.report.recording_file import decode

    return decode(data, "trace")


def recordings() -> list[Sample]:
    import msgspec
    import sample_plans
    from recordings import recorded

    return plain("json", msgspec.json.encode(recorded(sample_plans.plan(2, 2), 1).chrome_trace()))


# Problems of the solver, and others' priced graphs


def read_problem(kind: str) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        from fxpart.solver import archive
        from fxpart.solver.placement.problem import PlacementProblem, check
        from fxpart.solver.problem import PartitionProblem
        from fxpart.solver.validate import check_problem

        readers: dict[str, Callable[[bytes], object]] = {
            "partition": lambda d: archive.decode(d, PartitionProblem, check_problem, "problem"),
            "placement": lambda d: archive.decode(d, PlacementProblem, check, "problem"),
            "joint": archive.decode_joint_problem,
        }
        return readers[kind](data)

    return read


def problems(kind: str) -> Callable[[], list[Sample]]:
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


def read_instance(data: bytes) -> object:
    from benchmarks.maxload.formats import parse_instance
    from benchmarks.maxload.formats.overrides import DeviceOverrides

    devices = DeviceOverrides()
    if data.lstrip()[:1] != b"{":
        devices = DeviceOverrides(accelerators=2, bandwidth=1e6)
    return parse_instance(data, "file", devices)


def instances() -> list[Sample]:
    folder = TESTS / "fuzz" / "data"
    texts = plain("text", (folder / "pipedream.txt").read_bytes())
    return texts + plain("json", *(p.read_bytes() for p in sorted(folder.glob("instance_*.json"))))


# Annotations


def read_annotations(suffix: str) -> Callable[[bytes], object]:
    def load(path: Path) -> object:
        from fxpart.annotations.files import load_annotations

        return load_annotations(path)

    return in_file(f"annotations{suffix}", load)


def annotations(suffix: str) -> Callable[[], list[Sample]]:
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


def read_profile(path: Path) -> object:
    from fxpart.costmodels.profile_store import Profile

    from fxpart.report.profile import contents, describe_profile

    with Profile(path) as profile:
        return contents(profile), describe_profile(profile)


def profiles() -> list[Sample]:
    from fxpart.costmodels.profile_store import (
        Calibration,
        ContentionProfile,
        MeasurementEnvironment,
        Profile,
        StageMeasurement,
        TimeQuartiles,
    )

    path = scratch() / "made.profile"
    path.unlink(missing_ok=True)
    here = MeasurementEnvironment(device="cpu", chip="chip", threads=1, torch="2.13.0")
    timing = TimeQuartiles(0.5, 0.25, 1.0, 3)
    key = '["aten.relu.default",[["float32",[2,3]]],[["float32",[2,3]]],[],[0]] forward'
    with Profile(path, create=True) as profile:
        profile.put("ops", here, {key: timing}, "2026-01-01")
        whole = StageMeasurement(
            forward=timing, backward=timing, optimizer=timing, rows=2, parts={"a": 1.0}
        )
        profile.put("stages", here, {"stage": whole})
        profile.put("calibrations", here, {"": Calibration(residuals=(("s", 1.0, 2.0),))})
        profile.put("crowding", here, {"": ContentionProfile(slowdown=(1.0, 1.5))})
    return plain("binary", path.read_bytes())
