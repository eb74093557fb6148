"""What each refusal and failure means, and what to do about it: the one place that says so.

The log, `dask_gpuipc.report`, ``dask gpuipc doctor`` and the dashboard page read it here, and
``python -m dask_gpuipc.explain docs/troubleshooting.md`` writes the tables of that page from it.
Texts are Markdown as far as code in backticks goes.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dask_gpuipc.errors import Failure, Refusal

logger = logging.getLogger("distributed.gpuipc")

Reason = Refusal | Failure


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """A reason, for people. Told apart by identity: two enums have a reason ``error``."""

    meaning: str
    remedy: str = "nothing"
    warns: bool = False
    """Whether somebody should see to it: the first one is a warning in the log."""


REFUSALS: Final[Mapping[Refusal, Explanation]] = {
    Refusal.TOO_SMALL: Explanation(
        "the array is smaller than `gpuipc.min-bytes`",
        "nothing; larger chunks, or a smaller `min-bytes` if you have measured",
    ),
    Refusal.UNSUPPORTED_TYPE: Explanation(
        "no buffer of it can be shared: text, bytes, pickled Python objects, or an array of a "
        "memory that is switched off here",
        "nothing; or return arrays from tasks",
    ),
    Refusal.UNSUPPORTED_DTYPE: Explanation(
        "the dtype holds Python objects or cannot be described", "use a plain dtype"
    ),
    Refusal.NO_ADVERTISEMENT: Explanation(
        "whoever asked has no plugin: a client that fetches a result, the scheduler, or a worker "
        "without it",
        "nothing for results; else register the plugin on all workers",
    ),
    Refusal.WIRE_VERSION: Explanation(
        "the other worker runs a version of this package that speaks another wire version",
        "install one version everywhere",
        warns=True,
    ),
    Refusal.OTHER_SCHEDULER: Explanation("the other worker belongs to another cluster"),
    Refusal.OTHER_NODE: Explanation(
        "the other worker runs on another machine, or on another boot of the kernel",
        "nothing; use ucx between nodes",
    ),
    Refusal.OTHER_NAMESPACE: Explanation(
        "same kernel, but another pid, ipc, mount or user namespace: two containers",
        "put the workers of a node into one container",
        warns=True,
    ),
    Refusal.OTHER_TRANSPORT: Explanation(
        "the connection is ucx or inproc",
        "use tcp or tls to have handles; these two carry chunks in their own ways",
        warns=True,
    ),
    Refusal.SAME_PROCESS: Explanation(
        "two workers in one process", "nothing; Dask has its own way there"
    ),
    Refusal.NAMED_SERIALIZERS: Explanation(
        "the request chose its serializers: somebody else's code, or a worker that asks again "
        "after a failed open",
        "look at `failed` on the other workers",
    ),
    Refusal.P2P: Explanation(
        "a shard of a p2p rechunk or shuffle, which sends messages of its own",
        "set `array.rechunk.method` to `tasks`, on the client, to have its chunks go by handle",
    ),
    Refusal.NO_COMMON_MEMORY: Explanation(
        "the other worker does not share this kind of memory",
        "compare `memories`: install cupy, or switch the memory on there",
        warns=True,
    ),
    Refusal.OTHER_DEVICE: Explanation(
        "the other worker is not known to open handles of this GPU, and the chunk was not brought "
        "to the host",
    ),
    Refusal.DIAL_FAILED: Explanation(
        "the other worker's socket could not be reached, or was not its own",
        "set `gpuipc.socket-directory` to a folder that all workers of the node see under one "
        "path; the log, at INFO, names the socket and the error",
        warns=True,
    ),
    Refusal.PEER_LEFT: Explanation(
        "the other worker's plugin was unregistered, or its process has ended"
    ),
    Refusal.CHANNEL_FULL: Explanation(
        "the other worker does not read its channel: it is stopped, or its event loop is blocked",
        "look for tasks that hold the GIL for long",
        warns=True,
    ),
    Refusal.DENIED: Explanation(
        "this allocation failed to open on that worker before: several times just now, or for a "
        "reason that stays",
        "look at `failed` there",
        warns=True,
    ),
    Refusal.BUDGET: Explanation(
        "`gpuipc.pinned-limit` is reached",
        "raise it, or release what consumers hold: see `leases` and `pinned_bytes`",
        warns=True,
    ),
    Refusal.NO_MEMORY: Explanation(
        "shared memory could not be had: the system's memory, a limit on file descriptors, room on "
        "the device for a copy, or `gpuipc.cuda.host-limit`",
        "free memory; `ulimit -n`; raise the limit",
        warns=True,
    ),
    Refusal.NOT_EXPORTABLE: Explanation(
        "the driver has no handle for this memory, and it could not be copied into memory that has "
        "one",
        "use CuPy's default pool, or an RMM pool on `cudaMalloc` memory",
        warns=True,
    ),
    Refusal.NOT_READY: Explanation(
        "the array appeared after the answer had been prepared, such as one that was unspilled "
        "meanwhile"
    ),
    Refusal.CAPTURING: Explanation("a CUDA graph was being captured"),
    Refusal.IMPORTED: Explanation("the array is another process's memory"),
    Refusal.TRANSFER_CLOSED: Explanation(
        "the request was cancelled while its answer was being written"
    ),
    Refusal.TRANSFER_FULL: Explanation("more than 4096 arrays in one answer"),
    Refusal.STOPPING: Explanation("this worker's plugin is being torn down"),
    Refusal.DISABLED: Explanation(
        "this memory switched itself off, such as after a CUDA error that costs the context, or in "
        "a forked child",
        "restart the worker; the log has the error",
        warns=True,
    ),
    Refusal.ERROR: Explanation(
        "something unforeseen",
        "please report it, with the traceback in the worker's log",
        warns=True,
    ),
}
"""Counted by the producer: why something went as bytes."""

FAILURES: Final[Mapping[Failure, Explanation]] = {
    Failure.UNREADABLE: Explanation(
        "what came is no descriptor, or not of this wire version; Dask logs an error too, since "
        "the connection is given up",
        "install one version everywhere; else report it",
        warns=True,
    ),
    Failure.MALFORMED: Explanation(
        "the descriptor describes no array that there could be", "report it", warns=True
    ),
    Failure.UNKNOWN_CONSUMER: Explanation(
        "it names an endpoint that is not in this process: the plugin was registered again or "
        "unregistered meanwhile"
    ),
    Failure.UNKNOWN_PEER: Explanation(
        "there is no channel to whoever sent it", "nothing after a restart; else report it"
    ),
    Failure.BARRED: Explanation(
        "the producer gave this answer up before it was read, or the same descriptor came twice"
    ),
    Failure.EVICTED: Explanation(
        "the allocation's announcement is not, or no longer, known here",
        "nothing; it is announced again",
    ),
    Failure.STALE: Explanation(
        "the handle names memory that its owner has freed", "report it", warns=True
    ),
    Failure.OUT_OF_BOUNDS: Explanation(
        "the descriptor reaches outside of its allocation", "report it", warns=True
    ),
    Failure.BUSY: Explanation(
        "the allocation cannot be opened yet: it lies where an earlier one lay, whose mapping is "
        "not closed, or opening it takes long; it is announced again, and goes as bytes for a "
        "while after three times",
        "nothing; often: keep the pool from giving memory back (`free_all_blocks`)",
    ),
    Failure.OPEN_FAILED: Explanation(
        "the driver or the kernel refused to open it",
        "the worker's log; on CUDA, whether both workers see the same GPU",
        warns=True,
    ),
    Failure.NO_MEMORY: Explanation(
        "no room to map it, or to copy it to",
        "free memory; fewer threads, smaller chunks",
        warns=True,
    ),
    Failure.ERROR: Explanation(
        "something unforeseen",
        "please report it, with the traceback in the worker's log",
        warns=True,
    ),
}
"""Counted by the consumer: why a handle that arrived could not be opened."""


def explain(reason: Reason) -> Explanation:
    """What a reason means."""
    return REFUSALS[reason] if isinstance(reason, Refusal) else FAILURES[reason]


class Notices:
    """Tells the log of each cause once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: set[Explanation] = set()

    def tell(self, reason: Reason, detail: str = "", error: BaseException | None = None) -> None:
        """Log a reason that somebody should see to, the first time that it occurs."""
        explanation = explain(reason)
        with self._lock:
            if not explanation.warns or explanation in self._told:
                return
            self._told.add(explanation)
        what = "A chunk goes as bytes" if isinstance(reason, Refusal) else "A handle did not open"
        logger.warning(
            "%s (%s): %s%s. What to do: %s. Further ones are counted, and not logged.",
            what,
            reason.value,
            explanation.meaning,
            f" [{detail}]" if detail else "",
            explanation.remedy,
            exc_info=error,
        )


def table(reasons: Mapping[Refusal, Explanation] | Mapping[Failure, Explanation]) -> str:
    """The rows of a Markdown table, with its head."""
    rows = [f"| `{r.value}` | {x.meaning} | {x.remedy} |" for r, x in reasons.items()]
    return "\n".join(["| reason | meaning | what to do |", "|---|---|---|", *rows])


def with_tables(page: str) -> str:
    """The troubleshooting page with its two tables as they are here."""
    for heading, text in (("refused", table(REFUSALS)), ("failed", table(FAILURES))):
        old = re.compile(rf"(?ms)(^## {heading}\n.*?)^\| reason .*?(?=\n\n)")
        page, found = old.subn(lambda match, text=text: match[1] + text, page, count=1)  # type: ignore[misc]
        if not found:
            raise ValueError(f"no table below '## {heading}'")
    return page


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text()))
