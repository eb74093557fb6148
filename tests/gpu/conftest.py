from __future__ import annotations

import os

import dask
import pytest

# Small arrays have layouts and dtypes too: for workers that are started by command, and for those
# that inherit the configuration of this process.
os.environ["DASK_GPUIPC__MIN_BYTES__CUDA"] = "1"
dask.config.set({"gpuipc.min-bytes.cuda": 1})


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """Skip without cupy, bindings or a GPU, and say which is missing."""
    pytest.importorskip("cupy")
    pytest.importorskip("cuda.bindings.driver")
    from cuda_peer import memory, warm_up

    from dask_gpuipc.errors import MemoryUnavailable

    try:
        memory()
    except MemoryUnavailable as error:
        pytest.skip(str(error))
    warm_up()


@pytest.fixture(scope="session")
def peer(gpu):
    from cuda_peer import Peer, warm_up

    process = Peer()
    process.call(warm_up)
    yield process
    process.stop()
