"""What the tests of evaluation share with those of training."""

from tests.training.programs import shared_images as shared_images  # noqa: PLC0414
from tests.training.programs import shared_programs as shared_programs  # noqa: PLC0414
