"""A photograph has the same inputs wherever it comes from, bit for bit."""

import io

import jax
import numpy as np
import pytest
from PIL import Image, ImageOps

import relattn
from relattn import data as data_lib
from relattn.data.user_images import as_sequence
from relattn.evaluation.shift import make_shift_fn, shifted_predictions
from relattn.training import Run, default_config
from relattn.training.task import Task

SIZE = 16
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def noise(height, width, channels=3, seed=0):
    rng = np.random.default_rng([seed, height, width])
    coarse = rng.integers(0, 256, (9, 9, channels), np.uint8).squeeze()
    image = Image.fromarray(coarse)
    return image.resize((width, height), Image.Resampling.BILINEAR)


def write_photographs(folder):
    """Writes photographs of many sizes and modes; returns their files in order."""
    exif = Image.Exif()
    exif[0x0112] = 6
    photographs = {
        "alpha.png": noise(33, 47, 4),
        "bits.bmp": noise(30, 20, 1).convert("1"),
        "cmyk.jpg": noise(25, 31).convert("CMYK"),
        "flat.png": noise(1, 300),
        "frames.gif": noise(30, 20).quantize(50),
        "grey.png": noise(27, 41, 1),
        "grey16.tif": Image.fromarray(np.arange(900, dtype=np.uint16).reshape(30, 30)),
        "high.jpg": noise(300, 200),
        "square.png": noise(64, 64),
        "stored.png": noise(SIZE, SIZE),
        "turned.jpg": noise(200, 300),
        "wide.jpg": noise(200, 300),
    }
    folder.mkdir(parents=True)
    for name, image in photographs.items():
        image.save(folder / name, **({"exif": exif} if name == "turned.jpg" else {}))
    return [folder / name for name in sorted(photographs)]


def make_run(tmp_path, config, data):
    """Returns a run before its first update."""
    config.model.update(name="vit", dim=12, num_heads=3, num_layers=1, mlp_dim=7)
    config.model.update(patch_size=4, position="learned")
    config.batch_size = 2
    task = Task.build(config, data.info)
    shapes = task.abstract_state.variables
    variables = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    return Run(
        config=config,
        model=task.model,
        variables=variables,
        step=0,
        data=task.info,
        preprocess=task.preprocess,
        workdir=tmp_path,
        checkpoint="latest",
    )


def predicted_inputs(run, images, **options):
    """Returns the model inputs of `Run.predict`."""
    seen = []

    def logits(inputs):
        seen.append(np.asarray(inputs))
        return np.zeros((len(inputs), run.data.num_classes), np.float32)

    # A cached property, in a frozen dataclass.
    run.__dict__["_logits"] = logits
    count = len(run.predict(images, **options).labels)
    del run.__dict__["_logits"]
    return np.concatenate(seen)[:count]


def evaluated_inputs(run, split, batch_size=5):
    inputs = []
    for batch in split.batches(batch_size):
        real = batch["weight"] > 0
        inputs.append(np.asarray(run.preprocess(batch))[real])
    return np.concatenate(inputs)


def check_equal_inputs(run, split, files, tmp_path):
    """Compares every way from the files to model inputs; returns the inputs."""
    expected = evaluated_inputs(run, split)
    run.save_pretrained(tmp_path / "saved")
    saved = relattn.load_pretrained(tmp_path / "saved")
    opened = [Image.open(io.BytesIO(file.read_bytes())) for file in files]
    for found in (
        evaluated_inputs(run, split, batch_size=1),
        predicted_inputs(run, files),
        predicted_inputs(run, files, batch_size=3),
        predicted_inputs(run, opened),
        np.concatenate([predicted_inputs(run, file) for file in files]),
        saved.preprocess(files),
        saved.preprocess(opened),
        np.concatenate([saved.preprocess(str(file)) for file in files]),
        jax.jit(run.preprocess)({"image": next(split.batches(len(files)))["image"]}),
    ):
        np.testing.assert_array_equal(found, expected)
    return expected


@pytest.fixture
def config():
    return default_config()


@pytest.mark.slow
@pytest.mark.parametrize("standardize", [False, True])
def test_inputs_of_photographs(tmp_path, config, standardize):
    files = write_photographs(tmp_path / "test" / "a")
    write_photographs(tmp_path / "train" / "a")
    write_photographs(tmp_path / "train" / "b")
    config.data.update(name="mine", source="folder", data_dir=str(tmp_path))
    config.data.update(image_size=SIZE, num_validation=1, standardize=standardize)
    data = data_lib.load_data(config.data)
    assert data.info.streamed
    run = make_run(tmp_path, config, data)
    split = data.eval_splits["test"]
    inputs = check_equal_inputs(run, split, files, tmp_path)
    by_name = dict(zip([file.name for file in files], inputs, strict=True))
    # The definition, in Pillow and float64.
    turned, wide = (Image.open(io.BytesIO(file.read_bytes())) for file in files[-2:])
    turned = ImageOps.exif_transpose(turned)
    assert turned.size == (200, 300)
    for name, image in (("turned.jpg", turned), ("wide.jpg", wide)):
        short = round(SIZE * 256 / 224)
        scaled = image.resize(
            [short * side // min(image.size) for side in image.size],
            Image.Resampling.BILINEAR,
        )
        left, top = (round((side - SIZE) / 2) for side in scaled.size)
        crop = np.asarray(scaled.crop((left, top, left + SIZE, top + SIZE))) / 255
        expected = (crop - MEAN) / STD if standardize else crop
        np.testing.assert_allclose(by_name[name], expected, atol=1e-5)
    # An array is a photograph too, even one of the size of a crop.
    for name in ("stored.png", "square.png", "high.jpg"):
        pixels = np.asarray(Image.open(files[0].with_name(name)))
        for given in (pixels, pixels[None], [pixels.astype(np.int64)]):
            (found,) = predicted_inputs(run, given)
            np.testing.assert_array_equal(found, by_name[name])
    card = (tmp_path / "saved" / "README.md").read_text()
    # Nothing of this machine is handed on.
    assert str(tmp_path) not in card + (tmp_path / "saved" / "config.json").read_text()
    assert (
        "Inputs are RGB images of 16x16 pixels. An image file is decoded upright, as "
        "its EXIF orientation says; transparent pixels are composited on white. Its "
        "short side is resized to 18 pixels, bilinearly with antialiasing, as 8-bit "
        "values, and the central 16x16 are cropped. Values are "
    ) in card
    values = "(pixels / 255 - mean) / std, mean 0.4850, 0.4560, 0.4060, std 0.2290"
    assert (values if standardize else "Values are pixels / 255.") in card


@pytest.mark.slow
def test_inputs_of_photographs_at_another_size(tmp_path, config):
    files = [
        file
        for name in ("a", "b")
        for file in write_photographs(tmp_path / "data" / "train" / name)
    ]
    config.data.update(name="mine", source="folder", data_dir=str(tmp_path / "data"))
    config.data.update(image_size=8, short_side=11, num_validation=3)
    data = data_lib.load_data(config.data)
    run = make_run(tmp_path, config, data)
    run.save_pretrained(tmp_path / "saved")
    larger = relattn.load_pretrained(tmp_path / "saved", image_size=SIZE)
    options = data_lib.with_image_size(config.data, data.info, SIZE)
    assert options.short_side == 22
    expected = evaluated_inputs(
        Run(
            **{
                **vars(run),
                "preprocess": data_lib.make_preprocess(options, data.info),
            }
        ),
        data_lib.load_data(options).eval_splits["test"],
    )
    inputs = {inputs.tobytes() for inputs in np.asarray(larger.preprocess(files))}
    assert {row.tobytes() for row in expected} <= inputs


def test_unmoved_crops_of_a_larger_image_are_the_inputs(tmp_path, config, monkeypatch):
    for name in ("a", "b"):
        write_photographs(tmp_path / "train" / name)
    config.data.update(name="mine", source="folder", data_dir=str(tmp_path))
    # Odd margins round to even.
    config.data.update(image_size=SIZE, short_side=23, num_validation=5)
    config.data.standardize = True
    data = data_lib.load_data(config.data)
    run = make_run(tmp_path, config, data)
    split = data.eval_splits["test"]
    seen = []

    def predict(inputs):
        seen.append(np.asarray(inputs))
        return np.zeros((len(inputs), 2))

    monkeypatch.setattr(
        "relattn.evaluation.shift.make_predict_fn", lambda run, draws: predict
    )
    for boundary in ("crop", "circular"):
        seen.clear()
        for max_shift in (0, 1):
            shifted_predictions(
                run, split, max_shift=max_shift, boundary=boundary, progress=False
            )
        inputs = {row.tobytes() for batch in seen for row in batch}
        expected = evaluated_inputs(run, split)
        assert {row.tobytes() for row in expected} <= inputs


def make_data(channels=1, **options):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (13, 11, 7, channels), dtype=np.uint8)
    return data_lib.ImageData.from_arrays(
        "mine", images, np.arange(13) % 2, ("a", "b"), num_validation=5, **options
    )


@pytest.mark.quick("size2-1")
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [SIZE, 8, (8, 12)])
def test_inputs_of_images_in_memory(tmp_path, config, channels, size):
    sides = (size, size) if isinstance(size, int) else size
    data = make_data(channels)
    with config.ignore_type():
        config.data.update(name="mine", image_size=size, standardize=True)
    run = make_run(tmp_path, config, data)
    files = [tmp_path / f"{index}.png" for index in range(5)]
    for file, image in zip(files, data.test.images, strict=True):
        Image.fromarray(image.squeeze()).save(file)
    expected = check_equal_inputs(run, data.test, files, tmp_path)
    np.testing.assert_array_equal(
        predicted_inputs(run, data.test.images, batch_size=2), expected
    )
    resized = [
        jax.image.resize(image / np.float32(255), (*sides, channels), "linear")
        for image in data.test.images
    ]
    expected = (np.array(resized, np.float64) - data.mean) / data.std
    np.testing.assert_allclose(
        run.preprocess({"image": data.test.images}), expected, atol=1e-5
    )
    # Photographs are cropped to the shape of the stored images.
    saved = relattn.load_pretrained(tmp_path / "saved")
    for shape in ((300, 200), (200, 300), (1, 50)):
        photograph = noise(*shape, channels)
        fitted = ImageOps.fit(photograph, (7, 11), Image.Resampling.BILINEAR)
        stored = np.asarray(fitted).reshape(1, 11, 7, channels)
        inputs = run.preprocess({"image": stored})
        for given in (photograph, np.asarray(photograph)):
            np.testing.assert_array_equal(saved.preprocess(given), inputs)
            np.testing.assert_array_equal(predicted_inputs(run, given), inputs)
    assert saved.preprocess([]).shape == (0, *sides, channels)


@pytest.mark.slow
def test_inputs_of_a_canvas(tmp_path, config):
    config.data.update(name="mnist", image_size=32, placement="static", canvas=32)
    config.data.num_validation = 100
    data = data_lib.load_data(config.data)
    run = make_run(tmp_path, config, data)
    images = data.test_static.images[:3]
    run.save_pretrained(tmp_path / "saved")
    saved = relattn.load_pretrained(tmp_path / "saved")
    expected = images / np.float32(255)
    for found in (
        predicted_inputs(run, images),
        saved.preprocess(images),
        run.preprocess({"image": images}),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    for function in (run.predict, saved.preprocess):
        with pytest.raises(ValueError, match="28x28 pixels, but the .* canvas of 32x3"):
            function(images[:, 2:-2, 2:-2])
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "It has to be a canvas of 32x32 pixels" in card


def test_stored_images_of_another_shape_are_not_squeezed(tmp_path, config):
    config.data.update(name="mine", image_size=SIZE)
    run = make_run(tmp_path, config, make_data())
    wider = make_data().test.images.repeat(2, axis=2)
    split = data_lib.ImageSplit(wider, np.zeros(5, np.int32))
    message = r"have shape \[[0-9]+, 11, 14, 1\], but .*trained on .* \[n, 11, 7, 1\]"
    with pytest.raises(ValueError, match=message):
        run.evaluate(split, batch_size=5)


def test_images_of_two_channels_are_arrays(tmp_path, config):
    data = make_data(channels=2)
    config.data.update(name="mine", image_size=SIZE)
    run = make_run(tmp_path, config, data)
    expected = run.preprocess({"image": data.test.images})
    found = predicted_inputs(run, data.test.images)
    np.testing.assert_array_equal(found, expected)
    larger = data.test.images.repeat(2, axis=1).repeat(2, axis=2)
    assert predicted_inputs(run, larger).shape == expected.shape
    with pytest.raises(ValueError, match=r"pass np.moveaxis\(image, 0, -1\)"):
        run.predict(np.moveaxis(data.test.images, -1, 1))
    with pytest.raises(ValueError, match="image 1 is of type dict, expected a path, a"):
        run.predict([data.test.images[0], {"image": data.test.images[1]}])
    with pytest.raises(ValueError, match="trained on images of 2 channels: pass array"):
        run.predict(Image.new("L", (7, 11)))


def test_grey_images_of_width_1_may_lack_the_axis_of_channels():
    images = np.zeros((13, 11, 1), np.uint8)
    assert as_sequence(images, (11, 1, 1)).shape == (13, 11, 1, 1)
    assert as_sequence(images, (1, 1, 1)).shape == (1, 13, 11, 1)
    assert as_sequence(images[:, :1], (1, 1, 1)).shape == (13, 1, 1, 1)
    # One image, with the axis or without it.
    assert as_sequence(images, (13, 11, 1)).shape == (1, 13, 11, 1)
    assert as_sequence(images[:, 0], (11, 1, 1)).shape == (1, 13, 1, 1)


def test_standardising_equal_pixels_is_refused(tmp_path, config):
    images = np.zeros((7, 4, 4, 3), np.uint8)
    images[..., :2] = np.arange(7)[:, None, None, None]
    data = data_lib.ImageData.from_arrays(
        "flat", images, np.arange(7) % 2, ("a", "b"), num_validation=2
    )
    config.data.update(name="flat", image_size=4, standardize=True)
    with pytest.raises(ValueError, match="all pixels of channel 2 of flat are equal"):
        make_run(tmp_path, config, data)


def test_shift_function_leaves_unmoved_images_alone(tmp_path, config):
    size = (SIZE, SIZE + 4)
    with config.ignore_type():
        config.data.update(name="mine", image_size=size, standardize=True)
    data = make_data()
    run = make_run(tmp_path, config, data)
    resized = data_lib.preprocess(data.test.images, image_size=size)
    zeros = np.zeros((5, 2), int)
    found = make_shift_fn(run, "zeros")(resized, np.arange(5), zeros)
    expected = run.preprocess({"image": data.test.images})
    np.testing.assert_array_equal(found, expected)
