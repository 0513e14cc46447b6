"""Evaluation of trained runs: shifted images, reports, predictions and text."""

from relattn.extras import require_train

require_train(__name__)
