"""A real image as a plane of whole gray values.

Whatever the image held, its plane has whole values from 0 to 255. Sums and products of them are
exact in float64 as long as they stay below 2**53, so the results of two runs can be compared
exactly, in whatever order the workers added.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dask_gpuipc.demo.errors import DemoError, InputError

SAMPLE: Final = "astronaut.png"
"""In scikit-image's wheel since long: nothing is downloaded."""

WANTED: Final = "wanted: a .npy file of real numbers, 2-D or 3-D, or an image file"

LUMA: Final = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in the gray value (ITU-R BT.601)."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A gray image: where it came from, and uint8 values of shape (height, width)."""

    name: str
    pixels: npt.NDArray[np.uint8]


def load_picture(source: Path | None, side: int) -> Picture:
    """Read an image.

    Parameters
    ----------
    source : Path, optional
        A ``.npy`` or image file; without it, the sample in scikit-image's wheel.
    side : int
        Rows and columns beyond this are left out.

    Raises
    ------
    InputError
        The file is no image that can be used; the text says why.
    DemoError
        scikit-image is needed and not installed.
    """
    if source is None:
        return Picture(f"{SAMPLE} of scikit-image", grayscale(_read_image(_sample()), side))
    data = _read_npy(source) if source.suffix == ".npy" else _read_image(source)
    try:
        return Picture(source.name, grayscale(data, side))
    except InputError as error:
        raise InputError(f"{source}: {error}") from error


def grayscale(data: npt.NDArray[Any], side: int) -> npt.NDArray[np.uint8]:
    """Gray values of an image, at most ``side`` rows and columns of them.

    A last axis of 3 or 4 is colour (alpha is dropped), of 1 or 2 gray (and alpha). Any other 3-D
    array is a stack, whose pages are laid one below the other. Values other than 0 to 255 are
    spread over that range.

    Raises
    ------
    InputError
        Not 2-D or 3-D, empty, not real numbers, or not finite.
    """
    _check(data)
    channels = data.shape[2] if data.ndim == 3 and data.shape[2] <= 4 else 0
    sheet = data if channels else data.reshape(-1, data.shape[-1])
    sheet = np.asarray(sheet[:side, :side], dtype="f8")
    if not np.isfinite(sheet).all():
        raise InputError("it holds NaN or infinite values; replace them first")
    plane = sheet[..., :3] @ LUMA if channels >= 3 else sheet[..., 0] if channels else sheet
    return _spread(plane)


def _check(data: npt.NDArray[Any]) -> None:
    if data.dtype.kind not in "buif":
        raise InputError(f"its dtype is {data.dtype}; {WANTED}")
    if data.ndim not in (2, 3):
        raise InputError(f"it is {data.ndim}-D, of shape {data.shape}; {WANTED}")
    if not data.size:
        raise InputError(f"it is empty, of shape {data.shape}; {WANTED}")


def _spread(plane: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    low, high = plane.min(), plane.max()
    fractions = bool(high <= 1 and (plane != np.rint(plane)).any())
    if low < 0 or high > 255 or fractions:
        # Scaled down first: the difference of two finite numbers may be infinite.
        unit = plane / max(abs(low), abs(high))
        span = np.ptp(unit)
        plane = (unit - unit.min()) * (255 / span if span else 0)
    return np.rint(plane).astype("u1")


def _sample() -> Path:
    found = importlib.util.find_spec("skimage")
    if found is None or found.origin is None:
        raise DemoError(_missing("The sample image comes with scikit-image, which"))
    return Path(found.origin).parent / "data" / SAMPLE


def _missing(what: str) -> str:
    return (
        f"{what} is not installed. Install it with: pip install 'dask-gpuipc[demo]'; "
        "or give a NumPy file of your own: dask gpuipc demo --input FILE.npy"
    )


def _read_npy(path: Path) -> npt.NDArray[Any]:
    try:
        # Mapped, so that of a large file only the part that is used is read.
        data = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; {WANTED}") from error
    if not isinstance(data, np.ndarray):
        data.close()
        raise InputError(f"{path} is an archive of arrays; {WANTED}")
    return data


def _read_image(path: Path) -> npt.NDArray[Any]:
    try:
        import skimage.io
    except ImportError as error:
        raise DemoError(_missing("Image files are read by scikit-image, which")) from error
    try:
        # Opened here, for some of the readers behind it do not close what they cannot read.
        with path.open("rb") as file:
            return np.asarray(skimage.io.imread(file))
    except Exception as error:  # theirs range from struct.error to SyntaxError
        raise InputError(f"{path} is no image that scikit-image can read; {WANTED}") from error
