"""A SampleBuffer with plug-ins, on a store that outlives it."""

from tests.unit.actors.samples.conftest import make_stage, stage

__all__ = ("make_stage", "stage")
