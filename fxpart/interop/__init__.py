"""fxpart's stages for other people's runtimes."""

from fxpart.interop.pipelining import PipelineStages, pipeline_stages

__all__ = ["PipelineStages", "pipeline_stages"]
