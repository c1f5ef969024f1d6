"""Synthetic checkpoints: the exact layout of a release, filled with seeded numbers instead of trained weights."""

from huorn.synth.presets import PRESETS
from huorn.synth.synthesize import SynthReport, synthesize

__all__ = ["PRESETS", "SynthReport", "synthesize"]
