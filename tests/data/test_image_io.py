"""Images are decoded as a viewer shows them; bad ones raise one sentence."""

import io
import os
import pickle
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from relattn.data import image_io
from relattn.data.image_io import (
    UnreadableImageError,
    check_background,
    check_image,
    decode_image,
    open_image,
)


def encode(file_format, size=(5, 3)):
    pixels = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, file_format)
    return encoded.getvalue(), pixels


def with_size(png, width, height):
    """Replaces the size in the header of a PNG, with a valid checksum."""
    header = b"IHDR" + struct.pack(">II", width, height) + png[24:29]
    return png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:]


PNG, PIXELS = encode("PNG")
JPEG, _ = encode("JPEG")
OTHER = "not a JPEG, PNG, WebP, BMP, GIF or TIFF"


def read(content):
    with open_image(io.BytesIO(content), "1.png", "delete it") as image:
        return np.asarray(decode_image(image, "1.png", "delete it"))


def check(content):
    image = open_image(io.BytesIO(content), "1.png", "delete it")
    check_image(image, "1.png", "delete it")


def test_valid_images_are_decoded():
    np.testing.assert_array_equal(read(PNG), PIXELS)
    np.testing.assert_array_equal(read(with_size(PNG, 5, 3)), PIXELS)
    check(PNG)
    check(JPEG)
    assert read(JPEG).shape == (3, 5, 3)


@pytest.mark.parametrize(
    "content, problem",
    [
        # Pillow warns about the first and rejects the second.
        (with_size(PNG, 10_000, 10_000), ""),
        (with_size(PNG, 2**31 - 1, 2**31 - 1), "DecompressionBombError: Image size"),
        (with_size(PNG, 500, 300), "OSError: image file is truncated"),
        (with_size(PNG, 0, 3), ""),
        (PNG[:50], ""),
        (PNG[:20], ""),
        (JPEG[:-20], "OSError: image file is truncated"),
        (b"", OTHER),
        (b"to be, or not to be", OTHER),
        # Pillow would run Ghostscript on EPS.
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 3\n", OTHER),
        (encode("PPM")[0], OTHER),
    ],
)
def test_bad_image_raises_one_sentence(content, problem):
    message = rf"^1\.png cannot be read as an image \({problem}.*\): delete it$"
    with pytest.raises(ValueError, match=message) as raised:
        read(content)
    assert len(str(raised.value)) < 300
    with pytest.raises(ValueError, match=message):
        check(content)


def test_image_over_the_pixel_limit_raises(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 14)
    message = (
        r"^1\.png cannot be .*(claims 15 pixels, the limit is 14|\(15 pixels\) exceeds)"
    )
    with pytest.raises(ValueError, match=message):
        open_image(io.BytesIO(PNG), "1.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert open_image(io.BytesIO(PNG), "1.png").size == (5, 3)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"a\.png cannot be .*\(it is not a file\)$"):
        open_image(tmp_path / "a.png", str(tmp_path / "a.png"))


def test_a_file_over_the_size_limit_is_not_read(tmp_path):
    path = tmp_path / "large.png"
    path.write_bytes(PNG)
    # A sparse file, which takes no room.
    os.truncate(path, image_io.MAX_FILE_BYTES + 1)
    message = r"large\.png cannot be read .*has 536,870,913 bytes, .*: delete it$"
    with pytest.raises(ValueError, match=message):
        open_image(path, str(path), "delete it")
    with pytest.raises(ValueError, match=message):
        image_io.read_image_file(path, "delete it")


def save(image, file_format, **options):
    encoded = io.BytesIO()
    image.save(encoded, file_format, **options)
    encoded.seek(0)
    return encoded


def decode(image, file_format="PNG", background="white", **options):
    encoded = save(image, file_format, **options)
    with open_image(encoded, "x") as opened:
        found = decode_image(opened, "x", background=background)
    # The file, and the image that a user has opened, are the same.
    again = decode_image(Image.open(encoded), "x", background=background)
    np.testing.assert_array_equal(found, again)
    return found


COLOUR = Image.fromarray(PIXELS)
GREY = COLOUR.convert("L")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WebP", "TIFF"])
def test_images_are_turned_as_their_exif_says(file_format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if file_format == "WebP" else {}
    plain = Image.open(save(COLOUR, file_format, **options)).convert("RGB")
    steps = {
        1: lambda x: x,
        2: np.fliplr,
        3: lambda x: np.rot90(x, 2),
        4: np.flipud,
        5: lambda x: x.transpose(1, 0, 2),
        6: lambda x: np.rot90(x, -1),
        7: lambda x: np.rot90(x, 2).transpose(1, 0, 2),
        8: np.rot90,
    }
    expected = steps[orientation](np.asarray(plain))
    found = decode(COLOUR, file_format, exif=exif, **options)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(decode_image(found, "x"), expected)


# Pillow's own warning, when it opens the file.
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("damage", [b"Exif\0\0II*\0garbage", b"Exif\0\0", b"nothing"])
def test_damaged_exif_is_ignored(damage):
    plain = Image.open(save(COLOUR, "JPEG"))
    np.testing.assert_array_equal(decode(COLOUR, "JPEG", exif=damage), plain)


def blend(rgb, alpha, background):
    """Composites on a background in float64."""
    alpha = np.asarray(alpha, np.float64)[..., None] / 255
    return alpha * np.asarray(rgb, np.float64) + (1 - alpha) * np.array(background)


ALPHA = Image.fromarray(np.arange(15, dtype=np.uint8).reshape(3, 5) * 18)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "RGBa", "La"])
@pytest.mark.parametrize(
    ("background", "colour"),
    [("white", (255, 255, 255)), ("#102030", (16, 32, 48)), ("black", (0, 0, 0))],
)
def test_transparent_pixels_are_composited(mode, background, colour):
    plain = {"RGBA": COLOUR, "LA": GREY}.get(mode.upper(), COLOUR)
    if mode == "PA":
        image = COLOUR.quantize(15).convert("PA")
        plain = image.convert("RGB")
        image.putalpha(ALPHA)
    else:
        image = plain.copy()
        image.putalpha(ALPHA)
        image = image.convert(mode)
    found = decode_image(image, "x", background=background)
    assert (found.mode == "L") == (mode in ("LA", "La") and background[0] != "#")
    expected = blend(plain.convert("RGB"), ALPHA, colour)
    # Pillow's premultiplied modes round twice.
    atol = 2 if mode in ("RGBa", "La") else 1
    bright = np.asarray(ALPHA) > (40 if atol == 2 else -1)
    np.testing.assert_allclose(
        np.asarray(found.convert("RGB"))[bright], expected[bright], atol=atol
    )
    if mode in ("RGBA", "LA"):
        again = decode(image, "PNG", background)
        np.testing.assert_array_equal(again, found)


@pytest.mark.parametrize("file_format", ["PNG", "GIF"])
def test_transparent_colours_of_palettes_are_white(file_format):
    image = Image.new("P", (5, 3))
    image.putpalette([200, 10, 20, 30, 40, 50])
    image.putpixel((1, 2), 1)
    found = decode(image, file_format, transparency=0)
    expected = np.full((3, 5, 3), 255)
    expected[2, 1] = 30, 40, 50
    np.testing.assert_array_equal(found, expected)


def test_several_transparent_colours_of_a_palette():
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8))
    image.putpalette([200, 10, 20, 30, 40, 50, 60, 70, 80])
    found = decode(image, transparency=bytes([0, 255, 51]))
    assert np.asarray(found)[0, :2].tolist() == [[255] * 3, [30, 40, 50]]
    expected = blend([[60, 70, 80]], [51], [255] * 3)[0]
    np.testing.assert_allclose(np.asarray(found)[0, 2], expected, atol=1)


@pytest.mark.parametrize(
    ("image", "key"), [(GREY, None), (COLOUR, None), (GREY.point(lambda x: 5), 5)]
)
def test_one_transparent_colour(image, key):
    key = image.getpixel((3, 1)) if key is None else key
    found = np.asarray(decode(image, transparency=key))
    pixels = np.asarray(image)
    same = pixels == np.array(key)
    same = same.all(-1, keepdims=True) if pixels.ndim == 3 else same
    np.testing.assert_array_equal(found, np.where(same, 255, pixels))


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
@pytest.mark.parametrize("transparent", [False, True])
def test_16_bit_greys_keep_their_upper_8_bits(file_format, transparent):
    pixels = np.random.default_rng(3).integers(0, 2**16, (3, 5), np.uint16)
    options = {"transparency": int(pixels[1, 2])} if transparent else {}
    found = decode(Image.fromarray(pixels), file_format, **options)
    expected = pixels // 256
    if transparent and file_format == "PNG":
        expected[1, 2] = 255
    assert found.mode == "L"
    np.testing.assert_array_equal(found, expected)


def chunk(kind, content):
    """A chunk of a PNG."""
    checksum = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + checksum


@pytest.mark.parametrize(
    ("colour_type", "bits", "transparent", "rows", "expected"),
    [
        # Values of a grey pixel are its bits, from the left.
        (0, 1, [1], b"\0\x40", [[0, 255, 0]]),
        (0, 1, [0], b"\0\x40", [[255, 255, 255]]),
        (0, 2, [1], b"\0\x18", [[0, 255, 170]]),
        (0, 4, [3], b"\0\x13\x50", [[17, 255, 85]]),
        (
            2,
            16,
            [0x1234, 0x5678, 0x9ABC],
            bytes.fromhex("00 1234 5678 9abc 3456 0000 0000"),
            [[[255] * 3, [0x34, 0, 0]]],
        ),
    ],
)
def test_transparent_colours_of_other_than_8_bits(
    colour_type, bits, transparent, rows, expected
):
    size = len(expected[0]), 1
    encoded = io.BytesIO(
        PNG[:8]
        + chunk(b"IHDR", struct.pack(">IIBBBBB", *size, bits, colour_type, 0, 0, 0))
        + chunk(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent))
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
    image = open_image(encoded, "x")
    for _ in range(2):
        np.testing.assert_array_equal(decode_image(image, "x"), expected)


@pytest.mark.parametrize("photometric", [0, 1])
def test_tiffs_of_16_bits_may_have_0_as_white(photometric):
    pixels = np.array([[0x1234, 0xFF00, 0]], np.uint16)
    options = {"tiffinfo": {262: photometric, 274: 2}}
    found = decode(Image.fromarray(pixels), "TIFF", **options)
    expected = [[0, 0xFF, 0x12]] if photometric else [[0xFF, 0, 0xFF - 0x12]]
    np.testing.assert_array_equal(found, expected)


def test_alpha_of_a_palette_in_memory():
    image = Image.new("P", (1, 1))
    image.putpalette([200, 10, 20, 51], "RGBA")
    expected = blend([[200, 10, 20]], [51], [255] * 3)
    np.testing.assert_allclose(
        np.asarray(decode_image(image, "x"))[0], expected, atol=1
    )


def test_big_endian_16_bit_greys():
    pixels = np.array([[0x1234, 0xFF00]], ">u2")
    image = Image.frombytes("I;16B", (2, 1), pixels.tobytes())
    assert np.asarray(decode_image(image, "x")).tolist() == [[0x12, 0xFF]]


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "RGBX", "RGB", "P"])
def test_other_colours_equal_pillow(mode):
    image = COLOUR.quantize(7) if mode == "P" else COLOUR.convert(mode)
    found = decode_image(image, "x")
    np.testing.assert_array_equal(found, image.convert("RGB"))
    assert found.mode == "RGB"


def test_cmyk_jpeg_and_bits():
    image = COLOUR.convert("CMYK")
    plain = Image.open(save(image, "JPEG", quality=100)).convert("RGB")
    np.testing.assert_array_equal(decode(image, "JPEG", quality=100), plain)
    bits = GREY.convert("1")
    for file_format in ("PNG", "BMP", "TIFF"):
        np.testing.assert_array_equal(
            decode(bits, file_format), np.asarray(bits) * np.uint8(255)
        )


@pytest.mark.parametrize("file_format", ["GIF", "TIFF", "PNG", "WebP"])
def test_the_first_frame_is_read(file_format):
    frames = [COLOUR.quantize(15).convert("RGB"), ImageOps.invert(COLOUR)]
    if file_format == "GIF":
        frames = [frame.quantize(15) for frame in frames]
    options = {"lossless": True} if file_format == "WebP" else {}
    found = decode(
        frames[0], file_format, save_all=True, append_images=frames[1:], **options
    )
    np.testing.assert_array_equal(found, frames[0].convert("RGB"))


def test_bmp_and_grey_gif():
    np.testing.assert_array_equal(decode(COLOUR, "BMP"), PIXELS)
    found = decode(GREY, "GIF")
    assert found.mode == "L"
    np.testing.assert_array_equal(found, GREY)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_values_of_unknown_range_are_refused(mode):
    encoded = save(GREY.convert(mode), "TIFF")
    message = rf"^x cannot be read as an image \(pixels of mode {mode}, .*; convert it"
    for check in (decode_image, check_image):
        image = Image.open(encoded)
        with pytest.raises(ValueError, match=message):
            check(image, "x")


def test_unknown_background_raises():
    check_background("#fff")
    with pytest.raises(ValueError, match="unknown data.background 'wite': choose a c"):
        check_background("wite")


def test_a_worker_process_can_send_the_error():
    error = UnreadableImageError("a.png", "truncated", "replace it")
    sent = pickle.loads(pickle.dumps(error))
    assert str(sent) == str(error) and sent.problem == error.problem
