"""Evaluation: shifts, translation error, parameter counts and text samples."""

from relattn.extras import require_train

require_train(__name__)
