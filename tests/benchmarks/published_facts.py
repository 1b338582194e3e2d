"""What a source's own repository says of its runs beyond the rows of the file, with its address.

No number here was chosen to fit a run, but for the one that says so.
"""

from __future__ import annotations

from typing import Any

# Bytes/s between hosts for each GPU, where the source's network is not that of the device's preset.
# bigscience: on V100 as its own all-reduces of 4 GB, 7 to 11 GB/s for 4 GPUs (kernels.json). On
# A100 one ring of all ranks gets 5.06 GB/s of a host's four cards, but each GPU has a group of its
# own: 512, 1,024, 1,536 and 2,048 samples take 35.77, 59.65, 83.11 and 107.12 s with 12 stages of
# 4 tensor ranks and 8 replicas, microbatches of 2 (chronicles-prequel.md, "Batchsize Warmup"). Of
# the 12.0 s that do not grow with the batch, 11 microbatches of fill are 8.2 s; in the others 6.7
# GB of gradients are scattered and 6.7 GB of weights gathered. No such run is in the file.
NETWORKS = {
    ("bigscience", "A100-SXM4-80GB"): 3.6e9,
    ("bigscience", "V100-SXM2-32GB"): 8.5e9 / 4,
    ("bigscience", "V100-SXM2-16GB"): 8.5e9 / 4,
    ("neox20b", "A100-SXM4-40GB"): 1.25e10 * 0.9,
}
# GPUs that NVLink joins over several hosts, by device model: NVIDIA's GB200 NVL72 and GB300 NVL72.
DOMAINS = {"gb200": 72, "gb300": 72}
# Seconds of a block and microbatch in which the GPU waits for launches and these for the GPU:
# without CUDA_LAUNCH_BLOCKING=1 runs of more than 100 billion parameters hung. Its cost on 80 GPUs,
# 91.04 instead of 97.20 TFLOP/s of each GPU (chronicles-prequel.md of the source).
BLOCKED = {("bigscience", "A100-SXM4-80GB"): 3.5e-3}
# Bytes/s where NCCL copies through the host's memory. Chosen to fit.
HOST_COPIES = 8e9
# lambda: its script set NCCL_P2P_DISABLE=1 from 2022-10-16 to 2023-02-06 (commits 0a684b62 and
# aad0d1cd of github.com/lambdal/deeplearning-benchmark); these are the GPUs whose logs have a date
# between.
WITHOUT_PEERS = {
    ("lambda", gpu)
    for gpu in (
        "V100-SXM2-16GB", "RTX3090-24GB", "RTX4090-24GB", "RTXA6000-48GB", "A100-SXM4-80GB",
        "H100-PCIe-80GB",
    )
}  # fmt: skip
# Generation of attention kernels where the row's text does not say it: llm-foundry, 2023.
GENERATIONS = {"mosaic": 1}
# Bytes for each logit, where the source's loss is one kernel.
LOSSES = {"mosaic": 4, "nemo": 6}

# Bytes of a gradient, where the source's recipes set them: grad_reduce_in_fp32=False in
# perf_recipes/_common.py of github.com/NVIDIA-NeMo/Megatron-Bridge, --grad-reduce-in-bf16 in
# examples/llama of github.com/NVIDIA/Megatron-LM.
GRADIENTS = {"nemo": 2}
# Deviation of the logarithm of repeated measurements, by source: of runs on at least so many GPUs.
# bigscience: 129, 217, 125 and 225 s on four days on 64 V100 (experiments/gpt2.md, which says that
# all its results are within 40 %); 120.2 to 121.5 s on 384 A100.
REPEATED = {"bigscience": {("V100-SXM2-32GB", 32): 0.28, ("A100-SXM4-80GB", 1): 0.005}}
# Sources whose library runs as many microbatches as there are stages where none are given:
# pipeline_parallel_microbatches of torchtitan's configuration at the end of 2024.
AS_STAGES = ("torchtitan",)
# Runs with something that fxpart does not have, of which their rows say nothing.
BEYOND = {
    # cpu_offloading_num_layers = 40 of 80 in perf_recipes/llama/gb200/llama3.py
    "nemo/25.11/llama3-70b/gb200x64-fp8-mb2": "activations of 40 layers are kept on the host",
}

# Fields of rows that the source's history corrects.
# nanogpt: the run of 4 days was started after 001c1e7b (2023-01-27) and reported in d2705bd9
# (2023-01-31) of github.com/karpathy/nanoGPT; the other two figures are of 2022-12-30. Fused
# attention came with ae06d0b1 (2023-01-30), the padded vocabulary with 77e7e04c (2023-02-04).
# lambda: "AMP" is opt_level="O2" of apex: 16-bit weights and gradients, float32 master weights
# (run_squad.py of github.com/LambdaLabsML/DeepLearningExamples).
_FIELDS: dict[str, dict[str, dict[str, Any]]] = {
    "nanogpt": {"model": {"vocab": 50257}, "": {"attention": "math (not fused)"}},
    "lambda": {"precision": {"printed": "apex O2"}},
}


def correct(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with the fields that its source's history gives."""
    found = dict(row)
    for group, fields in _FIELDS.get(row["source"], {}).items():
        found |= {group: row[group] | fields} if group else fields
    stages = row["layout"].get("pp") or 1
    if row["source"] in AS_STAGES and stages > 1 and not row.get("microbatches"):
        found["microbatches"] = stages
    return found
