"""The kinds of memory that can be shared, behind one protocol (`dask_gpuipc.memory.base`)."""
