"""Decodes untrusted JPEG, PNG and WebP images.

A header may claim any size, and Pillow raises errors of any type on damaged bytes. Here
every such error becomes a ValueError that names the image.
"""

import io
import pathlib

from PIL import Image, UnidentifiedImageError

from relattn.data.paths import describe_error

# Pillow supports many more, for example EPS, which it runs in Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP")
# Modes of at most 8 bits per channel: Pillow clips the values of others at 255.
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK")
GREY_MODES = ("1", "L", "LA")


def open_image(
    source: pathlib.Path | io.BytesIO, where: str, hint: str = ""
) -> Image.Image:
    """Reads the header of an image.

    Args:
        source: A file, or its contents.
        where: Name of the image in the error message.
        hint: Fix at the end of the error message.

    Returns:
        The image; its pixels are not decoded yet.

    Raises:
        ValueError: If it is not a JPEG, PNG or WebP, or claims more pixels than
            ``PIL.Image.MAX_IMAGE_PIXELS``.
    """
    try:
        image = Image.open(source, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise _unreadable(where, "not a JPEG, PNG or WebP", hint) from error
    except Exception as error:
        raise _unreadable(where, describe_error(error), hint) from error
    pixels, limit = image.width * image.height, Image.MAX_IMAGE_PIXELS
    if limit is not None and pixels > limit:
        problem = f"it claims {pixels:,} pixels, the limit is {limit:,}"
        raise _unreadable(where, problem, hint)
    return image


def decode_image(
    image: Image.Image, mode: str, where: str, hint: str = ""
) -> Image.Image:
    """Decodes the pixels of an image.

    Args:
        image: Result of `open_image`.
        mode: Mode of the result, "L" or "RGB".
        where: Name of the image in the error message.
        hint: Fix at the end of the error message.

    Returns:
        The image in memory.

    Raises:
        ValueError: If it is damaged, or its mode is not one of `MODES`.
    """
    if image.mode not in MODES:
        raise ValueError(
            f"{where} has pixels of mode {image.mode}: convert it to 8 bits per "
            f"channel, one of the modes {', '.join(MODES)}."
        )
    try:
        return image.convert(mode)
    except Exception as error:
        raise _unreadable(where, describe_error(error), hint) from error


def _unreadable(where: str, problem: str, hint: str) -> ValueError:
    ending = f": {hint}." if hint else "."
    return ValueError(f"{where} cannot be read as an image ({problem}){ending}")
