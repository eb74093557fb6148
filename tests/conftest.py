"""Every test is held to leave nothing behind in the process that runs it."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile

import pytest

from dask_gpuipc.testing import leak_check

# What others start and keep, and why it is no leak of a test.
LINGERING = {
    r"child process .*resource_tracker": "multiprocessing's, started with the first spawned child",
    r"child process .*forkserver": "multiprocessing's, started with the first worker process",
    r"socket:\[\d+\] not unix": "connections that distributed pools; all of this package are unix",
    r"thread 'Dask-": "distributed: the offload executor and others, one for each process",
    r"thread 'Profile'": "distributed.profile: ends at its next sample after the last server",
    r"thread 'IO loop'": "distributed.utils: ends some time after the last client of its loop",
    r"thread 'QueueFeederThread'": "multiprocessing's, of the queues between nannies and workers",
    r"thread 'AsyncProcess": "distributed.process: watches a worker, ends after its process",
    r"thread 'ThreadPoolExecutor": "dask.threaded: the pool of local computations, never shut down",
    r"thread 'gpuipc-cuda": "a memory's: a daemon that ends after ten seconds without work",
    r"thread 'asyncio_\d": "the default executor of a loop: ends when the loop is closed",
}
# A cluster that outlives the test, in a fixture of a wider scope, starts and stops workers.
OF_A_CLUSTER = {
    r"child process": "workers that were restarted or scaled up",
    r"anon_inode:\[pidfd\]|pidfd:": "asyncio's watchers of those",
}

failed = pytest.StashKey[bool]()


def pytest_addoption(parser):
    parser.addoption(
        "--kill-matrix", metavar="FILE", help="write the outcome of all cells of the kill matrix"
    )


def pytest_terminal_summary(terminalreporter, config):
    path = config.getoption("kill_matrix")
    if path is None:
        return
    from kill_table import render

    passed = terminalreporter.stats.get("passed", [])
    outcomes = dict(
        value for report in passed for name, value in report.user_properties if name == "cell"
    )
    pathlib.Path(path).write_text(render(outcomes))
    terminalreporter.write_line(f"{path}: {len(outcomes)} cells")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        item.stash[failed] = True  # its traceback may hold anything
    return report


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """Descriptors, mappings, threads and children are afterwards what they were before."""
    ignore = list(LINGERING)
    if hasattr(request.module, "cluster"):
        ignore += OF_A_CLUSTER
    with contextlib.ExitStack() as stack:
        stack.enter_context(leak_check(ignore=ignore))
        yield
        if request.node.stash.get(failed, False):
            stack.pop_all()


@pytest.fixture
def short_path():
    """A directory with room for a socket's path, which tmp_path has not."""
    with tempfile.TemporaryDirectory(prefix="gpuipc-") as directory:
        yield pathlib.Path(directory)
