"""Bad images raise one sentence that names the image."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from relattn.data.image_io import decode_image, open_image


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


def read(content):
    with open_image(io.BytesIO(content), "1.png", "delete it") as image:
        return np.asarray(decode_image(image, "RGB", "1.png", "delete it"))


def test_valid_images_are_decoded():
    np.testing.assert_array_equal(read(PNG), PIXELS)
    np.testing.assert_array_equal(read(with_size(PNG, 5, 3)), PIXELS)
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
        (b"", "not a JPEG, PNG or WebP"),
        (b"to be, or not to be", "not a JPEG, PNG or WebP"),
        # Pillow would run Ghostscript on EPS, and its GIF decoder is rarely used.
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 3\n",
            "not a JPEG, PNG or WebP",
        ),
        (encode("GIF")[0], "not a JPEG, PNG or WebP"),
    ],
)
def test_bad_image_raises_one_sentence(content, problem):
    message = rf"^1\.png cannot be read as an image \({problem}.*\): delete it\.$"
    with pytest.raises(ValueError, match=message) as raised:
        read(content)
    assert len(str(raised.value)) < 300


def test_image_over_the_pixel_limit_raises(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 14)
    message = (
        r"^1\.png cannot be .*(claims 15 pixels, the limit is 14|\(15 pixels\) exceeds)"
    )
    with pytest.raises(ValueError, match=message):
        open_image(io.BytesIO(PNG), "1.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert open_image(io.BytesIO(PNG), "1.png").size == (5, 3)
