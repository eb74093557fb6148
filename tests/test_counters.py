"""What is counted, by whom it was asked for, how long it took, and what the log is told."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import threading

import numpy as np
import pytest
from cluster_fixtures import (
    LARGE,
    addresses,
    client,
    cluster,
    make,
    move,
    same,
    shared,
    until,
)
from distributed import Client, Worker

import dask_gpuipc
from dask_gpuipc.errors import Failure, Refusal
from dask_gpuipc.explain import FAILURES, REFUSALS, Notices
from dask_gpuipc.stats import MAX_PEERS, OTHERS, Statistics, Timing, Traffic

__all__ = ["client", "cluster", "shared"]

NBYTES = 8 * LARGE


# -- by peer -------------------------------------------------------------------------------------


def test_what_was_sent_is_counted_by_peer_and_in_all():
    stats = Statistics()
    for to, rung in (("a", "share"), ("b", "share"), ("a", "bytes"), ("a", "share")):
        stats.sent(rung, 10, to)
    stats.sent("bytes", 5)
    now = stats.snapshot(state="enabled", memories=[])
    assert now.sent_to == {
        "b": {"share": Traffic(1, 10)},
        "a": {"share": Traffic(2, 20), "bytes": Traffic(1, 10)},
        OTHERS: {"bytes": Traffic(1, 5)},
    }
    assert now.sent == {"share": Traffic(3, 30), "bytes": Traffic(2, 15)}


def test_peers_of_long_ago_are_summed_up():
    stats = Statistics()
    for number in range(3 * MAX_PEERS):
        stats.sent("share", 10, f"worker-{number}")
        stats.sent("copy", 1, "busy")
    by_peer = stats.snapshot(state="enabled", memories=[]).sent_to
    assert len(by_peer) == MAX_PEERS
    assert by_peer["busy"] == {"copy": Traffic(3 * MAX_PEERS, 3 * MAX_PEERS)}
    assert f"worker-{3 * MAX_PEERS - 1}" in by_peer
    assert "worker-0" not in by_peer
    everything = sum(rungs.get("share", Traffic()).arrays for rungs in by_peer.values())
    assert everything == 3 * MAX_PEERS


# -- time ----------------------------------------------------------------------------------------


def test_only_answers_with_handles_are_timed():
    stats = Statistics()
    with stats.measured():
        pass
    stats.received("share", 10, "host")
    assert stats.snapshot(state="", memories=[]).timings == {}
    with stats.measured():
        stats.received("share", 10, "host")
        stats.received("copy", 30, "cuda")
    (memory, timing), *more = stats.snapshot(state="", memories=[]).timings.items()
    assert not more
    assert memory == "cuda"
    assert (timing.transfers, timing.bytes) == (1, 40)
    assert timing.seconds > 0


def test_what_another_thread_deserializes_counts_where_it_belongs():
    stats = Statistics()

    async def one(nbytes: int) -> None:
        with stats.measured():
            context = contextvars.copy_context()
            await asyncio.to_thread(context.run, stats.received, "share", nbytes, "host")

    async def both() -> None:
        await asyncio.gather(one(1), one(2))

    asyncio.run(both())
    timing = stats.snapshot(state="", memories=[]).timings["host"]
    assert (timing.transfers, timing.bytes) == (2, 3)
    assert timing + Timing(1, 1, 1.0) == Timing(3, 4, timing.seconds + 1.0)


# -- the log -------------------------------------------------------------------------------------


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "distributed.gpuipc"]


def test_each_cause_that_somebody_should_see_to_is_logged_once_with_its_remedy(caplog):
    stats = Statistics()
    for _ in range(3):
        for refusal in Refusal:
            stats.refused(refusal, "the detail")
        for failure in Failure:
            stats.failed(failure, "the detail")
    explanations = [*REFUSALS.values(), *FAILURES.values()]
    warning = [x for x in explanations if x.warns]
    messages = told(caplog)
    assert len(messages) == len(warning)
    assert 0 < len(warning) < len(explanations)
    for message, explanation in zip(messages, warning, strict=True):
        assert explanation.meaning in message
        assert explanation.remedy in message
        assert "[the detail]" in message
    assert {r.levelno for r in caplog.records} == {logging.WARNING}


def test_something_unforeseen_is_logged_with_its_traceback(caplog):
    Notices().tell(Refusal.ERROR, "ZeroDivisionError()", ZeroDivisionError())
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_threads_that_meet_the_same_cause_log_it_once(caplog):
    notices, start = Notices(), threading.Barrier(8)

    def tell() -> None:
        start.wait()
        notices.tell(Refusal.BUDGET)

    threads = [threading.Thread(target=tell) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told(caplog)) == 1


# -- on a cluster --------------------------------------------------------------------------------


def test_a_cluster_tells_who_sent_what_to_whom(shared: Client) -> None:
    a, b, c = addresses(shared)
    for seed, to in ((1, b), (2, b), (3, c)):
        source = shared.submit(make, LARGE, seed, workers=[a], pure=False)
        assert move(shared, source, to, same, LARGE, seed).result()
    mine = shared.submit(make, workers=[a], pure=False)
    assert isinstance(mine.result(), np.ndarray)  # the client has no plugin, and no address
    stats = dask_gpuipc.statistics(shared)
    assert stats[a]["sent_to"] == {
        b: {"share": {"arrays": 2, "bytes": 2 * NBYTES}},
        c: {"share": {"arrays": 1, "bytes": NBYTES}},
        "": {"bytes": {"arrays": 1, "bytes": NBYTES}},
    }
    assert stats[b]["sent_to"] == stats[c]["sent_to"] == {}
    timing = stats[b]["timings"]["host"]
    assert timing["transfers"] == 2
    assert timing["bytes"] == 2 * NBYTES
    assert 0 < timing["seconds"] < 30
    assert stats[a]["timings"] == {}


def plain(numbers: object) -> object:
    """As JSON has it: what comes with a heartbeat has tuples for lists."""
    return json.loads(json.dumps(numbers))


def test_the_scheduler_knows_all_numbers_from_heartbeats(shared: Client) -> None:
    a, b, _ = addresses(shared)
    source = shared.submit(make, workers=[a], pure=False)
    held = move(shared, source, b)

    def known() -> bool:
        workers = shared.scheduler_info(n_workers=-1)["workers"]
        return all(
            plain(workers[address]["metrics"].get("gpuipc")) == plain(numbers)
            for address, numbers in dask_gpuipc.statistics(shared).items()
        )

    until(known, "heartbeats to bring the numbers that the workers have")
    del held


def warn_of_nothing(dask_worker: Worker) -> list[str]:
    return [message for _, message in dask_worker.get_logs() if "goes as bytes" in message]


def test_ordinary_work_warns_of_nothing(shared: Client) -> None:
    a, b, _ = addresses(shared)
    small = shared.submit(make, 10, workers=[a], pure=False)
    assert move(shared, small, b, same, 10, 0).result()
    assert len(small.result()) == 10
    assert not any(shared.run(warn_of_nothing).values())
