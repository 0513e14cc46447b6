"""Evaluation: shift robustness, sizes and speed."""

from relattn.extras import require_train

require_train(__name__)
