"""The page on Dask's dashboard, in a real browser, and what brings it there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Page, open_page
from cluster_fixtures import (
    LARGE,
    WORKERS,
    addresses,
    check_nothing_left,
    client,
    cluster,
    make,
    move,
    same,
    until,
)
from distributed import Client, LocalCluster

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin

__all__ = ["client", "cluster"]

pytest.importorskip("bokeh", reason="bokeh is not installed")
from dask_gpuipc.dashboard.components import Causes, HeldByWorker, PairMatrix, RungsOverTime
from dask_gpuipc.dashboard.page import PLOTS

NBYTES = 8 * LARGE
MiB = 2**20


@pytest.fixture
def link(client: Client) -> Iterator[str]:
    """The page of a cluster whose workers share."""
    link = dask_gpuipc.register(client)
    yield link
    check_nothing_left(client)


def send(client: Client, source: str, target: str) -> None:
    made = client.submit(make, workers=[source], pure=False)
    assert move(client, made, target, same, LARGE, 0).result()


def model(name: str) -> str:
    """JavaScript for a model of the page."""
    return f"Bokeh.documents[0].get_model_by_name({json.dumps(name)})"


def loaded(page: Page) -> None:
    page.until("window.Bokeh && Bokeh.documents.length > 0 && Bokeh.documents[0].roots().length")


# -- in a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """One browser for all tests; each goes to the page that it wants."""
    with open_page() as page:
        yield page


def test_the_page_shows_what_moves_while_it_moves(client: Client, page: Page, link: str) -> None:
    a, b, c = addresses(client)
    known = client.scheduler_info(n_workers=-1)["workers"]
    names = {address: str(known[address]["name"]) for address in known}
    headline = f"{model('gpuipc_headline')}.text"
    page.go(link)
    loaded(page)
    page.until(f"{headline}.includes('3 of 3 workers enabled, nothing moved')")
    send(client, a, b)
    page.until(f"{headline}.includes('100% of 1.00 MiB by handle')")
    send(client, a, c)
    page.until(f"{headline}.includes('100% of 2.00 MiB by handle')")
    data = page.evaluate(
        f"(d => ({{source: d.source, target: d.target, share: Array.from(d.share)}}))"
        f"({model('gpuipc_pairs')}.renderers[0].data_source.data)"
    )
    cells = zip(data["source"], data["target"], data["share"], strict=True)
    assert {(s, t): n for s, t, n in cells if n} == {
        (names[a], names[b]): NBYTES,
        (names[a], names[c]): NBYTES,
    }
    page.until(f"{model('gpuipc_rungs')}.renderers[0].data_source.get_length() > 3")
    assert page.evaluate("document.title") == "Dask: Chunks by Handle"
    assert not page.errors


def test_the_page_tells_of_refusals_and_of_what_is_held(
    client: Client, page: Page, link: str
) -> None:
    a, b, _ = addresses(client)
    page.go(link)
    loaded(page)
    source = client.submit(make, workers=[a], pure=False)
    held = move(client, source, b)
    client.submit(make, workers=[a], pure=False).result()
    reasons = f"{model('gpuipc_causes')}.source.data.reason"
    page.until(f"{reasons}.includes('no_advertisement')")
    remedies = page.evaluate(f"{model('gpuipc_causes')}.source.data.remedy")
    assert remedies == ["nothing for results; else register the plugin on all workers"]
    page.until(f"{model('gpuipc_headline')}.text.includes('1 leases on 1.00 MiB')")
    del source, held
    page.until(f"{model('gpuipc_headline')}.text.includes('nothing held')")
    assert not page.errors


def test_dasks_own_pages_lead_to_it(page: Page, link: str) -> None:
    page.go(link.replace("/gpuipc", "/status"))
    page.click("Gpuipc")
    page.until("document.title === 'Dask: Chunks by Handle'")
    loaded(page)
    assert "GPUIPC Pairs of Workers" in page.evaluate(
        "[...document.querySelectorAll('.dropdown-content a')].map(a => a.textContent)"
    )


def test_each_part_can_be_had_alone(page: Page, link: str) -> None:
    """As dask-labextension lays them out, in frames of its own."""
    for url in PLOTS:
        page.go(link.replace("gpuipc", url))
        loaded(page)
        page.until("Bokeh.documents[0].roots().length === 1")
        # It fills the frame that it is in.
        page.until("Bokeh.index.roots[0].el.getBoundingClientRect().height > 700")
        assert not page.errors


def test_a_narrow_window_has_one_column(page: Page, link: str) -> None:
    page.resize(700, 900)
    page.go(link)
    loaded(page)
    rows = page.until(
        "(r => r.every(x => x.height > 20) && r)([...document.querySelectorAll("
        "'#gpuipc-fluid > div')].map(e => e.getBoundingClientRect().toJSON()))"
    )
    assert len({row["x"] for row in rows}) == 1
    tops = [row["top"] for row in rows]
    assert tops == sorted(tops)
    assert not page.errors
    page.resize(1400, 900)


# -- what brings it -------------------------------------------------------------------------------


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def test_the_list_of_plots_has_dasks_and_ours(client: Client, link: str) -> None:
    plots = json.loads(fetched(link.replace("/gpuipc", "/individual-plots.json")))
    assert plots["Individual Task Stream"] == "/individual-task-stream"
    ours = {url.strip("/") for name, url in plots.items() if "GPUIPC" in name}
    assert ours == set(PLOTS)


def test_registering_again_changes_nothing(client: Client, link: str) -> None:
    assert dask_gpuipc.register(client, GPUIPCPlugin(min_bytes="1 MiB")) == link
    status = fetched(link.replace("/gpuipc", "/status"))
    assert status.count('href="gpuipc"') == 1
    assert status.count('href="individual-gpuipc-held"') == 1


def test_a_scheduler_without_a_dashboard_is_told_and_workers_share() -> None:
    options = {**WORKERS, "n_workers": 2, "dashboard_address": None}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        with pytest.warns(UserWarning, match="started without its dashboard"):
            assert dask_gpuipc.register(client) is None
        a, b = addresses(client)
        send(client, a, b)
        assert dask_gpuipc.report(client, measure=False).handle_fraction == 1
        check_nothing_left(client)


def test_without_bokeh_nothing_breaks() -> None:
    program = """
import sys, warnings
sys.modules["bokeh"] = None
from distributed import Client, LocalCluster
import dask_gpuipc
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    options = {"n_workers": 1, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        assert dask_gpuipc.register(client) is None
        assert [w["state"] for w in dask_gpuipc.statistics(client).values()] == ["enabled"]
told = [str(w.message) for w in caught if "dask-gpuipc" in str(w.message)]
assert len(told) == 1 and "needs bokeh where the scheduler runs" in told[0], told
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_preloading_scheduler_has_the_page_and_workers_that_share(tmp_path: Path) -> None:
    """``dask scheduler --preload dask_gpuipc``, as processes that users start."""
    file = str(tmp_path / "scheduler.json")
    here = str(Path(__file__).parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    dask = [sys.executable, "-m", "dask"]
    scheduler = [*dask, "scheduler", "--port", "0", "--dashboard-address", ":0"]
    worker = [*dask, "worker", "--no-nanny", "--no-dashboard", "--memory-limit", "4GB"]
    place = ["--scheduler-file", file]
    processes = [subprocess.Popen([*scheduler, *place, "--preload", "dask_gpuipc"], env=env)]
    try:
        until(Path(file).exists, "the scheduler")
        processes.append(subprocess.Popen([*worker, *place], env=env))
        with Client(scheduler_file=file, timeout=60) as client:
            client.wait_for_workers(1, timeout=60)
            until(
                lambda: (
                    [s["state"] for s in dask_gpuipc.statistics(client).values()] == ["enabled"]
                ),
                "the plugin",
            )
            services: Any = client.scheduler_info()["services"]
            page = fetched(f"http://127.0.0.1:{services['dashboard']}/gpuipc")
            assert 'id="gpuipc-fluid"' in page
    finally:
        # One after the other: a worker that gets SIGTERM while its scheduler closes it can hang in
        # distributed, with the plugin or without.
        for process in reversed(processes):
            process.terminate()
            try:
                process.wait(30)
            finally:
                process.kill()
                process.wait()


# -- without a browser ----------------------------------------------------------------------------


class FakeWorker:
    def __init__(self, address: str, **numbers: Any) -> None:
        self.address = address
        self.name = address
        self.host = "node"
        self.metrics = {"gpuipc": {"state": "enabled", "sent": {}, **numbers}} if numbers else {}


class FakeScheduler:
    def __init__(self, *workers: FakeWorker) -> None:
        self.workers = {worker.address: worker for worker in workers}


def sent(nbytes: int) -> dict[str, Any]:
    return {"share": {"arrays": 1, "bytes": nbytes}}


def test_rates_are_of_what_was_sent_since_the_page_was_opened(monkeypatch) -> None:
    now = 1000.0
    monkeypatch.setattr("dask_gpuipc.dashboard.components.time.time", lambda: now)
    worker = FakeWorker("tcp://a:1", sent=sent(100 * MiB))
    scheduler = FakeScheduler(worker)
    component = RungsOverTime(scheduler)
    component.update()
    now += 1
    worker.metrics["gpuipc"]["sent"] = sent(108 * MiB)
    scheduler.workers["tcp://b:1"] = FakeWorker("tcp://b:1", sent=sent(50 * MiB))
    component.update()
    worker.metrics["gpuipc"]["sent"] = sent(2 * MiB)  # restarted
    now += 1
    component.update()
    del scheduler.workers["tcp://b:1"]
    for _ in range(6):
        now += 1
        component.update()
    shares = [round(rate / MiB, 2) for rate in component.source.data["share"]]
    assert shares == [0, 8, 4, 2.67, 2, 0, 0, 0, 0]
    assert component.source.data["bytes"] == [0.0] * 9
    assert component.root.title.text == "Sent by rung: 0 B/s"


@pytest.mark.parametrize("cls", [PairMatrix, HeldByWorker, Causes, RungsOverTime])
def test_parts_show_a_cluster_of_any_size(cls: Any) -> None:
    for number in (0, 1, 40):
        workers = [
            FakeWorker(f"tcp://host-{i}:1234", sent=sent(1), refused={"budget": i, "new": 1})
            for i in range(number)
        ]
        component = cls(FakeScheduler(*workers, FakeWorker("tcp://plain:1")))
        component.update()
        component.update()
        lengths = {len(column) for column in component.source.data.values()}
        assert len(lengths) == 1


def test_cells_tell_how_much_went_by_handle() -> None:
    traffic = {
        "tcp://b:1": {"share": {"arrays": 1, "bytes": 3}, "bytes": {"arrays": 1, "bytes": 1}}
    }
    scheduler = FakeScheduler(FakeWorker("tcp://a:1", sent_to=traffic), FakeWorker("tcp://b:1"))
    component = PairMatrix(scheduler)
    component.update()
    rows = zip(*(component.source.data[k] for k in ("source", "target", "text")), strict=True)
    assert list(rows) == [
        ("a:1", "a:1", ""),
        ("a:1", "b:1", "4 B\n75.0%"),
        ("b:1", "a:1", ""),
        ("b:1", "b:1", ""),
    ]


def test_rows_stand_in_the_order_of_columns() -> None:
    component = PairMatrix(FakeScheduler(*(FakeWorker(f"tcp://{c}:1") for c in "cab")))
    component.update()
    assert component.root.x_range.factors == ["a:1", "b:1", "c:1"]
    assert component.root.y_range.factors == ["c:1", "b:1", "a:1"]
