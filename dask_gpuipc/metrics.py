"""Metrics for Prometheus, on the route ``/metrics`` that Dask's workers have anyway.

One collector for the process, in `prometheus_client`'s default registry, which is what that route
serves; it is there while a plugin is. Several workers of one process are summed up, as they serve
one registry. Without prometheus_client nothing happens.

Names begin with Dask's own prefix (``distributed.dashboard.prometheus.namespace``) and ``gpuipc``;
`NAMES` lists them. Numbers by pair of workers are not among them: there would be a series for each.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import dask

from dask_gpuipc.stats import Snapshot, Timing, Traffic

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger("distributed.gpuipc")

GAUGES: Final[Mapping[str, tuple[str, Callable[[Snapshot], int]]]] = {
    "enabled": ("Whether this worker shares memory.", lambda s: s.state == "enabled"),
    "leases": ("Claims of other workers on arrays of this one.", lambda s: s.leases),
    "pinned_bytes": ("Bytes kept in place for these claims.", lambda s: s.pinned_bytes),
    "held_leases": ("Claims of this worker on arrays of others.", lambda s: s.holding),
    "mappings": ("Allocations of other workers that are open here.", lambda s: s.mappings),
    "mapped_bytes": ("Size of these allocations.", lambda s: s.mapped_bytes),
}
COUNTERS: Final[Mapping[str, tuple[str, Callable[[Snapshot], int]]]] = {
    "mapping_opens": ("Allocations of other workers that had to be opened.", lambda s: s.opens),
    "mapping_hits": ("Allocations of other workers that were found open.", lambda s: s.hits),
}
BY_LABEL: Final[Mapping[str, tuple[str, str, Callable[[Snapshot], Mapping[str, int]]]]] = {
    "sent_bytes": ("Bytes of arrays that were sent.", "rung", lambda s: _bytes(s.sent)),
    "sent_arrays": ("Arrays that were sent.", "rung", lambda s: _arrays(s.sent)),
    "received_bytes": (
        "Bytes of arrays that came by handle.",
        "rung",
        lambda s: _bytes(s.received),
    ),
    "received_arrays": ("Arrays that came by handle.", "rung", lambda s: _arrays(s.received)),
    "refused": ("Arrays or requests that were declined.", "reason", lambda s: s.refused),
    "failed": ("Handles that arrived and did not open.", "reason", lambda s: s.failed),
}
SECONDS: Final = "transfer_seconds"
NAMES: Final = (*GAUGES, *COUNTERS, *BY_LABEL, SECONDS)


class Collector:
    """Reads the numbers of all plugins of the process when it is asked. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: list[Callable[[], Snapshot]] = []

    def collect(self) -> Iterator[Metric]:
        """All metrics now; prometheus_client calls it for each scrape."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            SummaryMetricFamily,
        )

        with self._lock:
            sources = list(self._sources)
        now = [source() for source in sources]
        for name, (text, read) in GAUGES.items():
            yield GaugeMetricFamily(full_name(name), text, value=sum(map(read, now)))
        for name, (text, read) in COUNTERS.items():
            yield CounterMetricFamily(full_name(name), text, value=sum(map(read, now)))
        for name, (text, label, read_all) in BY_LABEL.items():
            counter = CounterMetricFamily(full_name(name), text, labels=[label])
            for value, count in _summed(map(read_all, now)).items():
                counter.add_metric([value], count)
            yield counter
        summary = SummaryMetricFamily(
            full_name(SECONDS),
            "Time from asking to having, of answers by handle.",
            labels=["memory"],
        )
        for memory, timing in _timings(now).items():
            summary.add_metric([memory], timing.transfers, timing.seconds)
        yield summary

    def expose(self, source: Callable[[], Snapshot]) -> Callable[[], None]:
        """Show the numbers of one more plugin until what this returns is called.

        What cannot be shown is logged; nothing is raised.
        """
        try:
            from prometheus_client import REGISTRY
        except ImportError:
            return _nothing
        with self._lock:
            self._sources.append(source)
            first = len(self._sources) == 1
        if first:
            try:
                REGISTRY.register(self)
            except ValueError as error:
                logger.warning("Prometheus gets no metrics of this worker: %s", error)
        return lambda: self._hide(source)

    def _hide(self, source: Callable[[], Snapshot]) -> None:
        from prometheus_client import REGISTRY

        with self._lock:
            if source not in self._sources:
                return
            self._sources.remove(source)
            last = not self._sources
        if last:
            try:
                REGISTRY.unregister(self)
            except KeyError:
                logger.debug("it was never registered")


collector: Final = Collector()
"""The process's."""


def full_name(name: str) -> str:
    """With Dask's prefix and ours."""
    prefix = dask.config.get("distributed.dashboard.prometheus.namespace", "dask")
    return "_".join(part for part in (prefix, "gpuipc", name) if part)


def _bytes(traffic: Mapping[str, Traffic]) -> dict[str, int]:
    return {rung: one.bytes for rung, one in traffic.items()}


def _arrays(traffic: Mapping[str, Traffic]) -> dict[str, int]:
    return {rung: one.arrays for rung, one in traffic.items()}


def _summed(parts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return total


def _timings(now: Sequence[Snapshot]) -> dict[str, Timing]:
    total: dict[str, Timing] = {}
    for snapshot in now:
        for memory, timing in snapshot.timings.items():
            total[memory] = total.get(memory, Timing()) + timing
    return total


def _nothing() -> Any:
    pass
