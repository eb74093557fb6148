"""The worked example of Python to C++ on a GPU: each protocol, by nvcc and by NVRTC."""

from __future__ import annotations

import numpy as np
import pytest
from cpp_fixtures import *  # noqa: F403 -- fixtures
from cpp_fixtures import ROUNDS, built
from helpers import child

from dask_gpuipc import sharing

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def modules(example, tmp_path_factory):
    with built("cuda", tmp_path_factory.mktemp("modules")) as folder:
        yield folder


@pytest.mark.parametrize("backend", ["cuda", "dlpack", "raw"])
@pytest.mark.parametrize("own_stream", [False, True])
def test_the_kernel_computes_what_numpy_does(example, request, problem, backend, own_stream):
    import cupy

    if backend != "raw":
        request.getfixturevalue("modules")
    object_ = np.random.default_rng(1).random(problem.shape, "f4")
    stream = cupy.cuda.Stream(non_blocking=True) if own_stream else cupy.cuda.Stream.null
    with stream:
        part = example.placed(problem, backend)
        update = example.BACKENDS[backend](cupy.asarray(object_), part)
        found = cupy.asnumpy(update)
    np.testing.assert_allclose(found, example.numpy_update(object_, problem), atol=1e-3)


def computed_on(handle, backend, images, places):
    """Open another process's array and hand it to a kernel as it is; the update's bytes."""
    import reconstruct

    problem = reconstruct.Problem(handle.shape, images, places)
    part = reconstruct.placed(problem, backend)
    with handle.open() as object_:
        return reconstruct.BACKENDS[backend](object_, part).get().tobytes()


@pytest.mark.parametrize("backend", ["cuda", "dlpack", "raw"])
def test_an_opened_array_goes_to_the_kernel(example, request, problem, backend):
    import cupy

    if backend != "raw":
        request.getfixturevalue("modules")
    object_ = np.random.default_rng(1).random(problem.shape, "f4")
    handle = sharing.get_ipc_handle(cupy.asarray(object_))
    images, places = problem.images[:2].copy(), problem.places[:2].copy()
    with child() as b:
        found = np.frombuffer(b.call(computed_on, handle, backend, images, places), "f4")
    handle.close()
    sharing.stop()
    part = example.Problem(problem.shape, images, places)
    update = example.numpy_update(object_, part)
    np.testing.assert_allclose(found.reshape(update.shape), update, atol=1e-3)


def reconstructed(modules, backend, count):
    import reconstruct

    _, problem = reconstruct.make_problem(240, 24)
    result = reconstruct.with_processes(problem, modules, backend, count, ROUNDS)
    sharing.stop(30)
    return result.tobytes()


@pytest.mark.parametrize(("backend", "count"), [("cuda", 2), ("dlpack", 1), ("raw", 3)])
def test_with_plain_processes_the_result_is_the_same(request, example, expected, backend, count):
    modules = "" if backend == "raw" else request.getfixturevalue("modules")
    with child(daemon=False) as parent:
        data = parent.call(reconstructed, modules, backend, count)
    result = np.frombuffer(data, "f4").reshape(expected.shape)
    np.testing.assert_allclose(result, expected, atol=1e-3)
