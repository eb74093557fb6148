"""What `dask gpuipc bench --json` prints, as a schema; and the command, run in a process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

SECONDS = {"type": "number", "minimum": 0}
COUNT = {"type": "integer", "minimum": 0}
TEXT = {"type": "string", "minLength": 1}
TIMES = dict.fromkeys(("transfer", "with_read", "wall"), SECONDS)
PARTS = ("readiness", "export", "wire", "import", "copy", "release")


def strictly(properties: dict[str, Any]) -> dict[str, Any]:
    """An object with these properties, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }


def listed(properties: dict[str, Any], least: int = 1) -> dict[str, Any]:
    return {"type": "array", "minItems": least, "items": strictly(properties)}


SCHEMA = strictly(
    {
        "time": TEXT,
        "commit": {"type": ["string", "null"]},
        "versions": {"type": "object", "required": ["python", "kernel", "dask", "distributed"]},
        "hardware": strictly(
            {
                "cpu": TEXT,
                "cpus": COUNT,
                "load": SECONDS,
                "memory_bytes": COUNT,
                "gpus": listed({"uuid": TEXT, "name": TEXT}, least=0),
                "gpu_driver": {"type": ["string", "null"]},
            }
        ),
        "options": {
            "type": "object",
            "required": ["memory", "sides", "max_size", "rounds", "min_bytes", "workers"],
        },
        "sizes": listed(
            {
                "side": TEXT,
                "nbytes": COUNT,
                "repeated": strictly(TIMES),
                "first": {"anyOf": [strictly(TIMES), strictly({})]},
                "parts": strictly(dict.fromkeys(PARTS, SECONDS)),
                "again": SECONDS,
                "by_handle": COUNT,
                "rounds": COUNT,
                "all": strictly({name: {"type": "array", "items": SECONDS} for name in TIMES}),
            }
        ),
        "copies": {"type": "object", "additionalProperties": SECONDS},
        "consumers": listed(
            {
                "side": TEXT,
                "consumers": COUNT,
                "nbytes": COUNT,
                "seconds": SECONDS,
                "copies": {"type": "number"},
                "shared_bytes": COUNT,
            }
        ),
        "many": listed(
            {"side": TEXT, "arrays": COUNT, "nbytes": COUNT, "transfer": SECONDS, "wall": SECONDS}
        ),
        "loops": listed(
            {
                "side": TEXT,
                "worker": TEXT,
                "loaded": {"type": "boolean"},
                "transfers": COUNT,
                "median": SECONDS,
                "p99": SECONDS,
                "most": SECONDS,
            }
        ),
        "pairs": listed(
            {
                "side": TEXT,
                "source": TEXT,
                "target": TEXT,
                "nbytes": COUNT,
                "transfer": SECONDS,
                "by_handle": COUNT,
            },
            least=0,
        ),
    }
)


def bench(*arguments: str, timeout: float = 100) -> tuple[dict[str, Any], str]:
    """What the command printed as JSON, and on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "dask", "gpuipc", "bench", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr
