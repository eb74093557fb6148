"""`dask gpuipc bench`: the real command, small, and what it prints."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import jsonschema
import pytest
from bench_checks import SCHEMA, bench
from click.testing import CliRunner

from dask_gpuipc.bench import Outcome
from dask_gpuipc.bench.record import (
    ConsumerFigures,
    LoopFigures,
    ManyFigures,
    PairFigures,
    SizeFigures,
)
from dask_gpuipc.bench.setting import SIZES, sizes
from dask_gpuipc.bench.text import show
from dask_gpuipc.cli import gpuipc
from dask_gpuipc.terminal import PlainScreen

KiB, MiB = 2**10, 2**20
SMALL = ("--memory", "host", "--max-size", "64 KiB", "--rounds", "2", "--warm-up", "0")
LITTLE = ("--consumers", "2", "--many", "3", "--load", "0.2")


def test_it_measures_plain_dask_and_the_plugin_in_turn(tmp_path: Path) -> None:
    picture = tmp_path / "bench.png"
    found, progress = bench(*SMALL, *LITTLE, "--plot", str(picture))
    jsonschema.validate(found, SCHEMA)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "starting 2 clusters of 3 workers: plain, plugin" in progress
    assert "Traceback" not in progress
    sizes = {(one["side"], one["nbytes"]): one for one in found["sizes"]}
    assert set(sizes) == {(s, n * KiB) for s in ("plain", "plugin") for n in (1, 16, 64)}
    assert {place: one["by_handle"] for place, one in sizes.items() if one["by_handle"]} == {
        ("plugin", 64 * KiB): 2
    }
    large = sizes["plugin", 64 * KiB]
    assert large["first"]["transfer"] > 0
    assert large["parts"]["export"] > 0
    assert large["parts"]["import"] > 0
    assert sum(large["parts"].values()) >= large["repeated"]["transfer"] / 2
    assert not sizes["plain", 64 * KiB]["first"]
    assert [
        (one["consumers"], one["copies"], one["shared_bytes"])
        for one in found["consumers"]
        if one["side"] == "plugin"
    ] == [(1, 1.0, 64 * KiB), (2, 1.0, 64 * KiB)]
    assert {(one["side"], one["worker"], one["loaded"]) for one in found["loops"]} == {
        (side, worker, loaded)
        for side in ("plain", "plugin")
        for worker in ("source-0", "target-0")
        for loaded in (False, True)
    }
    assert not found["pairs"]


def an_outcome() -> Outcome:
    times = {"transfer": 0.002, "with_read": 0.004, "wall": 0.006}
    parts = dict.fromkeys(("readiness", "export", "wire", "import", "copy", "release"), 1e-4)
    plain = SizeFigures("plain", MiB, {**times, "with_read": 0.01}, {}, parts, 0.003, 0, 1)
    plugin = SizeFigures("plugin", MiB, times, times, parts, 0.001, 1, 1)
    return Outcome(
        setting={
            "commit": None,
            "versions": {"python": "3.13"},
            "hardware": {"cpu": "a processor", "gpus": [{"uuid": "GPU-1", "name": "a GPU"}]},
        },
        options={"memory": "cuda", "sides": ["plain", "plugin"]},
        sizes=(plain, plugin),
        copies={MiB: 0.0005},
        consumers=(ConsumerFigures("plugin", 2, MiB, 0.001, 1.0, MiB),),
        many=(ManyFigures("plugin", 200, KiB, 0.02, 0.05),),
        loops=(LoopFigures("plugin", "source-0", True, 17, 1e-4, 1e-3, 2e-3),),
        pairs=(PairFigures("plugin", "GPU 0", "GPU 1", MiB, 0.001, 5),),
    )


def test_figures_are_tables_where_they_are_piped() -> None:
    stream = io.StringIO()
    show(an_outcome(), PlainScreen(stream, width=120))
    rows = [" ".join(line.split()) for line in stream.getvalue().splitlines()]
    assert "1.00 MiB plugin (by handle) 2.00 ms 4.00 ms 2.00 ms 1.00 ms 6.00 ms 2.50" in rows
    assert "1.00 MiB one copy 500.00 us" in rows
    assert " ".join(["1.00 MiB plugin", *["100.00 us"] * 6]) in rows
    assert "2 plugin 1.00 ms 1.00 1.00 MiB" in rows
    assert "plugin source-0 17 chunks 100.00 us 1.00 ms 2.00 ms" in rows
    assert "GPU 0 GPU 1 plugin 1.00 ms 0.98 GiB/s" in rows


def refused(*arguments: str) -> str:
    """The message of a command that must not start a cluster."""
    result = CliRunner().invoke(gpuipc, ["bench", *arguments])
    assert result.exit_code != 0
    return " ".join(result.output.split())


def test_what_cannot_be_plotted_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "must end in one of" in refused("--plot", str(tmp_path / "bench.xyz"))
    assert "no such folder" in refused("--plot", str(tmp_path / "none" / "bench.png"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it was not installed
    told = refused("--plot", str(tmp_path / "bench.png"))
    assert "pip install 'dask-gpuipc[bench]'" in told


def test_what_is_not_here_is_told() -> None:
    assert "distributed-ucxx" in refused("--side", "ucx", "--memory", "host")
    assert "multiple of 8" in refused("--max-size", "1025")


def test_sizes_go_up_to_what_was_asked_for() -> None:
    assert sizes("host", 100 * KiB) == (KiB, 16 * KiB, 64 * KiB, 100 * KiB)
    assert sizes("host", 8 << 30) == SIZES
    assert SIZES[0] == KiB
    assert SIZES[-1] == 8 << 30
