"""Workers on other nodes and in other namespaces (invariant 6): see `nodes` for what is built."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("nodes.py")
AS_ROOT = ("unshare", "--net", "--mount")
AS_USER = ("unshare", "--user", "--map-root-user", "--net", "--mount")
TRIAL = """
ip link add name gpuipc0 type veth peer name gpuipc1
unshare --pid --fork --mount-proc --ipc true
"""


@functools.cache
def permitted() -> tuple[tuple[str, ...] | None, str]:
    """How namespaces can be made here; or None, and why they cannot."""
    why = []
    for start in (AS_ROOT, AS_USER):
        try:
            tried = subprocess.run(
                [*start, "sh", "-ec", TRIAL],
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
            )
        except FileNotFoundError as error:
            return None, f"{error.filename} is missing (util-linux, iproute2)"
        if not tried.returncode:
            return start, ""
        why.append(f"{' '.join(start)}: {tried.stderr.strip()}")
    return None, "; ".join(why)


def scenario(name: str, memory: str = "host") -> list[dict[str, Any]]:
    if memory == "cuda":
        pytest.importorskip("cupy")
    start, why = permitted()
    if start is None:
        pytest.skip(f"needs namespaces of its own (CAP_SYS_ADMIN or user namespaces): {why}")
    done = subprocess.run(
        [*start, sys.executable, str(PROGRAM), name, "--memory", memory],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr[-8000:]
    pairs: list[dict[str, Any]] = json.loads(done.stdout)["pairs"]
    assert all(pair["equal"] for pair in pairs), pairs
    assert {pair["state"] for pair in pairs} == {"enabled"}
    return pairs


def check_pairs(pairs: list[dict[str, Any]], near: Any, rung: str, reason: str) -> None:
    """Handles between those that are near, bytes with the reason between all others."""
    for pair in pairs:
        if near(pair["from"], pair["to"]):
            assert pair["sent"] == {rung: 1}, pair
            assert not pair["refused"], pair
        else:
            assert pair["sent"] == {"bytes": 1}, pair
            assert pair["refused"] == {reason: 1}, pair


def one_node(a: str, b: str) -> bool:
    return a[0] == b[0]


def one_host(a: str, b: str) -> bool:
    """A network of its own alone hinders nothing: the channel is a file, not an address."""
    return {a, b} <= {"here", "too", "net"}


@pytest.mark.parametrize(
    ("memory", "rung"), [("host", "share"), pytest.param("cuda", "copy", marks=pytest.mark.gpu)]
)
def test_two_nodes_send_handles_inside_and_bytes_between(memory: str, rung: str) -> None:
    pairs = scenario("two-nodes", memory)
    assert len(pairs) == 12
    check_pairs(pairs, one_node, rung, "other_node")


@pytest.mark.parametrize(
    ("memory", "rung"), [("host", "share"), pytest.param("cuda", "copy", marks=pytest.mark.gpu)]
)
def test_each_kind_of_foreign_namespace_gets_bytes_and_says_so(memory: str, rung: str) -> None:
    pairs = scenario("namespaces", memory)
    assert len(pairs) == 42
    check_pairs(pairs, one_host, rung, "other_namespace")
