"""``dask gpuipc ...``: what people type. A thin layer; each command imports its work when it runs.

Every ``dask`` command loads this module (entry point group ``dask_cli``), so nothing heavy is
imported at its top.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from distributed import Client


@click.group()
def gpuipc() -> None:
    """See and try how chunks cross between workers of one node as handles."""


def _in_bytes(_ctx: click.Context, _param: click.Parameter, text: str | None) -> int | None:
    """Read a size such as ``256 MiB``."""
    from dask.utils import parse_bytes

    try:
        return None if text is None else int(parse_bytes(text))
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r} is not a size; write it as '256 MiB', or as a number of bytes"
        ) from error


_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead."
)


@gpuipc.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout instead.")
@click.option(
    "--size",
    metavar="SIZE",
    callback=_in_bytes,
    help="Size of the tiled image, such as '256 MiB'.  [default: 128 MiB; 512 MiB on a GPU]",
)
@click.option(
    "--input",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Your image: a .npy file of numbers (2-D or 3-D), or any image file that scikit-image "
    "reads.  [default: the astronaut of scikit-image]",
)
@click.option(
    "--workers",
    type=click.IntRange(min=2),
    help="Worker processes in each cluster.  [default: 4; on GPUs 2, or one for each GPU]",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Counted rounds of each side, after one of each to warm up.",
)
def demo(
    as_json: bool, size: int | None, source: Path | None, workers: int | None, rounds: int
) -> None:
    """Run one dask.array job with plain Dask and with the plugin, and compare.

    An image is tiled to the size asked for; an overlap filter, a rechunk, x + x.T, a matrix
    product and a reduction follow, on local worker processes, with CuPy where there is a GPU and
    with NumPy elsewhere. Two equal clusters take turns, one without and one with the plugin.
    Shown are the times, what moved between workers and how, and whether the results are equal;
    if they are not, the exit code is 1. Progress goes to stderr, the outcome to stdout.
    """
    from dask_gpuipc.demo import DemoError, InputError, Request, as_table, run_demo

    request = Request(source=source, nbytes=size, workers=workers, rounds=rounds)
    try:
        outcome = run_demo(request, say=_progress)
    except InputError as error:
        raise click.BadParameter(str(error), param_hint=f"'{error.option}'") from error
    except DemoError as error:
        raise click.ClickException(str(error)) from error
    click.echo(outcome.to_json() if as_json else as_table(outcome))
    _exit(equal=outcome.equal)


@gpuipc.command()
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="Examine a running cluster, pair by pair of its workers, instead of this machine.",
)
@_json_option
@click.option(
    "--size",
    metavar="SIZE",
    callback=_in_bytes,
    help="Size of the chunks, such as '16 MiB'.  [default: 64 MiB; 256 MiB on a GPU]",
)
def doctor(scheduler: str | None, as_json: bool, size: int | None) -> None:
    """Find out whether handles work, by doing it, and how fast each way is.

    On this machine two worker processes are started, or two for each GPU, and chunks move between
    them by every rung and as bytes. With --scheduler the workers of a running cluster do so, as
    they are set up; nothing is registered or changed there. The exit code is 0 if handles work.
    """
    from dask_gpuipc.doctor import examine_cluster, examine_machine
    from dask_gpuipc.doctor.examine import steps
    from dask_gpuipc.doctor.machine import gpus
    from dask_gpuipc.doctor.text import show
    from dask_gpuipc.terminal import progress

    if scheduler is None:
        with progress(steps(len(gpus()))) as shown:
            found = examine_machine(shown, size)
    else:
        with _connected(scheduler) as client:
            found = examine_cluster(client, progress, size)
    _tell(found, show, as_json)
    sys.exit(0 if found.works else 1)


@gpuipc.command()
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="Of the running cluster, such as tcp://10.0.0.1:8786.  [default: Dask's configuration]",
)
@_json_option
@click.option(
    "--measure/--no-measure",
    default=True,
    help="Move two chunks between two workers as bytes, to estimate the time saved.",
)
def report(scheduler: str | None, as_json: bool, measure: bool) -> None:
    """Show what the workers of a running cluster sent each other by handle.

    Bytes by rung between each pair of workers, why something went as bytes, what is held, and the
    time that it saved. If some worker shares nothing, the exit code is 1.
    """
    from dask_gpuipc.reports import report as make
    from dask_gpuipc.reports.text import show

    with _connected(scheduler) as client:
        made = make(client, measure=measure)
    _tell(made, show, as_json)
    sys.exit(0 if made.workers and all(worker.enabled for worker in made.workers) else 1)


@gpuipc.command()
@_json_option
@click.option(
    "--plot",
    "picture",
    metavar="FILE",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write pictures too, such as bench.png or bench.svg; wants matplotlib.",
)
@click.option(
    "--memory",
    type=click.Choice(["host", "cuda"]),
    help="NumPy or CuPy chunks.  [default: cuda where there is a GPU]",
)
@click.option(
    "--side",
    "sides",
    multiple=True,
    type=click.Choice(["plain", "plugin", "plugin-copy", "plugin-share", "plugin-host", "ucx"]),
    help="What to compare; may be given several times.  [default: plain Dask, the plugin's ways, "
    "and ucx where it is installed]",
)
@click.option(
    "--max-size",
    metavar="SIZE",
    callback=_in_bytes,
    help="Of the chunks, from 1 KiB up.  [default: what memory allows, 8 GiB at most]",
)
@click.option("--rounds", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--warm-up", type=click.IntRange(min=0), default=2, show_default=True)
@click.option(
    "--consumers",
    type=click.IntRange(min=2),
    default=4,
    show_default=True,
    help="Workers that fetch one chunk at once, at most.",
)
@click.option(
    "--many",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="Number of small arrays for one task.",
)
@click.option(
    "--load",
    "load_seconds",
    type=click.FloatRange(min=0.2),
    default=3.0,
    show_default=True,
    help="Seconds for which event loops are watched, idle and while chunks move.",
)
def bench(picture: Path | None, as_json: bool, sides: tuple[str, ...], **options: Any) -> None:
    """Measure transfers between workers of this machine, beside plain Dask and UCX.

    One cluster for each side is started; they take turns, round by round. Shown are times by size
    of chunk, first opens apart, and their parts; 1 to N workers that fetch one chunk; many small
    arrays; how late event loops are while chunks move; and, on several GPUs, each two of them.
    docs/benchmarks.md says how to read it. Progress goes to stderr, the outcome to stdout.
    """
    from dask_gpuipc.bench import BenchError, Options, plot, run_bench
    from dask_gpuipc.bench.text import show

    try:
        if picture is not None:
            plot.check(picture)
        outcome = run_bench(Options(sides=sides, **options), tell=_progress)
        if picture is not None:
            plot.draw(outcome, picture)
    except BenchError as error:
        raise click.ClickException(str(error)) from error
    _tell(outcome, show, as_json)


def _tell(found: Any, show: Callable[[Any, Any], None], as_json: bool) -> None:
    import json

    from dask_gpuipc.terminal import screen

    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        show(found, screen())


@contextlib.contextmanager
def _connected(scheduler: str | None) -> Iterator[Client]:
    """A client of a running cluster; what does not connect is the user's to see, shortly."""
    import dask
    from distributed import Client

    address = scheduler or dask.config.get("scheduler-address", None)
    if address is None:
        raise click.UsageError("name the cluster: --scheduler tcp://HOST:PORT")
    try:
        client = Client(address, set_as_default=False)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"no scheduler at {address}: {error}") from error
    with client:
        yield client


def _progress(text: str) -> None:
    click.echo(text, err=True)


def _exit(*, equal: bool) -> NoReturn:
    if not equal:
        click.echo("Error: the results of plain Dask and the plugin differ", err=True)
    sys.exit(0 if equal else 1)
