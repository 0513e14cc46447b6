"""What a run remembers of its data."""

import dataclasses
import json

import pytest

from relattn.data.source import ImageInfo, TextInfo, read_info

IMAGES = ImageInfo(
    name="columns",
    class_names=("left", "right"),
    image_shape=(5, 3, 1),
    mean=(0.25,),
    std=(0.5,),
    num_train=101,
    origin="noise",
)
TEXT = TextInfo(
    name="plays",
    tokenizer="bytes",
    vocab_size=256,
    context_length=7,
    num_train=11,
    origin="a file",
)


@pytest.mark.parametrize("info", [IMAGES, TEXT])
def test_json_holds_all_of_it(info):
    values = json.loads(json.dumps(dataclasses.asdict(info)))
    assert read_info(values) == info


def test_a_run_from_before_there_was_text_is_of_images():
    values = dataclasses.asdict(IMAGES)
    del values["kind"]
    assert read_info(values) == IMAGES


def test_too_few_examples_for_a_batch():
    with pytest.raises(ValueError, match="batch_size=13 with 11 training windows"):
        TEXT.steps_per_epoch(13)
    assert IMAGES.steps_per_epoch(13) == 7
