"""fxpart's stages for other people's runtimes."""

from fxpart.interop.torch_pipeline import PipelineStages, pipeline_stages

__all__ = ["PipelineStages", "pipeline_stages"]
