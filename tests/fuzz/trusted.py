"""Places that read files which nobody else wrote, or read them for one of the readers.

By module, or function below it. Everything else that opens a file has a line in readers.py.
"""

TRUSTED = {
    "bounded": "reads for its callers, which are the readers",
    "checkpoint.files": "reads for the modules beside it",
    "cli.explain._page": "a page of the package",
    "cli.supervised._digest": "only its digest is taken",
    "cluster_io.detect": "the kernel's",
    "cluster_io.quota": "the kernel's",
    "cluster_io.presets._all": "a data file of the package",
    "compat.gloo_threads": "the kernel's",
    "launching.proc": "the kernel's",
    "measuring": "files of its own child processes, in a temporary folder",
    "profile.processor": "the kernel's",
    "runtime.callbacks.JsonLines._open": "writes",
    "runtime.checkpoint.copies": "a run's own, in memory that only its user may look into",
    "runtime.checkpoint.couriers.send": "the same",
    "runtime.checkpoint.memory": "the same",
    "runtime.footprint._status": "the kernel's",
    "runtime.pinning._read": "the kernel's",
    "runtime.run.lines.Appender.__init__": "looks whether the last byte is a newline, and writes",
    "runtime.queued.weights": "a context of its own, no file",
    "runtime.shared_memory_slots.attach": "memory of a process of the same run",
    "runtime.weights.stage": "a context of its own, no file",
    "events.ring._mapped": "a new file",
}
