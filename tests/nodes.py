"""Workers in namespaces of their own, on one machine: who gets handles, and who gets bytes.

    unshare --net --mount python tests/nodes.py two-nodes
    unshare --net --mount python tests/nodes.py namespaces --memory cuda

``two-nodes`` builds two nodes, each with its own network, mount, ipc and pid namespace, an own
temporary directory, and a boot id of its own (bound over the kernel's), with two workers in each.
``namespaces`` starts two workers beside each other, and one more for each kind of namespace that
they are not in. A chunk then goes from worker to worker, and the answer, one JSON object, tells for
each pair whether it arrived whole, by which rungs, and why not by a better one.

The caller's own network and mounts are changed, which is why it is started by ``unshare``. All
processes and namespaces end with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distributed import Client, Scheduler, wait

import dask_gpuipc
from dask_gpuipc import GPUIPCPlugin

BOOT_ID = "/proc/sys/kernel/random/boot_id"
LIMIT = 60.0
FLAGS = {
    "mount": ["--mount"],
    "ipc": ["--ipc"],
    "pid": ["--pid", "--fork", "--kill-child", "--mount-proc"],
    "user": ["--user", "--map-root-user"],
}
"""What makes ``unshare`` leave each kind; a new pid namespace needs a /proc of its own."""


def sh(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


class Node:
    """A process that holds namespaces, with a network of its own towards the caller's.

    Parameters
    ----------
    number : int
        Its network is 10.77.number.0/24.
    whole : bool
        Everything else is its own too, and it claims another boot; else the network alone.
    """

    def __init__(self, number: int, folder: Path, *, whole: bool) -> None:
        self.number = number
        self.host = f"10.77.{number}.2"
        self.gateway = f"10.77.{number}.1"
        self._kinds = ["--net", *(["--mount", "--ipc", "--pid"] if whole else [])]
        script = ["ip link set lo up"]
        if whole:
            boot_id = folder / f"boot-{number}"
            boot_id.write_text(f"{uuid.uuid4()}\n")
            script += [f"mount --bind {shlex.quote(str(boot_id))} {BOOT_ID}"]
            script += [f"mount -t tmpfs tmpfs {shlex.quote(str(folder / 'tmp'))}"]
        script += ["echo ready", "exec sleep infinity"]
        flags = [*self._kinds, *(["--fork", "--kill-child", "--mount-proc"] if whole else [])]
        self._holder = subprocess.Popen(
            ["unshare", *flags, "sh", "-ec", "\n".join(script)], stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n", "a node could not be set up"
        pid = self._holder.pid
        if whole:  # the holder's child is the first process in the new pid namespace
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        self._enter = ["nsenter", "--target", str(pid), *self._kinds, "--"]
        self._connect(pid)

    def _connect(self, pid: int) -> None:
        here, number = f"node{self.number}", self.number
        sh("ip", "link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        sh("ip", "address", "add", f"{self.gateway}/24", "dev", here)
        sh("ip", "link", "set", here, "up")
        sh(*self._enter, "ip", "address", "add", f"10.77.{number}.2/24", "dev", "eth0")
        sh(*self._enter, "ip", "link", "set", "eth0", "up")
        sh(*self._enter, "ip", "route", "add", "default", "via", self.gateway)

    def start(self, scheduler: Scheduler, name: str, folder: Path) -> subprocess.Popen[bytes]:
        return start_worker(scheduler, name, folder, self._enter, self.host, self.gateway)

    def start_beside(
        self, scheduler: Scheduler, name: str, folder: Path, *enter: str
    ) -> subprocess.Popen[bytes]:
        """A worker in the caller's network, which those of this node can reach."""
        return start_worker(scheduler, name, folder, list(enter), self.gateway, self.gateway)

    def close(self) -> None:
        """End it, and all processes in its namespaces."""
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()


def start_worker(
    scheduler: Scheduler,
    name: str,
    folder: Path,
    enter: list[str],
    host: str,
    contact: str,
) -> subprocess.Popen[bytes]:
    """A worker process, begun by a command that puts it into its namespaces."""
    port = scheduler.address.rpartition(":")[2]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", f"tcp://{contact}:{port}"]
    options = ["--host", host, "--name", name, "--nthreads", "1", "--no-nanny", "--no-dashboard"]
    places = ["--memory-limit", "2GB", "--local-directory", str(folder / "tmp" / name)]
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "XDG_RUNTIME_DIR": ""}
    with open(folder / f"{name}.log", "ab") as log:
        return subprocess.Popen(
            [*enter, *worker, *options, *places], env=environment, stdout=log, stderr=log
        )


@contextlib.contextmanager
def ended(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()  # unshare hands no other signal on
            process.wait()


# -- what crosses --------------------------------------------------------------------------------


def make(memory: str, seed: int) -> Any:
    if memory == "cuda":
        import cupy

        return cupy.arange(1 << 17, dtype="i8") * 7 + seed
    import numpy as np

    return np.arange(1 << 17, dtype="i8") * 7 + seed


def same(x: Any, memory: str, seed: int) -> bool:
    return type(x) is type(make(memory, seed)) and bool((x == make(memory, seed)).all())


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    """What was counted in between."""
    plain = {k: v["arrays"] if isinstance(v, dict) else v for k, v in after.items()}
    known = {k: v["arrays"] if isinstance(v, dict) else v for k, v in before.items()}
    return {k: n - known.get(k, 0) for k, n in plain.items() if n != known.get(k, 0)}


async def cross(client: Client, memory: str) -> list[dict[str, Any]]:
    """Have one chunk go over each pair of workers, both ways."""
    workers = (await client.scheduler.identity(n_workers=-1))["workers"]
    places = {str(worker["name"]): address for address, worker in workers.items()}
    pairs = []
    for seed, (one, other) in enumerate(itertools.permutations(sorted(places), 2)):
        a, b = places[one], places[other]
        before = (await dask_gpuipc.statistics(client))[a]
        source = client.submit(make, memory, seed, workers=[a], pure=False)
        await wait(source)
        equal = await client.submit(same, source, memory, seed, workers=[b], pure=False)
        after = (await dask_gpuipc.statistics(client))[a]
        pairs.append(
            {
                "from": one,
                "to": other,
                "equal": equal,
                "state": after["state"],
                "sent": difference(before["sent"], after["sent"]),
                "refused": difference(before["refused"], after["refused"]),
            }
        )
    return pairs


async def report(scheduler: Scheduler, workers: int, memory: str) -> list[dict[str, Any]]:
    async with Client(scheduler.address, asynchronous=True, timeout=LIMIT) as client:
        await client.wait_for_workers(workers, timeout=LIMIT)
        await client.register_worker_plugin(GPUIPCPlugin())
        return await cross(client, memory)


async def two_nodes(folder: Path, memory: str) -> list[dict[str, Any]]:
    async with Scheduler(host="0.0.0.0", port=0, dashboard=False) as scheduler:
        with contextlib.ExitStack() as stack:
            names = []
            processes: list[subprocess.Popen[bytes]] = []
            stack.enter_context(ended(processes))
            for number in (1, 2):
                node = Node(number, folder, whole=True)
                stack.callback(node.close)
                for letter in "ab":
                    names.append(f"{number}{letter}")
                    processes.append(node.start(scheduler, names[-1], folder))
            return await report(scheduler, len(names), memory)


async def namespaces(folder: Path, memory: str) -> list[dict[str, Any]]:
    async with Scheduler(host="0.0.0.0", port=0, dashboard=False) as scheduler:
        with contextlib.ExitStack() as stack:
            processes: list[subprocess.Popen[bytes]] = []
            stack.enter_context(ended(processes))
            node = Node(1, folder, whole=False)
            stack.callback(node.close)
            processes.append(node.start(scheduler, "net", folder))
            commands = {"here": [], "too": [], **{k: ["unshare", *f] for k, f in FLAGS.items()}}
            processes.extend(
                node.start_beside(scheduler, name, folder, *enter)
                for name, enter in commands.items()
            )
            return await report(scheduler, len(processes), memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scenario", choices=["two-nodes", "namespaces"])
    parser.add_argument("--memory", choices=["host", "cuda"], default="host")
    options = parser.parse_args()
    scenario = two_nodes if options.scenario == "two-nodes" else namespaces
    sh("ip", "link", "set", "lo", "up")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    with tempfile.TemporaryDirectory(prefix="gpuipc-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        try:
            pairs = asyncio.run(scenario(folder, options.memory))
        except BaseException:
            for log in folder.glob("*.log"):
                sys.stderr.write(f"-- {log.name}\n{log.read_text()[-2000:]}\n")
            raise
    json.dump({"scenario": options.scenario, "pairs": pairs}, sys.stdout)


if __name__ == "__main__":
    main()
