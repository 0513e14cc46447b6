"""The embedded subsets equal the selection of `python -m tools.embed`."""

import gzip
import pathlib

import numpy as np
import pytest
from ml_collections import ConfigDict

from relattn.data.load import load_images
from relattn.data.preprocess import preprocess
from relattn.data.registry import EMBEDDED_FOLDER, EMBEDDED_VERSION, SETS
from relattn.data.tfds import read_prepared
from tools.embed import main, movable, read_archive, select

ORIGINALS = pathlib.Path(__file__).parents[3] / "shared" / "data"
NAMES = [name for name, entry in SETS.items() if entry.embedded]
needs_originals = pytest.mark.skipif(
    not ORIGINALS.is_dir(), reason="the original archives are not on this machine"
)


@pytest.mark.quick("mnist")
@pytest.mark.parametrize("name", NAMES)
def test_embedded_sets_have_their_sizes_and_class_balance(name):
    data = load_images(ConfigDict({"name": name}))
    assert (len(data.train), len(data.test)) == (5000, 1000)
    assert data.class_names == SETS[name].class_names
    for split in (data.train, data.test):
        counts = np.bincount(split.labels, minlength=10)
        assert counts.max() - counts.min() <= 1


@pytest.mark.quick("mnist-100")
@pytest.mark.parametrize(("name", "expected"), [("mnist", 100), ("fashion_mnist", 90)])
def test_enough_images_of_class_1_can_move(name, expected):
    test = load_images(ConfigDict({"name": name})).test
    images = test.images[test.labels == 1]
    at_28 = movable(images[..., 0], 8)
    at_32 = movable(np.array(preprocess(images, image_size=32))[..., 0], 8)
    assert at_28.sum() == at_32.sum() == expected
    assert (at_28 == at_32).all()


def test_embedded_data_are_small():
    size = sum(p.stat().st_size for p in EMBEDDED_FOLDER.rglob("*") if p.is_file())
    assert size <= 8e6


def test_licence_and_attribution_are_included():
    text = (EMBEDDED_FOLDER / "README.md").read_text()
    for words in ("Attribution-ShareAlike 3.0", "Burges", "Zalando SE", "AS IS"):
        assert words in text
    for name in NAMES:
        (licence,) = EMBEDDED_FOLDER.glob(f"{name}/*/LICENSE")
        assert SETS[name].licence in licence.read_text()


@pytest.mark.slow
@needs_originals
def test_rewriting_gives_the_same_images_in_the_same_order(tmp_path, capsys):
    main([f"--source={ORIGINALS}", f"--output={tmp_path}"])
    assert "fashion_mnist" in capsys.readouterr().out
    for name in NAMES:
        folder = pathlib.Path(name) / EMBEDDED_VERSION
        *again, names = read_prepared(tmp_path / folder)
        *shipped, shipped_names = read_prepared(EMBEDDED_FOLDER / folder)
        assert names == shipped_names
        for new, old in zip(again, shipped, strict=True):
            np.testing.assert_array_equal(new.images, old.images)
            np.testing.assert_array_equal(new.labels, old.labels)


def test_select_balances_classes_and_prefers_marked_images():
    labels = np.repeat(np.arange(3), 11)
    preferred = (labels == 1) & (np.arange(33) % 2 == 0)
    chosen = select(labels, 17, [0], preferred, 4)
    assert np.bincount(labels[chosen]).tolist() == [6, 6, 5]
    assert preferred[chosen].sum() == 4
    np.testing.assert_array_equal(chosen, select(labels, 17, [0], preferred, 4))


def test_select_fills_up_with_preferred_images():
    labels = np.zeros(7, np.int64)
    preferred = np.arange(7) < 5
    assert len(set(select(labels, 6, [0], preferred, 1).tolist())) == 6


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not gzip",
        gzip.compress(b""),
        gzip.compress(b"\0\0\x08\x03\0\0"),
        # The header claims more images than the file holds.
        gzip.compress(b"\0\0\x08\x03" + 3 * b"\xff\xff\xff\xff"),
    ],
    # Fixed ids: gzip writes the time into its header, and pytest-xdist needs equal
    # names in all processes.
    ids=["empty", "no gzip", "no header", "half a header", "no images"],
)
def test_damaged_archive_raises(tmp_path, content):
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"train-images.*gz is damaged \(.*download"):
        read_archive(tmp_path, "train")
