"""benchmarks/soak.py, for 20 seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "soak.py"


def test_nothing_is_wrong_stuck_or_left_after_20_seconds_of_strikes(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--minutes", "0.33", "--every", "0.5", "2"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    log = tmp_path / "log"
    done = subprocess.run(
        [*command, "--check-every", "10", "--log", str(log)],
        env=env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["kind"] for line in lines[:1] + lines[-1:]] == ["environment", "figures"]
    figures = lines[-1]
    assert figures["results"] > 0
    assert figures["transfers"] > 0
    assert figures["kills"] > 0
    bad = (figures["wrong"], figures["errors"], figures["stuck"], figures["folders"])
    assert bad == (0, 0, 0, 0)
    assert not any(figures["leaked"].values())
