"""Presets: the runs, columns and published values of every study, by paper."""

from studies.presets.base import Column, Preset, Redraws, Row
from studies.presets.performer import PERFORMER_PRESETS
from studies.presets.rpe_vit import RPE_VIT_PRESETS
from studies.presets.translution import TRANSLUTION_PRESETS

__all__ = ["PRESETS", "Column", "Preset", "Redraws", "Row"]

PRESETS = RPE_VIT_PRESETS | PERFORMER_PRESETS | TRANSLUTION_PRESETS
