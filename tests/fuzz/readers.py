"""Every reader of files in fxpart: a new one is one line in READERS.

A reader takes the bytes of a file (or of one file of a folder, the others being right) and does
what a verb would do with them: read, check, and where that is cheap show.
"""

from __future__ import annotations

from fuzz import deeper, inputs, programs, runs
from fuzz.reading import Reader, in_file

READERS: dict[str, Reader] = {
    "plan": Reader(inputs.read_plan, inputs.plans, ("plan.files.load",)),
    "staleness-penalty": Reader(
        in_file("penalty.json", inputs.read_penalty),
        inputs.penalties,
        ("plan.staleness_penalty.StalenessPenalty.load",),
    ),
    "cluster-json": Reader(
        inputs.read_cluster(".json"), inputs.clusters(".json"), ("cluster.files.load",)
    ),
    "cluster-toml": Reader(
        inputs.read_cluster(".toml"), inputs.clusters(".toml"), ("cluster.files.load",)
    ),
    "nccl": Reader(
        inputs.read_import("nccl-tests"),
        inputs.imports("nccl_*"),
        ("cluster.importers.registry.load",),
    ),
    "topology": Reader(
        inputs.read_import("topo"), inputs.imports("topo_*"), ("cluster.importers.registry.load",)
    ),
    "slurm": Reader(
        inputs.read_import("slurm"), inputs.slurm, ("cluster.importers.registry.load",)
    ),
    "paddle": Reader(
        inputs.read_import("paddle"),
        inputs.imports("paddle_2*"),
        ("cluster.importers.registry.load",),
    ),
    "recognised": Reader(
        inputs.read_import("auto"),
        inputs.imports("nccl*", "topo_*", "paddle_2*"),
        ("cluster.importers.registry.load",),
    ),
    "schedule": Reader(
        in_file("schedule.txt", inputs.read_schedule),
        inputs.schedules(csv=False),
        ("schedule.files.contents",),
    ),
    "schedule-csv": Reader(
        in_file("schedule.csv", inputs.read_schedule),
        inputs.schedules(csv=True),
        ("schedule.files.contents",),
    ),
    "engine-toml": Reader(
        in_file("engine.toml", inputs.read_engine),
        inputs.engines("torchtitan.toml"),
        ("interop.engines.read_configuration",),
    ),
    "engine-arguments": Reader(
        in_file("engine.args", inputs.read_engine),
        inputs.engines("megatron.args", "torchtitan.args"),
        ("interop.engines.read_configuration",),
    ),
    "recording": Reader(inputs.read_recording, inputs.recordings, ("report.recording_file.load",)),
    "recording-compared": Reader(deeper.read_compared, inputs.recordings, ()),
    "partition-problem": Reader(
        inputs.read_problem("partition"), inputs.problems("partition"), ("solver.archive.read",)
    ),
    "placement-problem": Reader(
        inputs.read_problem("placement"), inputs.problems("placement"), ("solver.archive.read",)
    ),
    "joint-problem": Reader(
        inputs.read_problem("joint"), inputs.problems("joint"), ("solver.archive.read",)
    ),
    "instance": Reader(inputs.read_instance, inputs.instances, ()),
    "annotations-json": Reader(
        inputs.read_annotations(".json"),
        inputs.annotations(".json"),
        ("annotations.files.load_annotations",),
    ),
    "annotations-toml": Reader(
        inputs.read_annotations(".toml"),
        inputs.annotations(".toml"),
        ("annotations.files.load_annotations",),
    ),
    "profile": Reader(
        in_file("some.profile", inputs.read_profile),
        inputs.profiles,
        ("costmodels.profile_store.Profile.__init__",),
    ),
    "profile-rows": Reader(deeper.read_row, deeper.rows, ()),
    "paddle-mapping": Reader(deeper.read_mapping, deeper.mappings, ("cli.cluster._text",)),
    "weights": Reader(
        in_file("some.safetensors", programs.read_weights),
        programs.weights,
        ("codegen.tensor_files._header", "codegen.tensor_files.TensorFiles._read"),
    ),
    "program": Reader(
        programs.read_program("program.json"),
        programs.programs("program.json"),
        ("codegen.program_archive._verified",),
    ),
    "program-lane": Reader(
        programs.read_program("program_lane1.json"),
        programs.programs("program.json"),
        ("codegen.program_archive._verified",),
    ),
    "program-manifest": Reader(
        programs.read_program("manifest.json"),
        programs.programs("manifest.json"),
        ("codegen.program_archive._verified",),
    ),
    "program-constants": Reader(
        programs.read_program("constants.safetensors"), programs.constants, ()
    ),
    "reproducer": Reader(
        programs.read_reproducer("graph.json"),
        programs.reproducers("graph.json"),
        ("compiler.reproducer.read_reproducer",),
    ),
    "reproducer-pipeline": Reader(
        programs.read_reproducer("pipeline.json"),
        programs.reproducers("pipeline.json"),
        ("compiler.reproducer.read_reproducer",),
    ),
    "weights-index": Reader(programs.read_index, programs.index, ("codegen.tensor_files._index",)),
    "checkpoint": Reader(
        runs.beside("manifest.json", runs.checkpoint, runs.read_checkpoint),
        runs.manifests,
        ("checkpoint.reader._read_manifest", "checkpoint.reader.Checkpoint.plan"),
    ),
    "signature": Reader(
        runs.beside("manifest.sig", runs.signed, runs.read_signed),
        runs.of(runs.signed, "manifest.sig", "text"),
        ("checkpoint.signature.SigningKey.check", "cli.resumable_run._check_signature"),
    ),
    "signing-key": Reader(
        in_file("some.key", runs.read_key), runs.keys, ("checkpoint.signature.SigningKey.load",)
    ),
    "checkpoint-tensors": Reader(
        runs.beside("rank-00000.safetensors", runs.checkpoint, runs.read_newest),
        runs.tensors,
        ("checkpoint.reader._read_header", "checkpoint.reader.Checkpoint._load"),
    ),
    "checkpoint-headers": Reader(
        in_file("rank.safetensors", runs.read_header),
        runs.header_of(runs.checkpoint, "rank-00000.safetensors"),
        (
            "checkpoint.exchange.tensor_files.read_header",
            "checkpoint.exchange.tensor_files.read_place",
        ),
    ),
    "checkpoint-told": Reader(
        runs.beside("rank-00000.json", runs.partial, runs.read_told),
        runs.of(runs.partial, "rank-00000.json", "json"),
        ("checkpoint.manifest_merge.read_rank_manifests",),
    ),
    "hf-index": Reader(
        runs.beside(
            "model.safetensors.index.json", lambda: runs.converted("dcp"), runs.read_foreign("dcp")
        ),
        runs.of(lambda: runs.converted("dcp"), "model.safetensors.index.json", "json"),
        ("checkpoint.exchange.huggingface._files", "checkpoint.exchange.source.read_text"),
    ),
    "hf-offsets": Reader(
        runs.beside(
            "model-00001-of-00001.safetensors",
            lambda: runs.converted("dcp"),
            runs.read_foreign("dcp"),
        ),
        deeper.in_header(lambda: runs.converted("dcp"), "model-00001-of-00001.safetensors"),
        (),
    ),
    "whole": Reader(
        in_file("whole.safetensors", deeper.read_whole),
        deeper.in_header(lambda: runs.converted("whole"), "as-whole.safetensors"),
        (),
    ),
    "hf-rest": Reader(
        runs.beside("fxpart.json", lambda: runs.converted("dcp"), runs.read_foreign("dcp")),
        runs.of(lambda: runs.converted("dcp"), "fxpart.json", "json"),
        ("checkpoint.exchange.huggingface.SafetensorsFolder.__init__",),
    ),
    "paddle-dictionaries": Reader(
        runs.beside(
            "model_dist0.pdattr.json", lambda: runs.converted("paddle"), runs.read_foreign("paddle")
        ),
        runs.of(lambda: runs.converted("paddle"), "model_dist0.pdattr.json", "json"),
        (
            "checkpoint.exchange.paddle_files.read_strategies",
            "checkpoint.exchange.paddle_files.PaddleFolder.__init__",
        ),
    ),
    "paddle-arrays": Reader(
        runs.beside(
            "model_dist0.pdparams.npz",
            lambda: runs.converted("paddle"),
            runs.read_foreign("paddle"),
        ),
        runs.of(lambda: runs.converted("paddle"), "model_dist0.pdparams.npz", "binary"),
        (
            "checkpoint.exchange.npz.NpzArrays.__init__",
            "checkpoint.exchange.npz.NpzArrays._add_entry",
            "checkpoint.exchange.npz.NpzArrays.read",
        ),
    ),
    "ring": Reader(
        in_file("some.ring", runs.read_ring), runs.rings, ("diagnostics.flight_recorder.read",)
    ),
    "failure": Reader(
        in_file("some.failure.json", runs.read_failure),
        runs.failures,
        ("diagnostics.failure_record.read_failure",),
    ),
    "end": Reader(deeper.read_end, deeper.ends, ()),
    "ledger": Reader(
        in_file("steps.jsonl", runs.read_ledger),
        runs.ledgers,
        ("runtime.training_run.json_lines.read_lines",),
    ),
    "generations": Reader(
        in_file("generations.jsonl", runs.read_generations),
        runs.generations,
        ("runtime.training_run.json_lines.read_lines",),
    ),
    "progress": Reader(
        runs.read_progress, runs.lines, ("elastic.progress._last_lines",), lenient=True
    ),
    "wish": Reader(
        runs.read_wish,
        runs.wishes,
        ("elastic.scale_request.LauncherLock.read_request", "elastic.plan_cache._read_key_digest"),
        lenient=True,
    ),
    "slow ranks": Reader(
        runs.read_slow, runs.slow, ("elastic.slow_rank_report.read_slow_rank_report",), lenient=True
    ),
    "launcher": Reader(
        runs.read_launcher,
        runs.launchers,
        ("checkpoint.run_lock.read_launcher_record", "checkpoint.run_lock._read_record"),
    ),
}
