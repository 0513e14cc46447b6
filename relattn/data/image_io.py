"""Encoded images: JPEG and PNG from anywhere, decoded without trust in what they say.

A header may state any size, and Pillow raises errors of any kind on damaged bytes.
"""

import io
import pathlib

from PIL import Image, UnidentifiedImageError

from relattn.data.paths import describe_error

# Pillow knows many more, EPS among them, which it gives to Ghostscript to run.
FORMATS = ("JPEG", "PNG")
# Of 8 bits a channel or fewer: Pillow cuts off what others hold beyond 255.
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK")


def open_image(
    source: pathlib.Path | io.BytesIO, where: str, hint: str = ""
) -> Image.Image:
    """Reads the header of an image.

    Args:
        source: a file, or its contents.
        where: the image is, for the message.
        hint: what to do, for the end of the message.

    Returns:
        The image; its pixels are not decoded yet.

    Raises:
        ValueError: it is no JPEG or PNG, or states more pixels than
            ``PIL.Image.MAX_IMAGE_PIXELS``.
    """
    try:
        image = Image.open(source, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise _unreadable(where, "no header of a JPEG or a PNG", hint) from error
    except Exception as error:
        raise _unreadable(where, describe_error(error), hint) from error
    pixels, most = image.width * image.height, Image.MAX_IMAGE_PIXELS
    if most is not None and pixels > most:
        raise _unreadable(where, f"it states {pixels:,} pixels, over {most:,}", hint)
    return image


def decode_image(
    image: Image.Image, mode: str, where: str, hint: str = ""
) -> Image.Image:
    """Decodes the pixels of an image.

    Args:
        image: from `open_image`.
        mode: of the result, "L" or "RGB".
        where: the image is, for the message.
        hint: what to do, for the end of the message.

    Returns:
        The image in memory.

    Raises:
        ValueError: it is damaged, or its pixels are of none of `MODES`.
    """
    if image.mode not in MODES:
        raise ValueError(
            f"{where} has pixels of mode {image.mode}: convert it to 8 bits a channel, "
            f"one of {', '.join(MODES)}."
        )
    try:
        return image.convert(mode)
    except Exception as error:
        raise _unreadable(where, describe_error(error), hint) from error


def _unreadable(where: str, problem: str, hint: str) -> ValueError:
    ending = f": {hint}." if hint else "."
    return ValueError(f"{where} cannot be read as an image ({problem}){ending}")
