"""`dask gpuipc doctor`: whether handles work, on this machine and on a running cluster."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner
from cluster_fixtures import addresses, client, cluster, shared
from distributed import Client, LocalCluster

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin
from dask_gpuipc.cli import gpuipc
from dask_gpuipc.doctor import Diagnosis, Finding, Level, PairResult, machine
from dask_gpuipc.doctor.pairs import merged, neighbours
from dask_gpuipc.doctor.text import show
from dask_gpuipc.probe import Fetched
from dask_gpuipc.terminal import PlainScreen

__all__ = ["client", "cluster", "shared"]

MiB = 2**20


def test_on_this_machine_handles_work_both_ways() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dask", "gpuipc", "doctor", "--json", "--size", "1 MiB"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["works"] is True
    host = [pair for pair in found["pairs"] if pair["memory"] == "host"]
    assert [(pair["source"], pair["target"]) for pair in host] == [
        ("process a", "process b"),
        ("process b", "process a"),
    ]
    for pair in host:
        assert {wanted: one["rung"] for wanted, one in pair["ways"].items()} == {
            "share": "share",
            "bytes": "bytes",
        }
        assert all(one["right"] and one["seconds"] > 0 for one in pair["ways"].values())
        assert {one["nbytes"] for one in pair["ways"].values()} == {MiB}
    assert {"python", "kernel", "distributed"} <= set(found["versions"])
    assert not [one for one in found["findings"] if one["level"] == "bad"]


def doctor(cluster: LocalCluster, *arguments: str) -> Any:
    place = ["--scheduler", cluster.scheduler_address, "--size", "1 MiB"]
    return CliRunner().invoke(gpuipc, ["doctor", *place, *arguments])


def test_a_running_cluster_is_tried_pair_by_pair(cluster: LocalCluster, shared: Client) -> None:
    result = doctor(cluster, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    all_pairs = {(a, b) for a in addresses(shared) for b in addresses(shared) if a != b}
    assert {(pair["source"], pair["target"]) for pair in found["pairs"]} == all_pairs
    assert {pair["ways"]["handle"]["rung"] for pair in found["pairs"]} == {"share"}
    assert all(pair["works"] and not pair["reasons"] for pair in found["pairs"])


def test_a_cluster_without_the_plugin_is_told_what_to_do_and_left_alone(
    cluster: LocalCluster, client: Client
) -> None:
    result = doctor(cluster)
    assert result.exit_code == 1, result.output
    words = " ".join(result.output.split())
    assert "disabled: not registered" in words
    assert "register the plugin" in words
    states = {s["state"] for s in dask_gpuipc.statistics(client).values()}
    assert states == {"disabled: not registered"}


def test_pairs_that_go_as_bytes_are_told_with_the_reason(
    cluster: LocalCluster, client: Client
) -> None:
    client.register_worker_plugin(GPUIPCPlugin(pinned_limit="64 KiB"))
    result = doctor(cluster)
    assert result.exit_code == 1, result.output
    words = " ".join(result.output.split())
    assert "does not work" in words
    assert "budget" in words
    assert "pinned-limit" in words
    client.unregister_worker_plugin("gpuipc")


# -- what is found --------------------------------------------------------------------------------


def found(what: str) -> Finding:
    (one,) = [finding for finding in machine.findings() if finding.what == what]
    return one


def test_few_descriptors_are_noted() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert found("open files").level is Level.GOOD
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        assert found("open files").level is Level.NOTE
        assert found("open files").remedy == "ulimit -n"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_socket_directory_that_does_not_serve_is_bad(monkeypatch) -> None:
    import dask

    with dask.config.set({"gpuipc.socket-directory": "/nonexistent"}):
        bad = found("socket directory")
    assert bad.level is Level.BAD
    assert "/nonexistent" in bad.value
    assert "gpuipc.socket-directory" in bad.remedy
    assert found("socket directory").level is Level.GOOD


def test_a_look_that_fails_is_a_finding(monkeypatch) -> None:
    def broken() -> int:
        raise PermissionError("no")

    monkeypatch.setattr("dask_gpuipc.doctor.machine.psutil.virtual_memory", broken)
    assert found("memory").level is Level.NOTE


def fetched(rung: str, **more: Any) -> Fetched:
    return Fetched(**{"nbytes": MiB, "seconds": 0.001, "rung": rung, "right": True, **more})


@pytest.mark.parametrize(
    ("ways", "works"),
    [
        ({"copy": fetched("copy"), "bytes": fetched("bytes")}, True),
        ({"copy": fetched("host")}, True),
        ({"copy": fetched("copy"), "share": fetched("bytes")}, False),
        ({"copy": fetched("copy", right=False)}, False),
        ({"copy": fetched("", right=False, failed="stale")}, False),
        ({"bytes": fetched("bytes")}, False),
        ({}, False),
    ],
)
def test_a_pair_works_if_all_but_bytes_came_by_handle_and_right(ways, works) -> None:
    pair = PairResult("a", "b", "cuda", ways)
    assert pair.works is works
    diagnosis = Diagnosis("here", {}, (), (pair,))
    assert diagnosis.works is works
    assert json.loads(json.dumps(diagnosis.to_dict()))["works"] is works


def test_nothing_tried_is_nothing_that_works() -> None:
    assert not Diagnosis("here", {}, (), ()).works


def test_ways_of_one_pair_are_put_together() -> None:
    (one,) = merged(
        [
            PairResult("a", "b", "cuda", {"copy": fetched("copy")}, ("budget",)),
            PairResult("a", "b", "cuda", {"share": fetched("share")}, error="busy"),
        ]
    )
    assert (list(one.ways), one.reasons, one.error) == (["copy", "share"], ("budget",), "busy")


def test_only_workers_of_one_node_with_a_memory_in_common_are_tried() -> None:
    numbers = {
        "a": {"node": "1", "memories": ["cuda", "host"]},
        "b": {"node": "1", "memories": ["host"]},
        "c": {"node": "2", "memories": ["host"]},
    }
    assert neighbours(numbers) == [("host", "a", "b"), ("host", "b", "a")]


def test_text_tells_all_ways_that_a_chunk_can_take(capsys) -> None:
    pairs = (
        PairResult("GPU 0", "GPU 1", "cuda", {"copy": fetched("host"), "bytes": fetched("bytes")}),
        PairResult("GPU 1", "GPU 0", "cuda", {}, error="it is busy"),
        PairResult("GPU 1", "GPU 1", "cuda", {"copy": fetched("copy", right=False)}),
    )
    show(Diagnosis("here", {"python": "3"}, (), pairs), PlainScreen(sys.stdout, 200))
    text = capsys.readouterr().out
    assert "host: 0.98 GiB/s" in text
    assert "it is busy" in text
    assert "wrong values" in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]
