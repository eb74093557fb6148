"""Both sides in turn: the demo from request to outcome."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from dask_gpuipc import GPUIPCPlugin
from dask_gpuipc.config import parse_min_bytes
from dask_gpuipc.demo.clusters import Machine
from dask_gpuipc.demo.errors import InputError
from dask_gpuipc.demo.outcome import Job, Outcome
from dask_gpuipc.demo.picture import Picture, load_picture
from dask_gpuipc.demo.rounds import PluginCounts, Side
from dask_gpuipc.demo.workflow import GRID, side_of, tiled

if TYPE_CHECKING:
    import dask.array as da

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for; None is the machine's default.

    Parameters
    ----------
    source : Path, optional
        A ``.npy`` or image file.
    nbytes : int, optional
        Size of the tiled image in bytes.
    workers : int, optional
        Worker processes in each cluster.
    rounds : int
        Counted rounds of each side.
    """

    source: Path | None = None
    nbytes: int | None = None
    workers: int | None = None
    rounds: int = 4


def run_demo(request: Request, say: Say = lambda _: None) -> Outcome:
    """Run the job with plain Dask and with the plugin, in turn.

    Two equal clusters live at the same time and never work at the same time. Each runs the job
    once to warm up (first connections, memory never touched before), then ``request.rounds``
    times; who goes first changes with every round.

    Parameters
    ----------
    request : Request
    say : callable
        Called with each line of progress.

    Raises
    ------
    InputError
        The image, the size or the number of workers cannot be used.
    DemoError
        Something that the demo needs is not installed, or the workers ran out of memory.
    """
    machine = Machine.detect()
    job, picture = _plan(machine, request)
    memory_limit = machine.memory_limit(job.nbytes, job.workers)
    say(job.describe())
    with ExitStack() as stack:
        image = _image(Path(stack.enter_context(TemporaryDirectory())), picture, job, machine)
        say("starting two clusters, and one round of each to warm up")
        plain, plugin = (
            Side(
                name,
                stack.enter_context(machine.start(job.workers, memory_limit)),
                image,
                job.min_bytes,
            )
            for name in ("plain", "plugin")
        )
        # The newest releases of distributed get this method back from GPUIPCPlugin's import.
        plugin.client.register_worker_plugin(GPUIPCPlugin())  # type: ignore[attr-defined]
        counts = _take_turns(plain, plugin, request.rounds, say)
    return Outcome(job, plain.rounds, plugin.rounds, counts)


def _plan(machine: Machine, request: Request) -> tuple[Job, Picture]:
    least = 8 * (2 * GRID) ** 2
    nbytes = machine.default_nbytes if request.nbytes is None else request.nbytes
    if nbytes < least:
        raise InputError(f"the image must have at least {least} bytes", option="--size")
    side = side_of(nbytes)
    picture = load_picture(request.source, side)
    job = Job(
        picture=picture.name,
        side=side,
        workers=machine.workers(request.workers),
        gpus=machine.gpus,
        memory=machine.memory,
        min_bytes=parse_min_bytes(None)[machine.memory],
    )
    return job, picture


def _image(folder: Path, picture: Picture, job: Job, machine: Machine) -> da.Array:
    path = folder / "image.npy"
    np.save(path, picture.pixels)
    return tiled(path, job.side, machine.backend)


def _take_turns(plain: Side, plugin: Side, rounds: int, say: Say) -> PluginCounts:
    for side in (plain, plugin):
        side.load()
        side.run()
    before = PluginCounts.read(plugin.client)
    for number in range(rounds):
        for side in (plugin, plain) if number % 2 else (plain, plugin):
            done = side.count()
            say(f"{side.name:<6}  round {number + 1} of {rounds}: {done.describe()}")
    return PluginCounts.read(plugin.client).since(before)
