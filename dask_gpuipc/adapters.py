"""Types that live on the GPU: how an object is taken apart into device buffers, and rebuilt.

Whatever has a serializer in distributed's ``cuda`` family, which its ucx comm uses, goes by that
one: CuPy arrays and sparse matrices, numba device arrays, data frames of cuDF. Here are those that
it lacks (PyTorch tensors), or rebuilds for its own comm only (buffers of RMM). Each registers when
its library is first met, so nothing is imported that a task has not imported.

To add a type, register it for Dask (``distributed.protocol.cuda.cuda_serialize`` and
``cuda_deserialize``), which serves every comm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from dask.utils import Dispatch
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize

Header = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Adapter:
    """How objects of one type travel.

    ``serialize`` gives a header and device buffers, or raises NotImplementedError for an object
    that is not on the GPU. ``deserialize`` makes an object of the header and as many CuPy arrays of
    bytes, which it keeps; where ``copies``, it copies them instead, so they need be no copies yet.
    """

    serialize: Callable[[Any], tuple[Header, list[Any]]]
    deserialize: Callable[[Header, list[Any]], Any]
    copies: bool = False


_adapters: Final = Dispatch("gpuipc_adapters")


def adapter_of(cls: type) -> Adapter | None:
    """The adapter of a type; None if it is none of the GPU's."""
    for find in (_adapters.dispatch, _of_dask):
        # TypeError: none is registered. The others: a registration wants more than is installed, as
        # Dask's of RMM wants numba.
        with contextlib.suppress(TypeError, ImportError, AttributeError):
            return find(cls)
    return None


def _of_dask(cls: type) -> Adapter:
    return Adapter(cuda_serialize.dispatch(cls), cuda_deserialize.dispatch(cls))


class Span:
    """Device bytes of a library's, by their address; keeps their owner."""

    __slots__ = ("__cuda_array_interface__", "owner")

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


# -- RMM ------------------------------------------------------------------------------------------


def _register_rmm() -> None:
    import rmm

    def serialize(buffer: Any) -> tuple[Header, list[Any]]:
        return {}, [Span(buffer.ptr, buffer.size, buffer)]

    def deserialize(_: Header, buffers: list[Any]) -> Any:
        # The constructor allocates by the resource in use, and copies: on the legacy default
        # stream, behind which whoever frees the source waits.
        [source] = buffers
        return rmm.DeviceBuffer(ptr=source.data.ptr, size=source.nbytes)

    _adapters.register(rmm.DeviceBuffer, Adapter(serialize, deserialize, copies=True))


_adapters.register_lazy("rmm", _register_rmm)


# -- PyTorch --------------------------------------------------------------------------------------


def _register_torch() -> None:
    import torch

    _adapters.register(torch.Tensor, Adapter(_take_tensor, _make_tensor))


_adapters.register_lazy("torch", _register_torch)


def _take_tensor(tensor: Any) -> tuple[Header, list[Any]]:
    """Tensor or parameter; its gradient goes with it, as in Dask's serializer of host tensors."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.is_cuda:
        raise NotImplementedError(type(tensor).__name__)
    header, span = _take_plain(tensor.detach())
    header["requires_grad"] = tensor.requires_grad
    header["parameter"] = type(tensor) is torch.nn.Parameter
    if not tensor.is_leaf or tensor.grad is None:
        return header, [span]
    header["grad"], grad = _take_plain(tensor.grad.detach())
    return header, [span, grad]


def _take_plain(tensor: Any) -> tuple[Header, Span]:
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise NotImplementedError(f"{tensor.layout} {tensor.dtype}")
    tensor = tensor.resolve_conj().resolve_neg()
    # Strides are kept where they have neither holes nor overlaps, which is where torch's own
    # empty_like keeps them; else a copy has others.
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        tensor = tensor.contiguous()
    header = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": tuple(tensor.shape),
        "strides": tuple(tensor.stride()),
    }
    return header, Span(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)


def _make_tensor(header: Header, buffers: list[Any]) -> Any:
    import torch

    tensor = _make_plain(header, buffers[0])
    if header["parameter"]:
        tensor = torch.nn.Parameter(tensor, requires_grad=header["requires_grad"])
    else:
        tensor.requires_grad_(header["requires_grad"])
    if "grad" in header:
        tensor.grad = _make_plain(header["grad"], buffers[1])
    return tensor


def _make_plain(header: Header, buffer: Any) -> Any:
    import torch

    dtype, shape = getattr(torch, header["dtype"]), header["shape"]
    if not buffer.nbytes:
        return torch.empty(shape, dtype=dtype, device=f"cuda:{buffer.device.id}")
    flat = torch.as_tensor(buffer, device=f"cuda:{buffer.device.id}").view(dtype)
    return flat.as_strided(shape, header["strides"])
