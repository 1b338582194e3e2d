"""Places that read files which nobody else wrote, or read them for one of the readers.

By module, or function below it. Everything else that opens a file has a line in readers.py.
"""

TRUSTED = {
    "files": "reads for its callers, which are the readers",
    "checkpoint.files": "reads for the modules beside it",
    "checkpoint.run_lock.lock_folder": "locks the file",
    "cli.explain._page": "a page of the package",
    "cli.elastic_run._digest": "only its digest is taken",
    "cluster.host_detection": "the kernel's",
    "cluster.cpu_quota": "the kernel's",
    "cluster.presets._all": "a data file of the package",
    "cluster.presets._architectures": "a data file of the package",
    "compat.gloo_threads": "the kernel's",
    "launch.process_status": "the kernel's",
    "profiling": "files of its own child processes, in a temporary folder",
    "costmodels.profile_store.processor": "the kernel's",
    "runtime.asynchronous.stage_group.AsyncStageGroup.__init__": "opens communicators, no file",
    "runtime.engine.PipelineEngine.__init__": "opens communicators, no file",
    "runtime.transport.process_group_transport.ProcessGroupTransport.open": "no file either",
    "runtime.callbacks.JsonLines._open": "writes",
    "runtime.checkpointing.memory_replicas": "a run's own, in its user's memory",
    "runtime.checkpointing.memory_store": "the same",
    "runtime.checkpointing.file_transfer.send_file": "the same",
    "runtime.monitor.memory_footprint._read_status": "the kernel's",
    "runtime.host.cpu_affinity._read": "the kernel's",
    "runtime.training_run.json_lines.JsonLinesAppender.__init__": "writes",
    "runtime.transport.handshake._find_loopback_user": "the kernel's",
    "runtime.transport.shared_memory_arena.map_region": "memory of a process of the same run",
    "diagnostics.flight_recorder._create_mapped_file": "a new file",
}
