"""Static and dynamic placement on a canvas."""

import itertools

import numpy as np
import pytest
from ml_collections import ConfigDict

from relattn.data.base import DataSource, batch_indices
from relattn.data.canvas import PLACEMENTS, draw_corners, place_on_canvas
from relattn.data.images import ImageData, ImageSplit, channel_statistics
from relattn.data.load import load_images
from tests.helpers.shards import check_shards_equal_batches

SHAPE = (3, 5, 2)
CANVAS = 11


def make_split(n, seed):
    images = np.random.default_rng(seed).integers(1, 256, (n, *SHAPE), np.uint8)
    return ImageSplit(images, np.arange(n, dtype=np.int32))


def make_data():
    train = make_split(23, 0)
    mean, std = channel_statistics(train.images)
    return ImageData(
        name="noise",
        train=train,
        validation=make_split(7, 1),
        test=make_split(13, 2),
        class_names=tuple(map(str, range(23))),
        mean=mean,
        std=std,
        origin="noise",
    )


def placed(placement, **keys):
    config = ConfigDict({"placement": placement, "canvas": CANVAS, **keys})
    return place_on_canvas(make_data(), config)


def find_corners(images):
    """Returns the corners of the non-zero pixels, all of which must be present."""
    occupied = images.any(-1)
    assert (occupied.sum((1, 2)) == 15).all()
    return np.stack([occupied.any(2).argmax(1), occupied.any(1).argmax(1)], axis=1)


def crop(images):
    return np.stack(
        [
            image[row : row + 3, column : column + 5]
            for image, (row, column) in zip(images, find_corners(images), strict=True)
        ]
    )


def batches(data, count, start_step=0, seed=3):
    with data.train_loader(5, seed, start_step) as loader:
        return dict(itertools.islice(loader, count))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placement_keeps_pixels_and_labels(placement):
    data = placed(placement)
    assert isinstance(data, DataSource)
    assert data.info.image_shape == data.image_shape == (11, 11, 2)
    raw = make_data()
    for step, batch in batches(data, 9).items():
        indices = batch_indices(23, 5, 3, step)
        np.testing.assert_array_equal(batch["label"], indices)
        assert batch["image"].dtype == np.uint8
        np.testing.assert_array_equal(crop(batch["image"]), raw.train.images[indices])
    for name, split in data.eval_splits.items():
        original = raw.validation if name == "validation" else raw.test
        np.testing.assert_array_equal(split.labels, original.labels)
        np.testing.assert_array_equal(crop(split.images), original.images)


def test_static_images_are_centred():
    data = placed("static")
    splits = data.eval_splits
    images = [splits[name].images for name in ("validation", "test", "test_static")]
    images += [batch["image"] for batch in batches(data, 9).values()]
    for array in images:
        assert (find_corners(array) == [4, 3]).all()
    assert len(np.unique(find_corners(splits["test_dynamic"].images), axis=0)) > 5
    assert splits["test"] is splits["test_static"]


def test_dynamic_positions_are_uniform():
    corners = draw_corners(6300, SHAPE, CANVAS, [0])
    counts = np.zeros((9, 7), int)
    np.add.at(counts, tuple(corners.T), 1)
    # 63 positions with 100 images each, within 5 standard errors.
    assert (abs(counts - 100) < 5 * np.sqrt(100 * 62 / 63)).all()


@pytest.mark.parametrize(("placement", "differ"), [("dynamic", 1), ("dynamic_once", 0)])
def test_training_positions_differ_between_epochs_or_not(placement, differ):
    data = placed(placement)
    steps = batches(data, 4 * 6)

    def corners(epoch):
        found = np.full((23, 2), -1)
        for step in range(4 * epoch, 4 * (epoch + 1)):
            found[steps[step]["label"]] = find_corners(steps[step]["image"])
        return found

    epochs = [corners(epoch) for epoch in range(6)]
    for one, other in itertools.combinations(epochs, 2):
        both = (one[:, 0] >= 0) & (other[:, 0] >= 0)
        assert both.any()
        share = (one[both] != other[both]).any(1).mean()
        assert share > 0.8 if differ else share == 0


def test_training_positions_are_a_pure_function_of_seed_and_step():
    steps = batches(placed("dynamic"), 11)
    for step, batch in batches(placed("dynamic"), 4, start_step=6).items():
        np.testing.assert_array_equal(batch["image"], steps[step]["image"])
    (other,) = batches(placed("dynamic"), 1, seed=4).values()
    assert other["image"].tolist() != steps[0]["image"].tolist()


def test_evaluation_positions_depend_on_split_seed_only():
    static, dynamic = placed("static"), placed("dynamic")
    for name in ("test_static", "test_dynamic"):
        np.testing.assert_array_equal(
            static.eval_splits[name].images, dynamic.eval_splits[name].images
        )
    once = placed("dynamic_once")
    for one in (dynamic, once):
        assert one.test is one.test_dynamic
    np.testing.assert_array_equal(once.validation.images, dynamic.validation.images)
    other = placed("dynamic", split_seed=1)
    assert other.test.images.tolist() != dynamic.test.images.tolist()
    first = find_corners(dynamic.validation.images)
    assert first.tolist() != find_corners(dynamic.test.images)[:7].tolist()


def test_statistics_include_the_canvas():
    data = placed("dynamic")
    images = np.concatenate(
        [data.training_batch(np.arange(23), 0, epoch)["image"] for epoch in range(2)]
    )
    mean, std = channel_statistics(images)
    np.testing.assert_allclose(data.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(data.std, std, rtol=1e-5)


def test_canvas_as_large_as_the_images():
    data = placed("dynamic", canvas=5)
    assert set(find_corners(data.test.images)[:, 1]) == {0}


@pytest.mark.slow
def test_mnist_on_canvas_of_84_pixels():
    config = ConfigDict({"name": "mnist", "num_validation": 11, "placement": "dynamic"})
    data = load_images(config)
    assert data.image_shape == (84, 84, 1)
    assert data.test.images.shape == (1000, 84, 84, 1)
    assert data.origin.endswith("anywhere on 84x84 pixels")
    assert load_images(ConfigDict({"name": "mnist", "placement": ""})).image_shape == (
        28,
        28,
        1,
    )


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"placement": "dynamc"}, "placement 'dynamc': did you mean 'dynamic'"),
        ({"canvas": 4}, "canvas=4 must be an integer of at least 5, .* images of 3x5"),
        ({"canvas": 9.5}, "canvas=9.5 must be an integer of at least 5"),
        # 7 + 2 * 13 images with 2 channels.
        ({"canvas": 10**6}, "canvas=1000000 needs over 17 GB .* must be at most 16133"),
    ],
)
def test_invalid_options_raise(keys, message):
    with pytest.raises(ValueError, match=message):
        placed(**{"placement": "static", **keys})


def test_volumes_are_refused():
    volumes = np.zeros((5, 2, 3, 3, 1), np.uint8)
    labels, names = np.arange(5) % 2, ("a", "b")
    data = ImageData.from_arrays("mine", volumes, labels, names, num_validation=1)
    with pytest.raises(ValueError, match="placement='static' places images of .*not v"):
        place_on_canvas(data, ConfigDict({"placement": "static"}))


def test_the_shards_of_processes_equal_the_batch():
    data = placed("dynamic")
    check_shards_equal_batches(data, batch_size=6, num_shards=3)
