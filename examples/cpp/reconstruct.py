"""An image from many small ones, in rounds: C++ kernels on memory that processes share.

    python build.py build host
    python reconstruct.py --modules build --workers 2

Each of many images shows a blurred window of one object. They are split over the workers, each of
which has its part for good. In every round the object goes out to all workers, each computes what
its images say of it (a partial update) in C++, the partial updates come back, are stitched into one
update, and the object is improved by it. Objects and updates travel as handles: with NumPy by
shared host memory, with CuPy by CUDA IPC.

``--how processes`` has plain processes with pipes; ``--how dask`` has the same as a Dask workflow.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from dask_gpuipc import sharing

KERNELS = Path(__file__).with_name("kernels.cuh")
STEP = 1.0


@dataclass(frozen=True)
class Problem:
    """``images[i]`` shows ``object`` from ``places[i]`` on, blurred."""

    shape: tuple[int, int]
    images: Any
    places: Any

    def part(self, number: int, of: int) -> Problem:
        """The images of one worker."""
        return Problem(self.shape, self.images[number::of], self.places[number::of])


def make_problem(size: int, count: int, seed: int = 0) -> tuple[np.ndarray[Any, Any], Problem]:
    """An object with edges, and the images that are taken of it."""
    random = np.random.default_rng(seed)
    truth = np.zeros((size, size), "f4")
    for _ in range(20):
        top, left, rows, columns = random.integers(1, size // 2, 4)
        truth[top : top + rows, left : left + columns] += 1
    side = size // 3
    places = random.integers(0, size - side + 1, (count, 2)).astype("i4")
    seen = blur(truth)
    images = np.stack([seen[r : r + side, c : c + side] for r, c in places])
    return truth, Problem(truth.shape, images.astype("f4"), places)


def blur(image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Each pixel with its neighbours, by weights 1, 2, 1 either way, and zeros around."""
    padded = np.pad(image, 1)
    rows = padded[:-2] + 2 * padded[1:-1] + padded[2:]
    blurred: np.ndarray[Any, Any] = (rows[:, :-2] + 2 * rows[:, 1:-1] + rows[:, 2:]) / 16
    return blurred


# -- what computes --------------------------------------------------------------------------------

Compute = Callable[[Any, Problem], Any]
"""From the object and a part of the images to the update and its weight, as one array."""


def numpy_update(object_: Any, part: Problem) -> Any:
    """The same in NumPy, to compare with."""
    update = np.zeros((2, *part.shape), "f4")
    seen = blur(object_)
    side = part.images.shape[1:]
    for image, (r, c) in zip(part.images, part.places, strict=True):
        window = (slice(r, r + side[0]), slice(c, c + side[1]))
        update[0][window] += image - seen[window]
        update[1][window] += 1
    return update


def host_update(object_: Any, part: Problem) -> Any:
    """In C++ on the host."""
    module = importlib.import_module("reconstruct_host")
    update = np.zeros((2, *part.shape), "f4")
    module.partial_update(object_, part.images, part.places, update[0], update[1])
    return update


def cuda_update(object_: Any, part: Problem, protocol: str = "cuda_array_interface") -> Any:
    """In C++ on the GPU, on CuPy's current stream."""
    import cupy

    module = importlib.import_module("reconstruct_cuda")
    update = cupy.zeros((2, *part.shape), "f4")
    stream = cupy.cuda.get_current_stream().ptr or 1  # 1 is the legacy default stream's number
    arrays = (object_, part.images, part.places, update[0], update[1])
    module.partial_update(*arrays, stream=stream, protocol=protocol)
    return update


def dlpack_update(object_: Any, part: Problem) -> Any:
    """In C++ on the GPU, by DLPack."""
    return cuda_update(object_, part, "dlpack")


def raw_update(object_: Any, part: Problem) -> Any:
    """The same CUDA source by way of `cupy.RawModule`, which needs no nvcc."""
    import cupy

    kernel = cupy.RawModule(code=KERNELS.read_text()).get_function("partial_update")
    update = cupy.zeros((2, *part.shape), "f4")
    sizes = [np.int64(n) for n in (*part.shape, *part.images.shape)]
    arguments = (object_, *sizes[:2], part.images, *sizes[2:], part.places, update[0], update[1])
    kernel((256,), (256,), arguments)
    return update


BACKENDS: dict[str, Compute] = {
    "numpy": numpy_update,
    "host": host_update,
    "cuda": cuda_update,
    "dlpack": dlpack_update,
    "raw": raw_update,
}


def on_gpu(backend: str) -> bool:
    """Whether a backend works on CuPy arrays."""
    return backend in ("cuda", "dlpack", "raw")


def placed(part: Problem, backend: str) -> Problem:
    """A part in the memory that its backend works in."""
    if not on_gpu(backend):
        return Problem(
            part.shape, np.ascontiguousarray(part.images), np.ascontiguousarray(part.places)
        )
    import cupy

    return Problem(part.shape, cupy.asarray(part.images), cupy.asarray(part.places))


def improved(object_: Any, updates: list[Any]) -> Any:
    """Stitch partial updates, and apply them: a new object, as others may still read the old."""
    total = updates[0].copy()
    for update in updates[1:]:
        total += update
    return object_ + STEP * total[0] / total[1].clip(1, None)


# -- plain processes ------------------------------------------------------------------------------


def worker(connection: Connection, modules: str, backend: str, part: Problem) -> None:
    """One worker: receives an object, answers with its partial update; ends with None."""
    sys.path.insert(0, modules)
    sharing.init_reductions(min_bytes="64 KiB")
    mine = placed(part, backend)
    while (object_ := connection.recv()) is not None:
        connection.send(BACKENDS[backend](object_, mine))
        del object_  # or its memory would be held until the next one is here


@contextlib.contextmanager
def workers(
    problem: Problem, modules: str, backend: str, count: int, gpus: int
) -> Iterator[list[Connection]]:
    """Connections to as many workers; the GPUs are dealt to them in turn."""
    spawn = multiprocessing.get_context("spawn")
    connections, processes = [], []
    for number in range(count):
        mine, theirs = spawn.Pipe()
        arguments = (theirs, modules, backend, problem.part(number, count))
        process = spawn.Process(target=worker, args=arguments)
        with visible_gpu(number % gpus if gpus else None):
            process.start()
        theirs.close()
        connections.append(mine)
        processes.append(process)
    try:
        yield connections
        for connection in connections:
            connection.send(None)
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.join()


@contextlib.contextmanager
def visible_gpu(number: int | None) -> Iterator[None]:
    """Processes that are started within see one GPU only, as their first."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if number is not None:
        ids = before.split(",") if before else [str(i) for i in range(number + 1)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ids[number]
    try:
        yield
    finally:
        if number is not None and before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        elif before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def with_processes(
    problem: Problem, modules: str, backend: str, count: int, rounds: int, gpus: int = 1
) -> np.ndarray[Any, Any]:
    """Reconstruct with plain processes."""
    sharing.init_reductions(min_bytes="64 KiB")
    object_ = _zeros(problem.shape, backend)
    with workers(problem, modules, backend, count, gpus if on_gpu(backend) else 0) as connections:
        for _ in range(rounds):
            for connection in connections:
                connection.send(object_)
            object_ = improved(object_, [connection.recv() for connection in connections])
    return _as_numpy(object_)


def _zeros(shape: tuple[int, int], backend: str) -> Any:
    if not on_gpu(backend):
        return np.zeros(shape, "f4")
    import cupy

    return cupy.zeros(shape, "f4")


def _as_numpy(array: Any) -> np.ndarray[Any, Any]:
    return array if isinstance(array, np.ndarray) else array.get()


# -- Dask -----------------------------------------------------------------------------------------


def _search(folder: str) -> None:
    sys.path.insert(0, folder)


def with_dask(
    client: Any, problem: Problem, modules: str, backend: str, rounds: int
) -> np.ndarray[Any, Any]:
    """Reconstruct as a Dask workflow; the plugin has chunks cross as handles."""
    from dask_gpuipc import GPUIPCPlugin

    client.register_plugin(GPUIPCPlugin())
    client.run(_search, modules)
    addresses = list(client.scheduler_info(n_workers=-1)["workers"])
    parts = [
        client.submit(placed, problem.part(i, len(addresses)), backend, workers=[address])
        for i, address in enumerate(addresses)
    ]
    object_ = client.submit(_zeros, problem.shape, backend, workers=addresses[:1])
    for _ in range(rounds):
        updates = [
            client.submit(BACKENDS[backend], object_, part, workers=[address])
            for part, address in zip(parts, addresses, strict=True)
        ]
        object_ = client.submit(improved, object_, updates, workers=addresses[:1])
    result: np.ndarray[Any, Any] = client.submit(_as_numpy, object_).result()
    return result


def main() -> None:
    """Run, and say how near it came."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modules", default="build", help="where build.py put the modules")
    parser.add_argument("--backend", choices=list(BACKENDS), default="host")
    parser.add_argument("--how", choices=["processes", "dask"], default="processes")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    modules = str(Path(options.modules).absolute())
    truth, problem = make_problem(options.size, options.images)
    if options.how == "processes":
        result = with_processes(
            problem, modules, options.backend, options.workers, options.rounds, options.gpus
        )
    else:
        from distributed import Client, LocalCluster

        with (
            LocalCluster(options.workers, threads_per_worker=1, dashboard_address=None) as cluster,
            Client(cluster) as client,
        ):
            result = with_dask(client, problem, modules, options.backend, options.rounds)
    print(f"mean error {np.abs(result - truth).mean():.4f}, of {np.abs(truth).mean():.4f} at first")


if __name__ == "__main__":
    main()
