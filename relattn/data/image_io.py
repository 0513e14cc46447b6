"""Decodes untrusted images as a viewer shows them.

A header may claim any size, and Pillow raises errors of any type on damaged bytes. Here
every such error becomes an `UnreadableImageError` that names the image.
"""

from __future__ import annotations

import io
import stat
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageColor, ImageOps, UnidentifiedImageError

from relattn.command import lacks_resources
from relattn.data.errors import describe_error
from relattn.files import naming
from relattn.messages import shorten

# Pillow supports many more, for example EPS, which it runs in Ghostscript.
FORMATS = {
    "JPEG": (".jpg", ".jpeg"),
    "PNG": (".png",),
    "WebP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
}
# The range of the others, "I" and "F", is not known: Pillow clips their values at 255.
COLOUR_MODES = ("P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
GREY_MODES = ("1", "L", "LA", "La", "I;16", "I;16L", "I;16B", "I;16N")
ALPHA_MODES = ("LA", "La", "PA", "RGBA", "RGBa")
# Pillow scales the pixels of a PNG to 8 bits, but not the transparent colour: its
# factor for each raw mode.
TRANSPARENT_SCALES = {"1": 255, "L;2": 85, "L;4": 17, "RGB;16B": 1 / 256}


# Largest image file in bytes. Pillow reads some parts of a file as a whole.
MAX_FILE_BYTES = 2**29


class UnreadableImageError(ValueError):
    """An image cannot be decoded.

    Attributes:
        problem: The reason, in words.
    """

    def __init__(self, where: str, problem: str, hint: str = ""):
        # Arguments with which a worker process can send the error.
        super().__init__(where, problem, hint)
        self.problem = problem

    def __str__(self) -> str:
        """Returns the message."""
        where, problem, hint = self.args
        ending = f": {hint}" if hint else ""
        return f"{where} cannot be read as an image ({problem}){ending}"


def open_image(source: Path | io.BytesIO, where: str, hint: str = "") -> Image.Image:
    """Reads the header of an image.

    Args:
        source: A file, or its contents.
        where: Name of the image in the error message.
        hint: Fix at the end of the error message.

    Returns:
        The image; its pixels are not decoded yet.

    Raises:
        UnreadableImageError: If it is not a file, in none of `FORMATS`, has more than
            `MAX_FILE_BYTES`, or claims more pixels than ``PIL.Image.MAX_IMAGE_PIXELS``.
    """
    try:
        _check_file_size(source, where, hint)
        image = Image.open(source, formats=[name.upper() for name in FORMATS])
    except UnidentifiedImageError as error:
        problem = "not a " + " or ".join([", ".join([*FORMATS][:-1]), [*FORMATS][-1]])
        raise UnreadableImageError(where, problem, hint) from error
    except UnreadableImageError:
        raise
    except Exception as error:
        if lacks_resources(error):
            raise
        raise UnreadableImageError(where, describe_error(error), hint) from error
    pixels, limit = image.width * image.height, Image.MAX_IMAGE_PIXELS
    if limit is not None and pixels > limit:
        problem = f"it claims {pixels:,} pixels, the limit is {limit:,}"
        raise UnreadableImageError(where, problem, hint)
    return image


def read_image_file(path: Path, hint: str = "") -> bytes:
    """Reads the bytes of an image file.

    Args:
        path: The file.
        hint: Fix at the end of the error message.

    Raises:
        UnreadableImageError: If it has more than `MAX_FILE_BYTES`.
    """
    _check_file_size(path, str(path), hint)
    with naming(path):
        return path.read_bytes()


def _check_file_size(source: Path | io.BytesIO, where: str, hint: str) -> None:
    if isinstance(source, io.BytesIO):
        size = source.getbuffer().nbytes
    else:
        status = source.stat()
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            # A pipe would wait for a writer.
            raise UnreadableImageError(where, "it is not a file", hint)
    if size > MAX_FILE_BYTES:
        problem = f"it has {size:,} bytes, the limit is {MAX_FILE_BYTES:,}"
        raise UnreadableImageError(where, problem, hint)


def decode_image(
    image: Image.Image,
    where: str,
    hint: str = "",
    *,
    background: str | None = "white",
) -> Image.Image:
    """Decodes the pixels of an image, or the first frame, as a viewer shows them.

    The image is turned as its EXIF orientation says, and transparent pixels are
    composited on the background. Values of 16 bits keep their upper 8.

    Args:
        image: Result of `open_image`, or any Pillow image.
        where: Name of the image in the error message.
        hint: Fix at the end of the error message.
        background: Colour behind transparent pixels, a name or ``"#rrggbb"``; None to
            keep them.

    Returns:
        The image in memory, of mode "L" if it is grey, else "RGB", or "RGBA" if it
        keeps transparent pixels.

    Raises:
        UnreadableImageError: If it is damaged, or its range of values is not known.

    Example:
        >>> image = Image.new("RGBA", (5, 3), (255, 0, 0, 0))
        >>> decode_image(image, "a.png").getpixel((0, 0))
        (255, 255, 255)
    """
    if image.mode not in (*COLOUR_MODES, *GREY_MODES):
        problem = (
            f"pixels of mode {image.mode}, whose range of values is not known; convert "
            "it to 8 bits per channel"
        )
        raise UnreadableImageError(where, problem, hint)
    try:
        _load(image)
        grey = image.mode in GREY_MODES or _has_grey_palette(image)
        narrow = _narrow(_upright(image))
        if _is_white_zero(image):
            narrow = ImageOps.invert(narrow)
        return _flatten(narrow, grey, background)
    except Exception as error:
        if lacks_resources(error):
            raise
        raise UnreadableImageError(where, describe_error(error), hint) from error


def check_image(image: Image.Image, where: str, hint: str = "") -> None:
    """Raises an error unless `decode_image` can decode an image.

    Args:
        image: Result of `open_image`, which cannot be decoded afterwards.
        where: Name of the image in the error message.
        hint: Fix at the end of the error message.

    Raises:
        UnreadableImageError: If it is damaged, or its range of values is not known.
    """
    # A JPEG is read at an eighth of its size, which takes a fraction of the time.
    image.draft(None, (1, 1))
    decode_image(image, where, hint)


def check_background(background: str) -> None:
    """Raises ValueError unless a colour is known.

    Args:
        background: A colour's name or ``"#rrggbb"``.

    Raises:
        ValueError: If it is neither.

    Example:
        >>> check_background("whit")
        Traceback (most recent call last):
        ValueError: unknown data.background 'whit': choose a colour such as 'white' or \
'#7f7f7f'
    """
    try:
        ImageColor.getrgb(background)
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"unknown data.background {shorten(background)}: choose a colour such "
            "as 'white' or '#7f7f7f'"
        ) from error


def _load(image: Image.Image) -> None:
    """Reads the pixels, and scales the transparent colour of a PNG like them."""
    # The last part of a tile is the raw mode; images in memory have no tiles.
    tiles = getattr(image, "tile", ()) if image.format == "PNG" else ()
    scale = TRANSPARENT_SCALES.get(tiles[0][3]) if tiles else None
    image.load()
    colour = image.info.get("transparency")
    if scale and isinstance(colour, tuple):
        image.info["transparency"] = tuple(int(scale * value) for value in colour)
    elif scale and colour is not None:
        image.info["transparency"] = min(int(scale * colour), 255)


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception as error:
        if lacks_resources(error):
            raise
        # Viewers show an image with damaged EXIF as it is stored.
        return image


def _narrow(image: Image.Image) -> Image.Image:
    """Returns an image of at most 8 bits per channel; Pillow would clip at 255."""
    if not image.mode.startswith("I;16"):
        return image
    pixels = np.asarray(image)
    narrow = Image.fromarray((pixels >> 8).astype(np.uint8))
    transparent = image.info.get("transparency")
    if transparent is not None:
        # The colour that is transparent has 16 bits too.
        narrow.putalpha(Image.fromarray(np.uint8(255) * (pixels != transparent)))
    return narrow


def _flatten(image: Image.Image, grey: bool, background: str | None) -> Image.Image:
    """Composites transparent pixels on the background, if there is one."""
    if image.mode == "La":
        # Pillow converts it to nothing else.
        image = image.convert("LA")
    if (
        image.mode in ALPHA_MODES
        or "transparency" in image.info
        or (image.palette is not None and image.palette.mode == "RGBA")
    ):
        if background is None:
            return image.convert("RGBA")
        red, green, blue = ImageColor.getrgb(background)[:3]
        grey &= red == green == blue
        canvas = Image.new("RGBA", image.size, (red, green, blue))
        image = Image.alpha_composite(canvas, image.convert("RGBA"))
    return image.convert("L" if grey else "RGB")


def _is_white_zero(image: Image.Image) -> bool:
    """Returns whether 0 is white in a 16-bit TIFF; Pillow inverts only 8-bit ones."""
    if image.format != "TIFF" or not image.mode.startswith("I;16"):
        return False
    tags = getattr(image, "tag_v2", {ExifTags.Base.PhotometricInterpretation: 1})
    return tags.get(ExifTags.Base.PhotometricInterpretation, 0) == 0


def _has_grey_palette(image: Image.Image) -> bool:
    # A GIF has no other way to be grey.
    if image.format != "GIF" or image.mode != "P":
        return False
    colours = np.array(image.getpalette("RGB")).reshape(-1, 3)
    colours = colours[np.flatnonzero(image.histogram())]
    return bool((colours == colours[:, :1]).all())
