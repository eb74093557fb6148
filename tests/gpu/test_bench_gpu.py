"""`dask gpuipc bench` where there is a GPU: CuPy chunks by copy and by share; all pairs of GPUs."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
from bench_checks import SCHEMA, bench

pytestmark = pytest.mark.gpu

MiB = 2**20


@pytest.mark.timeout(500)
def test_bench_compares_copy_share_and_bytes(tmp_path: Path) -> None:
    picture = tmp_path / "bench.svg"
    found, _ = bench(
        *("--max-size", "16 MiB", "--rounds", "3", "--warm-up", "1", "--consumers", "2"),
        *("--side", "plain", "--side", "plugin-copy", "--side", "plugin-share"),
        *("--many", "5", "--load", "0.5", "--plot", str(picture)),
        timeout=480,
    )
    jsonschema.validate(found, SCHEMA)
    assert "<svg" in picture.read_text()
    gpus = len(found["hardware"]["gpus"])
    assert gpus > 0
    large = {one["side"]: one for one in found["sizes"] if one["nbytes"] == 16 * MiB}
    assert {side: one["by_handle"] for side, one in large.items()} == {
        "plain": 0,
        "plugin-copy": 3,
        "plugin-share": 3,
    }
    for side in ("plugin-copy", "plugin-share"):
        assert large[side]["first"]["transfer"] > 0
        assert large[side]["parts"]["readiness"] > 0
        assert large[side]["parts"]["import"] > 0
    pinned = {one["copies"] for one in found["consumers"] if one["side"] == "plugin-share"}
    assert pinned == {1.0}
    pairs = {(one["source"], one["target"]) for one in found["pairs"]}
    assert len(pairs) == (gpus**2 if gpus > 1 else 0)
