"""Stages of fxpart for other pipeline runtimes."""

from fxpart.interop.torch_pipeline import PipelineStages, pipeline_stages

__all__ = ["PipelineStages", "pipeline_stages"]
