"""Queues, pools, executors and arguments of processes, with each way to start them."""

from __future__ import annotations

import multiprocessing as mp
import signal
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

import numpy as np
import pytest
import sharing_peers as at
import sharing_workers as work
from helpers import child, wait_until

METHODS = ["spawn", "forkserver", "fork"]


@pytest.fixture(scope="module")
def parent():
    with child(daemon=False) as a:
        yield a


@pytest.fixture
def a(parent):
    with at.session(parent):
        yield parent


@contextmanager
def context(method):
    """Of a start method; from Python 3.12 on a fork beside threads is a warning."""
    work.init()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield mp.get_context(method)


def arrays(count):
    return [np.full(5000, i, "i4") for i in range(count)]


# -- pools -----------------------------------------------------------------------------------------


def through_a_pool(method):
    with context(method) as ctx, ctx.Pool(2, work.init) as pool:
        doubled = pool.map(work.double, arrays(6), chunksize=1)
        added = pool.map(work.add, [(x, x) for x in doubled], chunksize=2)
        [nested] = pool.map(work.sums, [arrays(3)])
        values = [int(x[0]) for x in doubled], [int(x[0]) for x in added], nested
        sent, back = at.traffic("sent"), at.traffic("received")
        del doubled, added
        wait_until(at.nothing_kept)
        pool.close()
        pool.join()
    return values, sent, back


@pytest.mark.parametrize("method", METHODS)
def test_arguments_and_results_of_a_pool_go_as_handles(a, method):
    values, sent, back = a.call(through_a_pool, method)
    assert values == ([0, 2, 4, 6, 8, 10], [0, 4, 8, 12, 16, 20], [0, 5000, 10000])
    assert sent == {"share": 6 + 2 * 6 - 6 + 3}  # x and x are one array in its message
    assert back == {"share": 12}


def through_an_executor(method):
    with context(method) as ctx, ProcessPoolExecutor(2, ctx, work.init) as pool:
        doubled = list(pool.map(work.double, arrays(6)))
        values = [int(x[0]) for x in doubled]
        sent, back = at.traffic("sent"), at.traffic("received")
        del doubled
        wait_until(at.nothing_kept)
    return values, sent, back


@pytest.mark.parametrize("method", METHODS)
def test_arguments_and_results_of_an_executor_go_as_handles(a, method):
    assert a.call(through_an_executor, method) == (
        [0, 2, 4, 6, 8, 10],
        {"share": 6},
        {"share": 6},
    )


def a_worker_that_is_killed():
    with context("spawn") as ctx, ProcessPoolExecutor(1, ctx, work.init) as pool:
        with pytest.raises(BrokenProcessPool):
            pool.submit(work.kill_me, np.ones(5000)).result(60)
        wait_until(at.nothing_kept)


def test_a_killed_worker_keeps_nothing(a):
    a.call(a_worker_that_is_killed)


# -- processes -------------------------------------------------------------------------------------


def by_argument(method):
    with context(method) as ctx:
        mine, theirs = ctx.Pipe(duplex=False)
        process = ctx.Process(target=work.sum_argument, args=(np.ones(5000), theirs))
        process.start()
        total = mine.recv()
        process.join()
        for end in (mine, theirs):
            end.close()
        wait_until(at.nothing_kept)
    return total, at.traffic("sent")


@pytest.mark.parametrize(("method", "sent"), [("spawn", 1), ("forkserver", 1), ("fork", 0)])
def test_arguments_of_a_process(a, method, sent):
    assert a.call(by_argument, method) == (5000, {"share": 1} if sent else {})


def killed_before_it_ran():
    with context("spawn") as ctx:
        mine, theirs = ctx.Pipe(duplex=False)
        process = ctx.Process(target=work.sum_argument, args=(np.ones(5000), theirs))
        process.start()
        process.kill()
        process.join()
        mine.close()
        theirs.close()
        wait_until(at.nothing_kept)


def test_an_argument_for_a_process_that_is_killed_is_let_go(a):
    a.call(killed_before_it_ran)


def through_queues(method):
    with context(method) as ctx:
        tasks, results = ctx.Queue(), ctx.Queue()
        process = ctx.Process(target=work.sum_all, args=(tasks, results))
        process.start()
        for x in arrays(4):
            tasks.put(x)
        back = [results.get(timeout=60) for _ in range(4)]
        values = [(total, int(x[0])) for total, x in back]
        del back, x
        tasks.put(None)
        process.join()
        for queue in (tasks, results):
            queue.close()
            queue.join_thread()
        wait_until(at.nothing_kept)
    return values


@pytest.mark.parametrize("method", METHODS)
def test_queues_both_ways(a, method):
    assert a.call(through_queues, method) == [(5000 * i, i) for i in range(4)]


def joined_before_received(method):
    with context(method) as ctx:
        queue = ctx.Queue()
        process = ctx.Process(target=work.put_and_end, args=(queue, 7))
        process.start()
        process.join()
        array = queue.get(timeout=60)
        queue.close()
        queue.join_thread()
    return int(array.sum()), process.exitcode


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_process_may_end_before_what_it_sent_is_received(a, method):
    assert a.call(joined_before_received, method) == (35000, 0)


def ended_after_each_task():
    with context("spawn") as ctx, ctx.Pool(1, work.init, maxtasksperchild=1) as pool:
        results = pool.map(work.double, arrays(2), chunksize=1)
        return [int(x[0]) for x in results]


def test_workers_that_end_after_each_task(a):
    assert a.call(ended_after_each_task) == [0, 2]


def a_full_queue():
    """More messages than a pipe holds, with nobody there to read: the end must not hang."""
    with context("spawn") as ctx:
        queue = ctx.Queue()
        for x in arrays(300):
            queue.put(x)
        queue.cancel_join_thread()
        queue.close()
    at.here["queue"] = None


def test_a_queue_that_is_never_read_does_not_hold_up_the_end():
    with child(daemon=False) as c:
        c.call(a_full_queue)
    assert c.process is not None


def interrupted():
    with context("spawn") as ctx:
        tasks, results = ctx.Queue(), ctx.Queue()
        process = ctx.Process(target=work.sum_all, args=(tasks, results))
        process.start()
        for x in arrays(2):
            tasks.put(x)
        results.get(timeout=60)
        process.terminate()
        process.join()
        for queue in (tasks, results):
            queue.close()
            queue.join_thread()
        wait_until(at.nothing_kept)
    return process.exitcode


def test_a_consumer_that_is_terminated(a):
    assert a.call(interrupted) == -signal.SIGTERM
