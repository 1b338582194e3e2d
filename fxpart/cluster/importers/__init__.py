"""Clusters from the files of other tools: NCCL tests, Paddle, Slurm, NVIDIA topology."""
