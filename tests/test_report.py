"""`dask_gpuipc.report` and `dask gpuipc report`: what a cluster did, and why."""

from __future__ import annotations

import asyncio
import html.parser
import json
import os
import pty
import subprocess
import sys

import pytest
from click.testing import CliRunner
from cluster_fixtures import (
    LARGE,
    addresses,
    check_nothing_left,
    client,
    cluster,
    make,
    move,
    same,
    shared,
)
from distributed import Client, LocalCluster

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin
from dask_gpuipc.cli import gpuipc
from dask_gpuipc.errors import Refusal
from dask_gpuipc.explain import REFUSALS
from dask_gpuipc.reports import Cause, Pace, Paces, Pair, Report, Saving, WorkerRow
from dask_gpuipc.reports.record import ELSEWHERE, causes, percent, savings
from dask_gpuipc.stats import Timing, Traffic

__all__ = ["client", "cluster", "shared"]

NBYTES = 8 * LARGE
MiB = 2**20


# -- of a cluster ---------------------------------------------------------------------------------


def send(client: Client, source: str, target: str, seed: int = 0) -> None:
    made = client.submit(make, LARGE, seed, workers=[source], pure=False)
    assert move(client, made, target, same, LARGE, seed).result()


def test_tells_what_went_between_whom_by_which_rung_and_what_it_saved(shared: Client) -> None:
    a, b, c = addresses(shared)
    send(shared, a, b)
    send(shared, a, c)
    report = dask_gpuipc.report(shared)
    assert {(p.source, p.target): dict(p.rungs) for p in report.pairs} == {
        (a, b): {"share": Traffic(1, NBYTES)},
        (a, c): {"share": Traffic(1, NBYTES)},
    }
    assert report.totals == {"share": Traffic(2, 2 * NBYTES)}
    assert report.handle_bytes == 2 * NBYTES
    assert report.handle_fraction == 1
    assert {w.address: w.state for w in report.workers} == dict.fromkeys((a, b, c), "enabled")
    assert {w.memories for w in report.workers} == {("host",)}
    assert report.hit_rate is not None
    (saving,) = report.savings
    assert saving.memory == "host"
    assert (saving.timing.transfers, saving.timing.bytes) == (2, 2 * NBYTES)
    assert saving.seconds is not None
    assert saving.paces is not None
    assert saving.paces.handle.bandwidth > 0
    assert saving.paces.bytes.latency > 0
    assert not report.notes
    assert "3 of 3 workers enabled, 100% of 2.00 MiB by handle" in repr(report)
    assert json.loads(json.dumps(report.to_dict()))["totals"]["share"]["bytes"] == 2 * NBYTES


def test_measures_nothing_where_that_is_not_wanted_or_nothing_moved(shared: Client) -> None:
    a, b, _ = addresses(shared)
    assert dask_gpuipc.report(shared).savings == ()
    assert "nothing moved between workers, nothing held" in repr(dask_gpuipc.report(shared))
    send(shared, a, b)
    before = dask_gpuipc.statistics(shared)
    (saving,) = dask_gpuipc.report(shared, measure=False).savings
    assert saving.paces is saving.seconds is saving.bytes_seconds is None
    assert dask_gpuipc.statistics(shared)[a]["sent"] == before[a]["sent"]


def test_tells_of_refusals_with_their_remedies(shared: Client) -> None:
    a, b, _ = addresses(shared)
    small = shared.submit(make, 10, workers=[a], pure=False)
    assert move(shared, small, b, same, 10, 0).result()
    shared.submit(make, workers=[a], pure=False).result()
    report = dask_gpuipc.report(shared)
    counts = {cause.reason: (cause.count, cause.workers) for cause in report.refused}
    assert counts == {"too_small": (1, 1), "no_advertisement": (1, 1)}
    assert [(p.source, p.target) for p in report.pairs] == [(a, ELSEWHERE)]
    assert report.totals == {}  # a client is no worker
    for text in (str(report), report._repr_html_()):
        for cause in report.refused:
            assert cause.reason in text
        assert "gpuipc.min-bytes" in text


def test_of_an_asynchronous_client(shared: Client) -> None:
    async def made(address: str) -> Report:
        async with Client(address, asynchronous=True, set_as_default=False) as client:
            return await dask_gpuipc.report(client)

    report = asyncio.run(made(shared.scheduler.address))
    assert [worker.state for worker in report.workers] == ["enabled"] * 3


def test_workers_without_the_plugin_are_told(client: Client) -> None:
    report = dask_gpuipc.report(client)
    assert {worker.state for worker in report.workers} == {"disabled: not registered"}
    assert "0 of 3 workers enabled" in report.headline
    assert "disabled: not registered" in str(report)


def test_held_leases_are_told(shared: Client) -> None:
    a, b, _ = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    held = move(shared, source, b)
    report = dask_gpuipc.report(shared, measure=False)
    assert "1 leases on 1.00 MiB" in report.headline
    rows = {worker.address: worker for worker in report.workers}
    assert (rows[a].leases, rows[a].pinned_bytes, rows[a].holding) == (1, NBYTES, 0)
    assert (rows[b].leases, rows[b].holding) == (0, 1)
    del source, held


# -- the command ----------------------------------------------------------------------------------


def command(cluster: LocalCluster, *arguments: str) -> list[str]:
    place = ["--scheduler", cluster.scheduler_address]
    return [sys.executable, "-m", "dask", "gpuipc", "report", *place, *arguments]


def test_command_is_plain_where_it_is_piped(cluster: LocalCluster, shared: Client) -> None:
    a, b, _ = addresses(shared)
    send(shared, a, b)
    done = subprocess.run(command(cluster), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "3 of 3 workers enabled, 100% of 1.00 MiB by handle" in done.stdout
    assert "Bytes by handle, from row to column" in done.stdout
    assert "Time in transfers by handle" in done.stdout
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout


def test_command_gives_json(cluster: LocalCluster, shared: Client) -> None:
    a, b, _ = addresses(shared)
    send(shared, a, b)
    done = subprocess.run(
        command(cluster, "--json", "--no-measure"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["handle_fraction"] == 1
    assert report["savings"][0]["paces"] is None
    assert [worker["state"] for worker in report["workers"]] == ["enabled"] * 3


def on_a_terminal(*words: str) -> str:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(words, stdout=theirs, stderr=theirs, env={**os.environ, **TERMINAL}) as p:
        os.close(theirs)
        text = b""
        try:
            while part := os.read(ours, 1 << 16):
                text += part
        except OSError:  # the other end is closed
            pass
        finally:
            os.close(ours)
        p.wait(60)
    return text.decode()


TERMINAL = {"TERM": "xterm-256color", "COLUMNS": "160", "LINES": "50"}


def test_command_is_in_colour_on_a_terminal(cluster: LocalCluster, shared: Client) -> None:
    pytest.importorskip("rich", reason="rich is not installed")
    text = on_a_terminal(*command(cluster, "--no-measure"))
    assert "\x1b[32m3 of 3 workers enabled" in text


def test_command_without_rich_is_plain_on_a_terminal(cluster: LocalCluster, shared: Client) -> None:
    program = "import sys; sys.modules['rich'] = None; from dask_gpuipc.cli import gpuipc; gpuipc()"
    place = ["--scheduler", cluster.scheduler_address]
    text = on_a_terminal(sys.executable, "-c", program, "report", *place)
    assert "3 of 3 workers enabled" in text
    assert "\x1b" not in text


def test_command_tells_of_workers_that_share_nothing(cluster: LocalCluster, client: Client) -> None:
    place = ["--scheduler", cluster.scheduler_address]
    result = CliRunner().invoke(gpuipc, ["report", *place])
    assert result.exit_code == 1, result.output
    assert "disabled: not registered" in result.output


def test_command_without_a_cluster() -> None:
    result = CliRunner().invoke(gpuipc, ["report"])
    assert result.exit_code == 2
    assert "name the cluster: --scheduler" in result.output


def test_command_with_a_cluster_that_is_not_there() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dask", "gpuipc", "report", "--scheduler", "tcp://127.0.0.1:9"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "0.5s"},
    )
    assert done.returncode == 1
    assert "no scheduler at tcp://127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


# -- without a cluster ----------------------------------------------------------------------------


def row(number: int, **more: object) -> WorkerRow:
    fields = {
        "address": f"tcp://10.0.0.1:{number}",
        "name": str(number),
        "host": "node",
        "state": "enabled",
        "memories": ("cuda", "host"),
        **dict.fromkeys(
            ("leases", "pinned_bytes", "holding", "mappings", "mapped_bytes", "opens", "hits"), 0
        ),
        **more,
    }
    return WorkerRow(**fields)


def report_of(workers: list[WorkerRow], pairs: list[Pair], **more: object) -> Report:
    fields = {"refused": (), "failed": (), "savings": (), **more}
    return Report(tuple(workers), tuple(pairs), **fields)


def pair(a: int, b: int, **rungs: int) -> Pair:
    traffic = {rung: Traffic(1, nbytes) for rung, nbytes in rungs.items()}
    return Pair(f"tcp://10.0.0.1:{a}", f"tcp://10.0.0.1:{b}", traffic)


class Checked(html.parser.HTMLParser):
    """Every element is closed, and there is no script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag not in ("script", "style", "img")
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data.split()


def test_html_is_whole_and_escapes_what_comes_from_workers() -> None:
    evil = "<script>alert(1)</script>"
    report = report_of(
        [row(0, name=evil, host=evil, state=f"disabled: {evil}"), row(1)],
        [pair(0, 1, copy=MiB, bytes=MiB), pair(1, 7, share=MiB)],
        refused=(Cause(evil, 3, 1, REFUSALS[Refusal.BUDGET]),),
        savings=(Saving("cuda", Timing(2, MiB, 0.1), None),),
        notes=(evil,),
    )
    words = Checked(report._repr_html_()).words
    assert "50.0%" in words
    assert "budget" not in words  # the name that the worker gave it is shown
    assert "cuda:" in words


def test_large_clusters_show_the_busiest_pairs() -> None:
    workers = [row(n) for n in range(30)]
    report = report_of(workers, [pair(a, (a + 1) % 30, share=MiB * (a + 1)) for a in range(30)])
    text = str(report)
    assert "The busiest pairs" in text
    lines = text[text.index("The busiest pairs") :].splitlines()
    assert lines[2].split()[:5] == ["29", "0", "30.00", "MiB", "0"]
    assert len(lines) == 2 + 24
    Checked(report._repr_html_())


def test_workers_that_are_gone_are_named_by_their_address() -> None:
    workers = [row(n) for n in range(13)]
    assert "10.0.0.1:99 (gone)" in str(report_of(workers, [pair(0, 99, share=1)]))


def test_the_matrix_says_what_did_not_go_by_handle() -> None:
    report = report_of([row(0), row(1), row(10), row(2)], [pair(0, 1, share=9, bytes=1)])
    text = str(report)
    assert "9 B (90.0%)" in text
    assert text.index("\n  2 ") < text.index("\n  10 ")


def test_time_is_saved_where_handles_are_faster_and_lost_where_not() -> None:
    fast, slow = Pace(0.001, 1e9), Pace(0.002, 1e8)
    timing = {"host": {"transfers": 10, "bytes": 10**9, "seconds": 3.0}}
    (saving,) = savings({"a": {"timings": timing}}, {"host": Paces(handle=fast, bytes=slow)})
    assert saving.handle_seconds == pytest.approx(1.01)
    assert saving.bytes_seconds == pytest.approx(10.02)
    assert saving.seconds == pytest.approx(9.01)
    (lost,) = savings({"a": {"timings": timing}}, {"host": Paces(handle=slow, bytes=fast)})
    assert lost.seconds == pytest.approx(-9.01)
    assert "9.01 s lost" in report_of([row(0)], [], savings=(lost,))._repr_html_()


def test_reasons_of_a_later_version_are_shown_all_the_same() -> None:
    (cause,) = causes({"a": {"refused": {"of_tomorrow": 2}}}, Refusal)
    assert (cause.reason, cause.count) == ("of_tomorrow", 2)
    assert "not known" in cause.explanation.meaning


def test_all_is_only_said_of_all() -> None:
    assert [percent(x) for x in (0, 0.5, 0.9999999, 1)] == ["0%", "50.0%", "99.9%", "100%"]


def test_registering_again_keeps_the_report_working(client: Client) -> None:
    a, b, _ = addresses(client)
    for _ in range(2):
        client.register_worker_plugin(GPUIPCPlugin())
        send(client, a, b)
    assert dask_gpuipc.report(client).handle_fraction == 1
    check_nothing_left(client)
