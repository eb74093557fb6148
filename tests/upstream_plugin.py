"""A pytest plugin: tests of dask.array and distributed, on clusters with this package's plugin.

`python -m pytest -p upstream_plugin --upstream-mode plugin FILE...`; with ``plain`` the same
clusters lack it. Workers get it by the configuration, ``distributed.worker.preload``, as in any
deployment. Tests of dask.array compute on a cluster of two worker processes instead of on the
synchronous scheduler; those of distributed make clusters of their own.
"""

from __future__ import annotations

import json
import os
import pathlib

import pytest

ARRAY = "dask/array/tests"


def pytest_addoption(parser):
    parser.addoption("--upstream-mode", choices=("plain", "plugin"), default="plugin")
    parser.addoption("--upstream-report", metavar="FILE", help="outcomes and traffic, as JSON")


def pytest_configure(config):
    if config.getoption("upstream_mode") == "plugin":
        import dask

        # In the environment for worker processes, in the configuration for this one.
        os.environ["DASK_DISTRIBUTED__WORKER__PRELOAD"] = '["dask_gpuipc"]'
        os.environ["DASK_GPUIPC__MIN_BYTES__HOST"] = "1"
        dask.config.refresh()
    config.upstream_outcomes, config.upstream_traffic = {}, {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    outcomes = item.config.upstream_outcomes
    if report.when == "call" or report.outcome != "passed":
        outcomes[item.nodeid.rpartition("tests/")[2]] = report.outcome
    return report


@pytest.fixture(scope="session")
def upstream_client(request):
    import dask.array.utils
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", silence_logs=50
        ) as cluster,
        Client(cluster) as client,
    ):
        for function in (dask.array.utils.assert_eq, dask.array.utils._get_dt_meta_computed):
            names = function.__code__.co_varnames[: function.__code__.co_argcount]
            first = len(names) - len(function.__defaults__)
            function.__defaults__ = tuple(
                None if name == "scheduler" else value
                for name, value in zip(names[first:], function.__defaults__, strict=True)
            )
        yield client
        if request.config.getoption("upstream_mode") == "plugin":
            import dask_gpuipc

            stats = dask_gpuipc.statistics(client)
            sent = [s["sent"].get("share", {"arrays": 0})["arrays"] for s in stats.values()]
            request.config.upstream_traffic.update(
                by_handle=sum(sent), states=sorted({s["state"] for s in stats.values()})
            )


def pytest_collection_modifyitems(items):
    for item in items:
        if ARRAY in item.nodeid or ARRAY in str(item.path):
            item.fixturenames.insert(0, "upstream_client")


def pytest_sessionfinish(session):
    path = session.config.getoption("upstream_report")
    if path:
        found = {
            "outcomes": session.config.upstream_outcomes,
            "traffic": session.config.upstream_traffic,
        }
        pathlib.Path(path).write_text(json.dumps(found))
