"""SLURM: an sbatch script that runs torchrun on every node.

Source: the manual pages sbatch(1) and srun(1) of Slurm 22.05 and 24.05.
"""

from __future__ import annotations

import shlex

from fxpart.launch.schedulers.job_description import JobDescription, SchedulerSpec

# Before the end of the time limit, so that the program saves (SIGTERM) and can be resumed.
_NOTICE = 120  # seconds


def write_sbatch(job: JobDescription) -> str:
    """Return the script; it is resubmitted by SLURM after a node failure."""
    folder = job.folder.rstrip("/") or "/"
    rows = [
        ("job-name", job.name),
        ("nodes", str(job.nodes)),
        ("ntasks-per-node", "1"),
        ("output", f"{folder}/slurm-%j.log"),
        ("open-mode", "append"),
        ("signal", f"TERM@{_NOTICE}"),
    ]
    if job.gpus:
        rows.append(("gpus-per-node", str(job.devices)))
    if job.cpus:
        rows.append(("cpus-per-task", str(job.cpus)))
    if job.hours:
        rows.append(("time", job.hours))
    rows += job.list_options()
    heads = [f"#SBATCH --{name}={shlex.quote(value)}" for name, value in rows]
    heads.append("#SBATCH --requeue" if job.restarts else "#SBATCH --no-requeue")
    return "\n".join(
        [
            "#!/bin/bash",
            "# Written by `fxpart launch --slurm`. SLURM opens the log before the script begins:",
            f"# the folder {shlex.quote(folder)} must exist when this file is submitted.",
            *heads,
            "",
            "set -euo pipefail",
            'cd "${SLURM_SUBMIT_DIR:-.}"',
            f"mkdir -p {shlex.quote(folder)}/logs",
            # sed reads all names: with head, scontrol could end with SIGPIPE, and the script too.
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
            "",
            "# One torchrun per node; it starts the ranks, and starts them again after a failure.",
            "srun --kill-on-bad-exit=1 torchrun \\",
            '    --nnodes="$SLURM_JOB_NUM_NODES" \\',
            f"    --nproc-per-node={job.devices} \\",
            f"    --max-restarts={job.restarts} \\",
            "    --rdzv-backend=c10d \\",
            '    --rdzv-id="$SLURM_JOB_ID" \\',
            f'    --rdzv-endpoint="$head:{job.port}" \\',
            f"    --log-dir={shlex.quote(folder)}/logs --redirects=3 --tee=3 \\",
            f"    {job.quote_program()}",
            "",
        ]
    )


SLURM = SchedulerSpec(
    name="slurm",
    file="job.sbatch",
    summary="an sbatch script",
    write=write_sbatch,
    submit=lambda path: ("sbatch", path),
    needs_folder=True,
)
