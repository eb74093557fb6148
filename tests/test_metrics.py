"""What Prometheus and Dask's fine performance metrics get, and the Grafana dashboard on top."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from cluster_fixtures import LARGE, addresses, client, cluster, make, move, same, shared, until
from distributed import Client, LocalCluster, Scheduler

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin
from dask_gpuipc.metrics import NAMES, full_name
from dask_gpuipc.stats import Snapshot

__all__ = ["client", "cluster", "shared"]

GRAFANA = Path(__file__).parent.parent / "docs" / "grafana" / "dask-gpuipc.json"
NBYTES = 8 * LARGE


@pytest.fixture(autouse=True)
def prometheus() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")


def scraped(client: Client, address: str) -> str:
    """What a worker's own route answers."""
    worker = client.scheduler_info(n_workers=-1)["workers"][address]
    url = f"http://{worker['host']}:{worker['services']['dashboard']}/metrics"
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read().decode()


def samples(text: str) -> dict[str, float]:
    """Our samples by name and labels."""
    return {
        name: float(value)
        for name, value in re.findall(r"^(dask_gpuipc_\S+) (\S+)$", text, flags=re.MULTILINE)
        if "_created" not in name
    }


def test_a_worker_serves_its_numbers(shared: Client) -> None:
    a, b, _ = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    held = move(shared, source, b)
    shared.submit(make, workers=[a], pure=False).result()
    sender, receiver = samples(scraped(shared, a)), samples(scraped(shared, b))
    assert sender['dask_gpuipc_sent_bytes_total{rung="share"}'] == NBYTES
    assert sender['dask_gpuipc_sent_arrays_total{rung="bytes"}'] == 1
    assert sender['dask_gpuipc_refused_total{reason="no_advertisement"}'] == 1
    assert sender["dask_gpuipc_enabled"] == 1
    assert sender["dask_gpuipc_leases"] == 1
    assert sender["dask_gpuipc_pinned_bytes"] == NBYTES
    assert receiver['dask_gpuipc_received_bytes_total{rung="share"}'] == NBYTES
    assert receiver["dask_gpuipc_held_leases"] == 1
    assert receiver["dask_gpuipc_mappings"] == 1
    assert receiver["dask_gpuipc_mapped_bytes"] >= NBYTES
    assert receiver["dask_gpuipc_mapping_opens_total"] == 1
    assert receiver['dask_gpuipc_transfer_seconds_count{memory="host"}'] == 1
    seconds = dask_gpuipc.statistics(shared)[b]["timings"]["host"]["seconds"]
    assert receiver['dask_gpuipc_transfer_seconds_sum{memory="host"}'] == pytest.approx(seconds)
    del source, held


def test_metrics_are_there_once_as_long_as_the_plugin_is(client: Client) -> None:
    a, *_ = addresses(client)
    assert "gpuipc" not in scraped(client, a)
    for _ in range(2):  # a second registration replaces the first
        client.register_worker_plugin(GPUIPCPlugin())
        assert scraped(client, a).count("\ndask_gpuipc_leases ") == 1
    client.unregister_worker_plugin("gpuipc")
    assert "gpuipc" not in scraped(client, a)
    assert "dask_worker_threads" in scraped(client, a)


def test_names_follow_the_conventions(shared: Client) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (of Prometheus) is not installed")
    a, b, _ = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    assert move(shared, source, b, same, LARGE, 0).result()
    text = scraped(shared, b)
    ours = [line for line in text.splitlines() if "dask_gpuipc_" in line]
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input="\n".join(ours) + "\n",
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_workers_of_one_process_are_summed_up() -> None:
    options: dict[str, Any] = {"processes": False, "dashboard_address": None, "n_workers": 2}
    with LocalCluster(threads_per_worker=1, **options) as cluster, Client(cluster) as client:
        client.register_worker_plugin(GPUIPCPlugin())
        a, _ = addresses(client)
        assert samples(scraped(client, a))["dask_gpuipc_enabled"] == 2
        client.unregister_worker_plugin("gpuipc")
        assert "gpuipc" not in scraped(client, a)


def test_a_worker_that_shares_nothing_says_so() -> None:
    from prometheus_client import generate_latest

    from dask_gpuipc.metrics import collector

    hide = collector.expose(lambda: Snapshot("disabled: no memory", []))
    try:
        assert samples(generate_latest().decode())["dask_gpuipc_enabled"] == 0
    finally:
        hide()
        hide()  # idempotent
    assert "gpuipc" not in generate_latest().decode()


def test_without_prometheus_client_nothing_breaks() -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from dask_gpuipc.metrics import collector\n"
        "collector.expose(lambda: 1 / 0)()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_two_versions_of_the_package_in_one_process_are_no_error(caplog) -> None:
    from dask_gpuipc.metrics import Collector

    first, second = Collector(), Collector()
    snapshot = Snapshot("enabled", [])
    hide_first, hide_second = (c.expose(lambda: snapshot) for c in (first, second))
    hide_second()
    hide_first()
    assert "Prometheus gets no metrics of this worker" in caplog.text


# -- fine performance metrics ---------------------------------------------------------------------


def activities(dask_scheduler: Scheduler) -> dict[str, float]:
    return {
        " ".join(map(str, key)): value
        for key, value in dask_scheduler.cumulative_worker_metrics.items()
        if isinstance(key, tuple) and any("gpuipc" in str(part) for part in key)
    }


def test_dask_shows_handles_among_its_fine_performance_metrics(cluster, shared: Client) -> None:
    a, b, _ = addresses(shared)
    before = shared.run_on_scheduler(activities)
    source = shared.submit(make, workers=[a], pure=False)
    assert move(shared, source, b, same, LARGE, 0).result()

    def counted() -> dict[str, float]:
        after = shared.run_on_scheduler(activities)
        new = {name: value - before.get(name, 0) for name, value in after.items()}
        both = new.get("gather-dep gpuipc-import count") and new.get("get-data gpuipc-share count")
        return new if both else {}

    new = until(counted, "heartbeats to bring them")
    assert new["get-data gpuipc-share bytes"] == NBYTES
    assert new["get-data gpuipc-share count"] == 1
    assert new["get-data gpuipc-export seconds"] > 0
    assert new["get-data gpuipc-prepare seconds"] > 0
    assert new["gather-dep gpuipc-import bytes"] == NBYTES
    assert new["gather-dep gpuipc-import seconds"] > 0


# -- Grafana --------------------------------------------------------------------------------------


def expressions() -> list[str]:
    dashboard = json.loads(GRAFANA.read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_for_all_metrics_and_for_none_that_is_not_there() -> None:
    asked = set(re.findall(r"dask_gpuipc_\w+", " ".join(expressions())))
    plain = {re.sub(r"_(total|sum|count)$", "", name) for name in asked}
    there = {full_name(name) for name in NAMES}
    assert plain <= there
    # Of these the others tell as much: what is received was sent, and mappings have a size.
    left_out = ("received_bytes", "received_arrays", "mappings")
    assert there - plain == {full_name(name) for name in left_out}


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    dashboard = json.loads(GRAFANA.read_text())
    assert dashboard["id"] is None
    assert dashboard["uid"] == "dask-gpuipc"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells)
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}"


def test_the_dashboards_queries_parse(tmp_path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (of Prometheus) is not installed")
    known = {"$__rate_interval": "1m", "$__range": "30m", "$instance": ".*"}
    rules = []
    for number, expression in enumerate(expressions()):
        for name, value in known.items():
            expression = expression.replace(name, value)
        rules.append({"record": f"panel:{number}", "expr": expression})
    path = tmp_path / "rules.json"  # which is YAML too
    path.write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
    done = subprocess.run(
        [promtool, "check", "rules", str(path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
