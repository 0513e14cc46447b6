"""Image folders, one folder per class."""

import os
import pathlib
import tarfile

import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from relattn.data import image_list, load
from relattn.data.folder import find_files
from relattn.data.image_list import read_list
from relattn.data.images import ImageData
from relattn.data.load import load_data, load_images
from tests.data.test_image_io import with_size
from tests.helpers.unprivileged import public_folder, without_privileges

CIFAR10 = pathlib.Path(__file__).parents[3] / "shared/data/cifar10/cifar10_jpeg.tar.xz"


def read_folder(root, **options):
    return read_list(find_files(root), **options)


def write(root, name, pixels):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).save(path)
    return path


@pytest.fixture
def root(tmp_path):
    for index, name in enumerate(
        ["train/b/2.png", "train/b/1.PNG", "train/a/3.png", "test/b/1.png"]
    ):
        write(tmp_path, name, np.full((3, 5, 3), index))
    return tmp_path


def test_classes_and_files_are_sorted(root):
    train, test, class_names, origin, validation = read_folder(root)
    assert validation is None
    assert class_names == ("a", "b")
    assert train.images.shape == (3, 3, 5, 3) and train.images.dtype == np.uint8
    assert train.images[:, 0, 0, 0].tolist() == [2, 1, 0]
    assert train.labels.tolist() == [0, 1, 1] and train.labels.dtype == np.int32
    assert test.labels.tolist() == [1]
    assert origin == f"PNG files in {root}"


@pytest.mark.parametrize("name", ["train", "train/b"])
def test_a_folder_without_permission_is_refused(name):
    with public_folder() as root:
        for file in ["train/a/1.png", "train/b/2.png"]:
            write(root, file, np.zeros((3, 5, 3)))
        (root / name).chmod(0)
        config = ConfigDict({"name": "b", "source": "folder", "data_dir": str(root)})
        message = rf"{name} cannot be read \(Permission denied\): make it readable"
        with without_privileges(), pytest.raises(OSError, match=message):
            load_data(config)
        (root / name).chmod(0o755)


def test_load_images_accepts_any_name_for_a_folder(root):
    config = ConfigDict({"name": "my flowers", "source": "folder"})
    config.data_dir = str(root)
    config.num_validation = 1
    data = load_images(config)
    assert (len(data.train), len(data.validation), len(data.test)) == (2, 1, 1)
    assert (data.name, data.num_classes, data.image_shape) == (
        "my flowers",
        2,
        (3, 5, 3),
    )


def test_origin_names_the_file_formats(root):
    write(root, "test/a/1.jpeg", np.zeros((3, 5, 3)))
    assert read_folder(root).origin == f"JPEG and PNG files in {root}"


def test_grey_images_have_one_channel(tmp_path):
    for name in ("train/a/1.png", "train/b/1.png"):
        write(tmp_path, name, np.full((3, 5), 7))
    write(tmp_path, "test/a/1.png", np.full((3, 5), 11))
    train, test, *_ = read_folder(tmp_path)
    assert train.images.shape == (2, 3, 5, 1)
    assert (test.images == 11).all()


def test_grey_image_in_colour_set_is_repeated(root):
    write(root, "test/a/1.png", np.full((3, 5), 11))
    test = read_folder(root).test
    assert (test.images[0] == 11).all() and test.images.shape[-1] == 3


def test_grey_images_before_the_first_in_colour_are_repeated(root):
    write(root, "train/a/1.png", np.full((3, 5), 11))
    write(root, "train/a/2.png", np.full((3, 5), 13))
    train = read_folder(root).train
    assert train.images.shape == (5, 3, 5, 3)
    assert train.images[:, 0, 0].tolist() == [[x] * 3 for x in (11, 13, 2, 1, 0)]


@pytest.mark.parametrize("name", ["validation", "val", "valid"])
def test_validation_images_of_a_folder_are_used(root, name):
    write(root, f"{name}/a/1.png", np.full((3, 5, 3), 17))
    assert (read_folder(root).validation.images == 17).all()
    config = ConfigDict({"name": "mine", "source": "folder", "data_dir": str(root)})
    data = load_data(config)
    assert (len(data.train), len(data.validation), len(data.test)) == (3, 1, 1)
    config.num_validation = 1
    with pytest.raises(ValueError, match="have validation images of their own"):
        load_data(config)
    write(root, "validation/a/2.png", np.zeros((3, 5, 3)))
    write(root, "val/b/1.png", np.zeros((3, 5, 3)))
    with pytest.raises(ValueError, match="two folders of validation images, val"):
        find_files(root)


def test_16_bit_greys_are_read(tmp_path):
    for name in ("train/a/1.png", "train/b/1.png"):
        path = write(tmp_path, name, np.zeros((3, 5)))
        Image.fromarray(np.full((3, 5), 1000, np.uint16)).save(path)
    images = read_folder(tmp_path)[0].images
    assert images.shape == (2, 3, 5, 1) and (images == 3).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_8_bit_modes_are_read(tmp_path, mode):
    suffix, error = ("jpg", 4) if mode == "CMYK" else ("png", 0)
    image = Image.new("RGB", (5, 3), (255, 0, 51)).convert(mode)
    for part in ("train/a", "train/b", "test/a"):
        path = tmp_path / part / f"1.{suffix}"
        path.parent.mkdir(parents=True)
        image.save(path)
    kind = "L" if mode in ("1", "L", "LA") else "RGB"
    expected = np.atleast_3d(np.asarray(image.convert(kind), int))
    images = read_folder(tmp_path)[0].images
    assert images.shape == (2, *expected.shape)
    assert abs(images[0] - expected).max() <= error


def test_what_is_left_out_is_named(root):
    expected = read_folder(root)
    # Reading a pipe without a writer would block.
    os.mkfifo(root / "train" / "a" / "x.png")
    (root / "train" / "a" / "y.png").mkdir()
    (root / "train" / "c").mkdir()
    (root / "test" / "b" / "notes.txt").write_text("not an image")
    write(root, "testing/b/1.png", np.zeros((7, 7, 3)))
    write(root, "tests/b/1.png", np.zeros((7, 7, 3)))
    write(root, "train/.hid/1.png", np.zeros((7, 7, 3)))
    write(root, "test/b/.1.png", np.zeros((7, 7, 3)))
    message = (
        "left out classes without images: train/c; sub-folders of classes: "
        "train/a/y.png; other files: train/a/x.png; other files: test/b/notes.txt; "
        "other folders: testing, tests"
    )
    with pytest.warns(UserWarning, match=message):
        found = read_folder(root)
    assert found[2:4] == expected[2:4] == (("a", "b"), f"PNG files in {root}")
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(ours.images, theirs.images)


def test_many_names_are_cut(root):
    for index in range(5):
        (root / "train" / f"c{index}").mkdir()
    with pytest.warns(UserWarning, match="train/c0, train/c1, train/c2 and 2 more"):
        read_folder(root)


def test_mixed_sizes_raise(root):
    write(root, "train/b/7.png", np.zeros((7, 11, 3)))
    with pytest.raises(ValueError, match=r"b/7.png has 11x7 pixels, but .* has 5x3"):
        read_folder(root)


def test_corrupt_image_raises(root):
    (root / "train" / "b" / "1.PNG").write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"1.PNG cannot be read as an image"):
        read_folder(root)


def test_truncated_image_raises(root):
    path = write(
        root, "train/b/4.jpg", np.random.default_rng(0).integers(0, 256, (3, 5, 3))
    )
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"4.jpg cannot be read as an image"):
        read_folder(root)


def test_class_without_training_images_raises(root):
    write(root, "test/c/1.png", np.zeros((3, 5, 3)))
    with pytest.raises(ValueError, match="class 'c' of .* has no training images"):
        read_folder(root)


def test_a_single_class_raises(tmp_path):
    write(tmp_path, "train/all/1.png", np.zeros((3, 5, 3)))
    with pytest.raises(ValueError, match="are of one class, 'all': add images of anot"):
        find_files(tmp_path)


def test_missing_folder_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train is missing: expected train/"):
        read_folder(tmp_path)


def test_without_test_images_those_of_validation_are_used(tmp_path):
    for index in range(7):
        name = f"train/{'ab'[index % 2]}/{index}.webp"
        write(tmp_path, name, np.full((3, 5, 3), index))
    config = ConfigDict({"name": "mine", "source": "folder", "num_validation": 2})
    config.data_dir = str(tmp_path)
    data = load_data(config)
    assert isinstance(data, ImageData)
    assert data.eval_splits["test"] is data.eval_splits["validation"]
    assert data.info.origin == (
        f"WebP files in {tmp_path}, without test images: the validation images are the "
        "test images"
    )


def test_images_of_several_sizes_are_streamed(tmp_path):
    sizes = {"a": (11, 7), "b": (13, 17)}
    for label, (name, (height, width)) in enumerate(sizes.items()):
        for index in range(3):
            pixels = np.full((height, width, 3), 100 * label + index)
            write(tmp_path, f"train/{name}/{index}.png", pixels)
    write(tmp_path, "test/b/1.png", np.full((5, 23), 211))
    config = ConfigDict({"name": "mine", "source": "folder", "num_validation": 2})
    config.update(data_dir=str(tmp_path), image_size=5)
    data = load_data(config)
    assert data.info.image_shape == (5, 5, 3) and data.info.streamed
    assert (data.info.num_train, data.info.class_names) == (4, ("a", "b"))
    (batch,) = data.eval_splits["test"].batches(2)
    assert (batch["image"][0] == 211).all() and batch["label"][0] == 1
    with data.train_loader(4, seed=0) as loader:
        _, batch = next(loader)
    assert batch["image"].shape == (4, 5, 5, 3)
    colors = batch["image"][:, 0, 0, 0]
    assert (batch["image"] == colors[:, None, None, None]).all()
    np.testing.assert_array_equal(colors // 100, batch["label"])
    assert len(set(colors.tolist())) == 4
    file = tmp_path / "test" / "b" / "1.png"
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"b/1.png cannot be .*: replace or delete it"):
        list(data.eval_splits["test"].batches(2))


def test_large_images_of_one_size_are_streamed(root, monkeypatch):
    config = ConfigDict({"name": "mine", "source": "folder", "num_validation": 1})
    config.data_dir = str(root)
    for size in (5, (3, 5)):
        config.image_size = size
        assert isinstance(load_data(config), ImageData)
        del config.image_size
    monkeypatch.setattr(load, "MEMORY_BYTES", 3 * 3 * 5 * 4 - 1)
    assert load_data(config).info.streamed


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("augment", "randaugmnt", "'randaugmnt': did you mean 'randaugment'"),
        ("interpolation", "cubic", "unknown data.interpolation 'cubic': did you mean"),
        ("crop_pct", 87.5, "data.crop_pct=87.5 must be a fraction of the short side"),
        ("image_size", "8", "data.image_size='8' must be an integer"),
        ("skip_unreadable", "False", "skip_unreadable='False' must be True or False"),
        ("num_validation", 3, "num_validation=3 must be an integer from 0 to 2"),
    ],
)
def test_options_are_checked_before_images_are_decoded(
    root, monkeypatch, option, value, message
):
    monkeypatch.setattr(load, "decode_list", None)
    config = ConfigDict({"name": "mine", "source": "folder", "data_dir": str(root)})
    config[option] = value
    with pytest.raises(ValueError, match=message):
        load_data(config)


def test_every_file_is_opened_once(root, monkeypatch):
    opened = []
    open_image = image_list.open_image

    def count(path, *args):
        opened.append(path)
        return open_image(path, *args)

    monkeypatch.setattr(image_list, "open_image", count)
    config = ConfigDict({"name": "mine", "source": "folder", "num_validation": 1})
    config.data_dir = str(root)
    load_data(config)
    assert sorted(opened) == sorted(root.glob("*/*/*"))


@pytest.fixture
def damaged(tmp_path):
    """Photographs of one size, and five files that are none."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 50, 3))
    for name in ("train/a/1.jpg", "train/b/1.png", "train/b/2.jpg", "test/a/1.jpg"):
        write(tmp_path, name, noise)
    whole = (tmp_path / "train/b/2.jpg").read_bytes()
    (tmp_path / "train/a/0.jpg").write_bytes(b"")
    (tmp_path / "train/a/2.png").write_text("to be, or not to be")
    (tmp_path / "train/b/3.jpg").write_bytes(whole[: len(whole) // 2])
    bomb = with_size((tmp_path / "train/b/1.png").read_bytes(), 10**5, 10**5)
    (tmp_path / "train/b/4.png").write_bytes(bomb)
    (tmp_path / "test/a/2.jpg").write_bytes(whole[:20])
    config = ConfigDict({"name": "mine", "source": "folder", "num_validation": 1})
    config.update(data_dir=str(tmp_path), image_size=8)
    return tmp_path, config


@pytest.mark.parametrize("streamed", [False, True])
def test_unreadable_images_are_found_together(damaged, streamed):
    root, config = damaged
    if streamed:
        write(root, "train/b/9.png", np.zeros((7, 5)))
    message = (
        rf"^5 of the {10 if streamed else 9} images of {root} cannot be read: "
        r"train/a/0.jpg \(not a JPEG, .*\); train/a/2.png \(not a .*\); train/b/3.jpg "
        r"\(OSError: .*truncated.*\); (.* \(.*\)){2}: replace or delete them, or set "
        r"data.skip_unreadable=True$"
    )
    with pytest.raises(ValueError, match=message) as raised:
        load_data(config)
    assert len(str(raised.value).splitlines()) == 1
    config.skip_unreadable = True
    message = (
        "left out unreadable images: train/a/0.jpg, train/a/2.png, train/b/3.jpg and 2 "
        "more"
    )
    with pytest.warns(UserWarning, match=message):
        data = load_data(config)
    assert data.info.streamed == streamed
    count = 3 if streamed else 2
    assert data.info.num_train == count
    assert data.info.class_names == ("a", "b")
    labels = []
    for split in data.eval_splits.values():
        (batch,) = split.batches(4)
        labels += batch["label"][batch["weight"] > 0].tolist()
    with data.train_loader(count, seed=0) as loader:
        _, batch = next(loader)
    labels += batch["label"].tolist()
    # Of train: one of a, two or three of b; of test one of a.
    assert sorted(labels) == [0, 0, *[1] * count]


def test_one_unreadable_image_is_named_with_the_fix(root):
    (root / "train" / "b" / "1.PNG").write_bytes(b"")
    message = r"b/1.PNG cannot be read as an image .*: replace .* data.skip_unreadable"
    with pytest.raises(ValueError, match=message):
        read_folder(root)


def test_a_class_without_readable_images_is_left_out(root):
    (root / "train" / "a" / "3.png").write_bytes(b"")
    message = "unreadable images: train/a/3.png; classes without readable .*: a"
    with pytest.warns(UserWarning, match=message):
        train, _, class_names, *_ = read_folder(root, skip_unreadable=True)
    assert class_names == ("b",) and train.labels.tolist() == [0, 0]
    write(root, "test/a/1.png", np.zeros((3, 5, 3)))
    message = (
        "none of the training images of class 'a' of .* can be read; the first is .*a/3"
    )
    with pytest.raises(ValueError, match=message):
        read_folder(root, skip_unreadable=True)


def test_many_unreadable_images_are_counted(root):
    for index in range(13):
        (root / "train" / "a" / f"x{index:02}.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"^13 of .*a/x09.png \(.*\) and 3 more: rep"):
        read_folder(root)


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_part_without_readable_images_raises(root, part):
    for path in (root / part).glob("*/*"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=f"none of the {part} images of ") as raised:
        read_folder(root, skip_unreadable=True)
    assert str(raised.value).endswith(": replace or delete them")


def test_images_are_read_upright_and_on_a_background(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.zeros((5, 3, 4), np.uint8)
    pixels[1:, :, 3], pixels[..., 0] = 255, 200
    path = write(tmp_path, "train/a/1.png", pixels)
    write(tmp_path, "train/b/2.png", np.zeros((3, 5, 3)))
    Image.fromarray(pixels).save(path, exif=exif)
    config = ConfigDict({"name": "mine", "source": "folder", "background": "#0000ff"})
    config.update(data_dir=str(tmp_path), num_validation=1)
    data = load_data(config)
    assert data.image_shape == (3, 5, 3)
    images = np.concatenate([data.train.images, data.validation.images])
    expected = np.zeros((3, 5, 3))
    # The first row, which is transparent, is the last column of the turned image.
    expected[:, :4, 0] = 200
    expected[:, 4] = 0, 0, 255
    assert any((image == expected).all() for image in images)
    config.background = "blu"
    with pytest.raises(ValueError, match="unknown data.background 'blu'"):
        load_data(config)


# Checks that are quadratic in the number of files take minutes.
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(not CIFAR10.exists(), reason="shared/data/cifar10 is missing")
def test_folder_of_60_000_images(tmp_path):
    with tarfile.open(CIFAR10) as archive:
        archive.extractall(tmp_path, filter="data")
    config = ConfigDict({"name": "cifar10", "source": "folder"})
    config.update(data_dir=str(tmp_path), num_validation=5000)
    info = load_data(config).info
    assert (info.num_train, info.num_classes) == (45_000, 10)
    assert info.image_shape == (32, 32, 3) and not info.streamed


def test_folder_without_images_raises(tmp_path):
    (tmp_path / "train" / "a").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"train holds no images: expected train/"):
        read_folder(tmp_path)


def test_empty_data_dir_raises():
    with pytest.raises(ValueError, match="data.data_dir is empty"):
        load_images(ConfigDict({"name": "flowers", "source": "folder"}))
