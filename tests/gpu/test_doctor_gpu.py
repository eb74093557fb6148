"""`dask gpuipc doctor` where there is a GPU: each two of them, by every rung."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(500)
def test_doctor_tries_each_two_gpus_by_every_rung() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dask", "gpuipc", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pairs = [pair for pair in json.loads(done.stdout)["pairs"] if pair["memory"] == "cuda"]
    gpus = {pair["source"] for pair in pairs}
    assert len(pairs) == len(gpus) ** 2 > 0
    for pair in pairs:
        assert set(pair["ways"]) == {"copy", "share", "host", "bytes"}
        assert pair["ways"]["host"]["rung"] == "host"
        assert pair["ways"]["bytes"]["rung"] == "bytes"
        if pair["source"] == pair["target"]:
            assert pair["ways"]["copy"]["rung"] == "copy"
            assert pair["ways"]["share"]["rung"] == "share"
