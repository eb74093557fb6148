"""dask.array's and distributed's own tests, with the plugin on: no failure that plain Dask lacks.

dask.array's come with it. Releases of distributed have no tests in them: DISTRIBUTED_CHECKOUT
names a checkout of the version that is installed.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import dask.array
import distributed
import pytest

pytestmark = [pytest.mark.stress, pytest.mark.timeout(3600)]

HERE = pathlib.Path(__file__).parent
ARRAY = pathlib.Path(dask.array.__file__).parent / "tests"
CHECKOUT = os.environ.get("DISTRIBUTED_CHECKOUT")
LIMIT = 1500


def outcomes(mode, root, tests, folder, *options):
    """Outcome of each test, and what went by handle."""
    report = folder / f"{mode}.json"
    command = [
        *(sys.executable, "-m", "pytest", "-q"),
        *("-p", "upstream_plugin", "--upstream-mode", mode, "--upstream-report", str(report)),
        *("-p", "no:cacheprovider", *options),
        *map(str, tests),
    ]
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(report.read_text())
    return found["outcomes"], found["traffic"], done.stdout


def compare(root, tests, folder, *options):
    """What fails with the plugin, and does not on plain Dask; and the traffic."""
    ours, traffic, text = outcomes("plugin", root, tests, folder, *options)
    failed = [name for name, outcome in ours.items() if outcome == "failed"]
    assert sum(outcome == "passed" for outcome in ours.values()) > 20, text[-3000:]
    if not failed:
        return [], traffic
    plain, _, _ = outcomes("plain", root, tests, folder, *options)
    return [name for name in failed if plain.get(name) != "failed"], traffic


@pytest.mark.parametrize(
    "name",
    ["overlap", "rechunk", "linalg", "slicing", "shuffle", "reshape", "masked", "percentiles"],
)
def test_dask_array(name, tmp_path):
    # pytest needs no configuration of dask's there: markers are the only thing it would know.
    suspects, traffic = compare(
        tmp_path, [ARRAY / f"test_{name}.py"], tmp_path, "-W", "ignore", "-c", os.devnull
    )
    assert not suspects, f"with the plugin only: {suspects}"
    assert traffic["states"] == ["enabled"]
    assert traffic["by_handle"] > 0


@pytest.mark.parametrize(
    "name",
    [
        "tests/test_worker.py", "tests/test_failed_workers.py", "tests/test_steal.py",
        "tests/test_active_memory_manager.py", "tests/test_actor.py", "tests/test_nanny.py",
        "tests/test_spill.py", "tests/test_worker_memory.py", "tests/test_collections.py",
        "tests/test_worker_client.py", "tests/test_publish.py", "tests/test_tls_functional.py",
        "shuffle/tests/test_rechunk.py", "deploy/tests/test_adaptive.py",
    ],
)  # fmt: skip
def test_distributed(name, tmp_path):
    if CHECKOUT is None:
        pytest.skip("DISTRIBUTED_CHECKOUT is not set")
    file = pathlib.Path(CHECKOUT, "distributed", name)
    assert file.exists(), f"{CHECKOUT} is no checkout of distributed {distributed.__version__}"
    suspects, _ = compare(CHECKOUT, [file], tmp_path)
    assert not suspects, f"with the plugin only: {suspects}"
