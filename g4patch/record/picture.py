"""The picture that is recorded where none is named: it is drawn, so that everybody has the same one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SIZE = 336
WHAT = f"g4patch's drawing, {SIZE} x {SIZE}: a red square, a blue circle, a yellow triangle, a white diagonal line"


def draw() -> NDArray[np.uint8]:
    """RGB `[336, 336, 3]`: the square top left, the circle top right, the triangle at the bottom, on dark grey.

    Plain comparisons of integers, no antialiasing: the same bytes everywhere.
    """
    y, x = np.mgrid[:SIZE, :SIZE]
    picture = np.full((SIZE, SIZE, 3), 64, np.uint8)
    picture[(x >= 24) & (x < 136) & (y >= 24) & (y < 136)] = (255, 0, 0)
    picture[(x - 252) ** 2 + (y - 84) ** 2 <= 60**2] = (0, 0, 255)
    picture[(y >= 196) & (y < 316) & (2 * abs(x - 168) <= y - 196)] = (255, 255, 0)
    picture[abs(x - y) <= 2] = (255, 255, 255)
    return picture
