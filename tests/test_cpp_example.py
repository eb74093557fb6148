"""The worked example of Python to C++, on the host: built here, and run with 1 to 3 workers."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import numpy as np
import pytest
from cluster_fixtures import *  # noqa: F403 -- fixtures
from cluster_fixtures import arrays
from cpp_fixtures import *  # noqa: F403 -- fixtures
from cpp_fixtures import EXAMPLE, ROUNDS, built
from helpers import child

from dask_gpuipc import sharing


@pytest.fixture(scope="module")
def modules(example, tmp_path_factory):
    """The folder of the compiled module."""
    with built("host", tmp_path_factory.mktemp("modules")) as folder:
        yield folder


def test_the_kernel_computes_what_numpy_does(example, modules, problem):
    object_ = np.random.default_rng(1).random(problem.shape, "f4")
    update = example.host_update(object_, problem)
    np.testing.assert_allclose(update, example.numpy_update(object_, problem), atol=1e-4)


def opened_and_computed(handle, modules, images, places):
    """Open what another process shares, and hand it to C++ as it is."""
    sys.path.insert(0, modules)
    import reconstruct

    problem = reconstruct.Problem(handle.shape, images, places)
    with handle.open() as object_:
        return reconstruct.host_update(object_, problem).tobytes()


def test_an_opened_array_goes_to_cpp_by_dlpack(example, modules, problem):
    object_ = np.random.default_rng(1).random(problem.shape, "f4")
    handle = sharing.get_ipc_handle(object_)
    images, places = problem.images[:2].copy(), problem.places[:2].copy()
    with child() as b:
        found = b.call(opened_and_computed, handle, modules, images, places)
    handle.close()
    sharing.stop()
    part = example.Problem(problem.shape, images, places)
    assert found == example.host_update(object_, part).tobytes()


def wrong(module, name, problem):
    shape = problem.shape
    arrays = {
        "object": np.zeros(shape, "f4"),
        "images": problem.images,
        "places": problem.places,
        "update": np.zeros(shape, "f4"),
        "weight": np.zeros(shape, "f4"),
    }
    arrays.update(
        {
            "dtype": {"object": np.zeros(shape, "f8")},
            "order": {"object": np.zeros(shape, "f4").T[::2, ::2]},
            "axes": {"images": problem.images[0]},
            "shapes": {"update": np.zeros((3, 3), "f4")},
            "outside": {"places": problem.places + 1000},
        }[name]
    )
    module.partial_update(*arrays.values())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dtype", "another dtype"),
        ("order", "C order"),
        ("axes", "must have 3 axes"),
        ("shapes", "do not belong together"),
        ("outside", "outside of the object"),
    ],
)
def test_what_the_kernel_cannot_take_is_an_error(modules, problem, name, text):
    module = importlib.import_module("reconstruct_host")
    with pytest.raises(ValueError, match=text):
        wrong(module, name, problem)


def reconstructed(modules, count):
    """In plain processes; the result's bytes, and what went by which rung."""
    import reconstruct
    from sharing_peers import traffic

    _, problem = reconstruct.make_problem(240, 24)
    result = reconstruct.with_processes(problem, modules, "host", count, ROUNDS)
    found = result.tobytes(), traffic("sent"), traffic("received")
    sharing.stop()
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_with_plain_processes_the_result_is_the_same(example, modules, expected, count):
    with child(daemon=False) as parent:
        data, sent, received = parent.call(reconstructed, modules, count)
    result = np.frombuffer(data, "f4").reshape(expected.shape)
    np.testing.assert_allclose(result, expected, atol=1e-4)
    assert received == {"share": ROUNDS * count}
    assert sent["share"] >= ROUNDS * count  # objects; and a worker's images, where they are large


def test_as_a_dask_workflow_the_result_is_the_same(example, modules, expected, problem, shared):
    result = example.with_dask(shared, problem, modules, "host", ROUNDS)
    np.testing.assert_allclose(result, expected, atol=1e-4)
    assert arrays(shared, "received", "share") >= 2 * ROUNDS  # to two other workers, and back


def test_it_runs_from_the_command_line(modules):
    command = [sys.executable, str(EXAMPLE / "reconstruct.py"), "--modules", modules]
    command += ["--size", "120", "--images", "16", "--rounds", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    error, first = re.findall(r"[0-9.]+[0-9]", done.stdout)
    assert float(error) < 0.2 * float(first)
