"""What stops the demo before it has an outcome."""

from __future__ import annotations

from dask_gpuipc.errors import GPUIPCError


class DemoError(GPUIPCError):
    """The demo cannot run here; the text says why and what helps."""


class InputError(DemoError):
    """Something that the user asked for is not usable.

    Parameters
    ----------
    message : str
        The fact and the remedy.
    option : str
        The command line option that it concerns, such as ``--input``.
    """

    def __init__(self, message: str, option: str = "--input") -> None:
        super().__init__(message)
        self.option = option
