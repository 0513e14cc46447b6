"""A naive shift, for the tests of shifts."""

import numpy as np


def naive_shift(image, pixels, axis):
    """Shifts one image, pixel by pixel."""
    out = np.zeros_like(image)
    height, width, _ = image.shape
    for i in range(height):
        for j in range(width):
            row, column = (i, j + pixels) if axis == "x" else (i + pixels, j)
            if 0 <= row < height and 0 <= column < width:
                out[row, column] = image[i, j]
    return out
