"""First fit: the first row that has room, for many windows of sequences at once."""

import numpy as np
from jaxtyping import Bool, Int64


def fit_first(
    lengths: Int64[np.ndarray, "windows size"], length: int, most: int
) -> Int64[np.ndarray, "windows size"]:
    """The row of each sequence: the first one of its window with room, in the order given.

    All windows take a step at once, so that the cost is one array operation for each place of a
    window. A length of 0 is no sequence, and may be anywhere.

    Args:
        lengths: of the sequences of each window.
        length: tokens of a row.
        most: sequences of a row.
    """
    windows, size = lengths.shape
    every = np.arange(windows)
    room = np.full((windows, 8), length, np.int64)
    number = np.zeros((windows, 8), np.int64)
    rows = np.zeros((windows, size), np.int64)
    opened = 0  # the most rows of any window
    for place in range(size):
        need = lengths[:, place]
        if opened == room.shape[1]:  # twice as many, of which the new ones are empty
            room = np.concatenate([room, np.full_like(room, length)], axis=1)
            number = np.concatenate([number, np.zeros_like(number)], axis=1)
        fits: Bool[np.ndarray, "windows rows"] = room[:, : opened + 1] >= need[:, None]
        row = fits.argmax(axis=1)
        rows[:, place] = row
        room[every, row] -= need
        number[every, row] += need > 0
        full = number[every, row] >= most
        room[every[full], row[full]] = 0  # for nothing more, however short
        opened = max(opened, int(row.max()) + 1)
    return rows
