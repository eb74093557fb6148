"""`dask gpuipc demo`: the real command in a process of its own, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import dask
import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from dask_gpuipc.cli import gpuipc
from dask_gpuipc.demo import InputError, Outcome, as_table
from dask_gpuipc.demo.outcome import Job
from dask_gpuipc.demo.picture import grayscale
from dask_gpuipc.demo.rounds import PluginCounts, Round, Transfers
from dask_gpuipc.demo.workflow import analyse, is_exact, mirrored, side_of, tiled

MiB = 2**20
COMMAND = [sys.executable, "-m", "dask", "gpuipc", "demo"]


def run(*arguments):
    """The command's outcome; its stdout is one JSON object and nothing else."""
    done = subprocess.run(
        [*COMMAND, "--json", *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def refused(*arguments):
    """Exit code and message of a command that must not start a cluster."""
    result = CliRunner().invoke(gpuipc, ["demo", *map(str, arguments)])
    assert isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def test_sample_image_crosses_by_handle_and_gives_equal_results():
    pytest.importorskip("skimage")
    outcome, progress = run("--size", "8 MiB", "--rounds", "1")
    assert outcome["equal"] is True
    assert outcome["exact"] is True
    assert outcome["handle_fraction"] >= 0.95
    assert outcome["moved_bytes"] > 8 * MiB
    assert outcome["min_bytes"] >= 1
    assert outcome["memory"] in ("host", "cuda")
    assert outcome["plain_s"] > 0
    assert outcome["plugin_s"] > 0
    assert outcome["transfer_ratio"] > 0
    assert outcome["states"] == ["enabled"]
    assert {"python", "dask", "distributed", "numpy"} <= set(outcome["versions"])
    assert "astronaut.png of scikit-image, tiled to 1024 x 1024" in progress
    assert "plugin  round 1 of 1" in progress
    assert "Traceback" not in progress
    assert "distributed" not in progress


def test_own_npy_file(tmp_path):
    image = np.random.default_rng(0).integers(0, 1 << 16, (300, 500), dtype="u2")
    np.save(tmp_path / "mine.npy", image)
    outcome, progress = run(
        *("--input", str(tmp_path / "mine.npy")),
        *("--size", "4 MiB", "--workers", "2", "--rounds", "1"),
    )
    assert outcome["equal"] is True
    assert outcome["handle_fraction"] >= 0.95
    assert outcome["job"]["workers"] == 2
    assert "mine.npy, tiled to 724 x 724" in progress


def test_interrupt_ends_all_processes_without_noise(tmp_path):
    np.save(tmp_path / "mine.npy", np.ones((8, 8)))
    arguments = ["--input", str(tmp_path / "mine.npy"), "--rounds", "1000"]
    with subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        said = next(line for line in process.stderr if "starting" in line)
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, err = process.communicate(timeout=60)
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert process.returncode == 1
    assert not alive, (said, gone)
    assert not out
    assert err.strip() == "Aborted!"


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([[None, {}], [1, 2]], dtype=object), "Python objects in dtype"),
        (np.array([["a", "b"]]), "its dtype is <U1"),
        (np.ones((3, 3), "c16"), "its dtype is complex128"),
        (np.ones((0, 3)), "it is empty, of shape (0, 3)"),
        (np.ones(3), "it is 1-D, of shape (3,)"),
        (np.ones((2, 2, 2, 2)), "it is 4-D, of shape (2, 2, 2, 2)"),
        (np.array([[1.0, np.nan]]), "it holds NaN or infinite values"),
    ],
    ids=["objects", "text", "complex", "empty", "1-D", "4-D", "nan"],
)
def test_arrays_that_are_no_image(tmp_path, array, message):
    path = tmp_path / "bad.npy"
    np.save(path, array, allow_pickle=True)
    code, text = refused("--input", path)
    assert code == 2
    assert "Invalid value for '--input'" in text
    assert message in text
    assert str(path) in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("pickle.npy", b"hello", "cannot be read"),
        ("nothing.npy", b"", "cannot be read"),
        ("note.txt", b"hello", "is no image that scikit-image can read"),
        ("broken.png", b"\x89PNG\r\n\x1a\n", "is no image that scikit-image can read"),
    ],
)
def test_files_that_are_no_image(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    code, text = refused("--input", path)
    assert code == 2
    assert message in text
    assert "wanted: a .npy file of real numbers, 2-D or 3-D, or an image file" in text


def test_archive_is_no_image(tmp_path):
    np.savez(tmp_path / "many.npz", a=np.ones((3, 3)))
    path = (tmp_path / "many.npz").rename(tmp_path / "many.npy")
    assert refused("--input", path)[0] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--input", "/no/such/file.npy"), "'/no/such/file.npy' does not exist"),
        (("--input", "/"), "is a directory"),
        (("--size", "much"), "'much' is not a size; write it as '256 MiB'"),
        (("--size", "100"), "must have at least 512 bytes"),
        (("--size", "-1 MiB"), "must have at least 512 bytes"),
        (("--size", "1 PiB"), "MiB are free; ask for a smaller image"),
        (("--workers", "1"), "1 is not in the range x>=2"),
    ],
)
def test_options_that_make_no_sense(tmp_path, arguments, message):
    np.save(tmp_path / "mine.npy", np.ones((8, 8)))
    arguments = ("--input", tmp_path / "mine.npy", *arguments)
    code, text = refused(*arguments)
    assert code == 2
    assert message in text


@pytest.mark.parametrize("arguments", [(), ("--input", "picture.png")], ids=["sample", "image"])
def test_without_scikit_image_the_remedy_is_told(monkeypatch, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    Path("picture.png").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "skimage", None)
    code, text = refused(*arguments)
    assert code == 1
    assert "pip install 'dask-gpuipc[demo]'" in text
    assert "demo --input FILE.npy" in text


def outcome_of(*results):
    """An outcome in which one plain and one plugin round gave these results."""
    job = Job(picture="x", side=16, workers=2, gpus=0, memory="host", min_bytes=64)
    rounds = [Round(2.0, Transfers(3, 1000, 800, 0.5), np.asarray(result)) for result in results]
    counts = PluginCounts(
        states=["enabled"],
        sent={"share": {"arrays": 3, "bytes": 600}, "bytes": {"arrays": 1, "bytes": 200}},
        received={"share": {"arrays": 3, "bytes": 600}},
        refused={"too_small": 4},
    )
    return Outcome(job, rounds[:1], rounds[1:], counts)


def test_other_results_fail_the_command(monkeypatch):
    outcome = outcome_of([1.0, 2.0], [1.0, 2.0 + 1e-15])
    monkeypatch.setattr("dask_gpuipc.demo.run_demo", lambda request, say: outcome)
    result = CliRunner().invoke(gpuipc, ["demo", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["equal"] is False
    assert "the results of plain Dask and the plugin differ" in result.stderr
    assert "DIFFERENT" in as_table(outcome)


def test_outcome_counts_against_dasks_own_log():
    outcome = outcome_of([1.0], [1.0])
    assert outcome.equal
    assert outcome.handle_fraction == 600 / 800
    assert outcome.rungs["bytes"] == {"arrays": 1, "bytes": 200}
    assert "75.0% of 800 B" in as_table(outcome)


def test_workflow_is_what_numpy_computes(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (23, 17), dtype="u1")
    np.save(tmp_path / "image.npy", pixels)
    side = side_of(8 * 65 * 65)
    image = np.pad(pixels, ((0, side), (0, side)), "symmetric")[:side, :side].astype("f8")
    ring = np.pad(image, 1, "symmetric")
    sharp = 5 * image - ring[:-2, 1:-1] - ring[2:, 1:-1] - ring[1:-1, :-2] - ring[1:-1, 2:]
    product = (sharp + sharp.T) @ sharp
    wanted = np.concatenate([product.sum(0), product.sum(1), [product.max()]])
    with dask.config.set(scheduler="threads"):
        array = tiled(tmp_path / "image.npy", side, "numpy")
        assert np.array_equal(array.compute(), image)
        assert np.array_equal(analyse(array).compute(), wanted)


def test_results_are_exact_up_to_many_gigabytes():
    assert is_exact(side_of(8 << 30))
    assert not is_exact(side_of(64 << 30))


def test_mirrored_windows_are_parts_of_a_symmetric_pad():
    pixels = np.arange(12).reshape(3, 4)
    wide = np.pad(pixels, ((0, 20), (0, 20)), "symmetric")
    assert np.array_equal(mirrored(pixels, slice(5, 19), slice(2, 23)), wide[5:19, 2:23])


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (np.array([[0, 7], [255, 9]], "u1"), [[0, 7], [255, 9]]),
        (np.array([[True, False]]), [[1, 0]]),
        (np.array([[0.0, 0.5, 1.0]], "f2"), [[0, 128, 255]]),
        (np.array([[0, 1000]], "i8"), [[0, 255]]),
        (np.array([[-1e308, 1e308]]), [[0, 255]]),
        (np.full((1, 2), 300), [[0, 0]]),
        (np.array([[[10, 20, 30]]], "u1"), [[18]]),
        (np.array([[[10, 20, 30, 99]]], "u1"), [[18]]),
        (np.array([[[10, 99]]], "u1"), [[10]]),
        (np.arange(10).reshape(2, 1, 5), [[0, 1, 2, 3], [5, 6, 7, 8]]),
    ],
    ids=["bytes", "bool", "unit", "wide", "huge", "flat", "rgb", "rgba", "alpha", "stack"],
)
def test_gray_values_are_whole_and_fit_a_byte(data, wanted):
    gray = grayscale(data, side=4)
    assert gray.dtype == np.uint8
    assert gray.tolist() == wanted


def test_grayscale_of_nothing_is_an_input_error():
    with pytest.raises(InputError, match="empty") as caught:
        grayscale(np.ones((0, 0)), side=4)
    assert caught.value.option == "--input"
