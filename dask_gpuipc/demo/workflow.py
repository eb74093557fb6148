"""The job: an ordinary dask.array workflow whose chunks move between workers.

It is the same text for NumPy and CuPy. All values stay whole, so results are exact (`is_exact`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import dask
import dask.array as da
import numpy as np
import numpy.typing as npt

GRID: Final = 4
"""Chunks along each axis."""

LARGEST_SHARP: Final = 5 * 255
"""Bound of the absolute values that `sharpen` makes of gray values."""


def side_of(nbytes: int) -> int:
    """Rows, and columns, of the largest float64 square within ``nbytes`` that `GRID` divides."""
    return math.isqrt(nbytes // 8) // GRID * GRID


def is_exact(side: int) -> bool:
    """Whether every value of the job on ``side`` rows is a whole number that float64 holds.

    The largest are sums over ``side`` elements of a matrix product over ``side``.
    """
    return 2 * LARGEST_SHARP**2 * side**2 < 2**53


def tiled(path: Path, side: int, backend: str) -> da.Array:
    """Mirror and repeat the image in ``path`` to a square.

    Parameters
    ----------
    path : Path
        A ``.npy`` file of gray values that every worker can read.
    side : int
        Rows and columns of the square, a multiple of `GRID`.
    backend : str
        ``numpy`` or ``cupy``: the kind of the chunks.

    Returns
    -------
    dask.array.Array
        float64, shape ``(side, side)``, in ``GRID * GRID`` equal chunks.
    """
    chunks = da.map_blocks(
        read_block,
        str(path),
        chunks=((side // GRID,) * GRID,) * 2,
        dtype="f8",
        meta=np.empty((0, 0)),
    )
    array: da.Array = chunks.to_backend(backend)
    return array


def analyse(image: da.Array) -> da.Array:
    """Filter, rechunk, add the transpose, multiply, reduce.

    Returns
    -------
    dask.array.Array
        float64, shape ``(2 * side + 1,)``: the sums over columns and over rows of the product, and
        its maximum. NumPy, whatever the image is.
    """
    block = image.chunks[0][0]
    sharp = image.map_overlap(sharpen, depth=1, boundary="reflect", trim=False)
    # The other method, p2p, does not take CuPy chunks.
    with dask.config.set({"array.rechunk.method": "tasks"}):
        strips = sharp.rechunk((block, -1))
        symmetric = (strips + strips.T).rechunk((block, block))
    product = symmetric.dot(sharp)
    parts = [product.sum(axis=0), product.sum(axis=1), product.max()[None]]
    result: da.Array = da.concatenate(parts).to_backend("numpy")
    return result


def read_block(path: str, block_info: Any = None) -> npt.NDArray[np.float64]:
    """One chunk of the tiled image, read on the worker that makes it."""
    rows, columns = (slice(*ends) for ends in block_info[None]["array-location"])
    return mirrored(np.load(path, mmap_mode="r"), rows, columns).astype("f8")


def mirrored(pixels: npt.NDArray[Any], rows: slice, columns: slice) -> npt.NDArray[Any]:
    """Return a window of the endless plane that mirrors ``pixels`` at each of their edges."""
    down, across = (
        _mirrored_index(np.arange(part.start, part.stop), length)
        for part, length in zip((rows, columns), pixels.shape, strict=True)
    )
    return np.asarray(pixels[down[:, None], across])


def _mirrored_index(index: npt.NDArray[np.intp], length: int) -> npt.NDArray[np.intp]:
    within = index % (2 * length)
    return np.minimum(within, 2 * length - 1 - within)


def sharpen(block: Any) -> Any:
    """Five times each element less its four neighbours; the outermost ring is dropped."""
    north, south = block[:-2, 1:-1], block[2:, 1:-1]
    west, east = block[1:-1, :-2], block[1:-1, 2:]
    return 5 * block[1:-1, 1:-1] - north - south - west - east
