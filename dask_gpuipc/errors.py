"""What can go wrong, and what Dask makes of it.

Two base classes outside this package carry meaning inside Dask and are chosen on purpose:
``NotImplementedError`` from a serializer's ``dumps`` means "try the next family", and ``OSError``
from its ``loads`` means "the connection failed, ask again". Anything else leaves a task pending for
ever (dask/distributed#6705), so `Refused` is the one and `OpenFailed` the other.
"""

from __future__ import annotations

from enum import StrEnum


class Refusal(StrEnum):
    """Why a rung was declined. Counted, and shown by `dask_gpuipc.statistics`."""

    TOO_SMALL = "too_small"
    """Below ``gpuipc.min-bytes``: a handle would cost more than the bytes."""
    UNSUPPORTED_TYPE = "unsupported_type"
    """Not a type that any memory takes (a subclass, a container of other things)."""
    UNSUPPORTED_DTYPE = "unsupported_dtype"
    """The dtype holds Python objects, or does not survive its description."""
    NO_ADVERTISEMENT = "no_advertisement"
    """The requester has no plugin: a client, the scheduler, or a worker without it."""
    WIRE_VERSION = "wire_version"
    """The requester runs another, incompatible version of this package."""
    OTHER_SCHEDULER = "other_scheduler"
    OTHER_NODE = "other_node"
    OTHER_NAMESPACE = "other_namespace"
    """Same kernel, but another pid, ipc, mount or user namespace (containers)."""
    OTHER_TRANSPORT = "other_transport"
    """The comm is inproc (nothing is serialized) or ucx (it accepts no further family)."""
    SAME_PROCESS = "same_process"
    NAMED_SERIALIZERS = "named_serializers"
    """The request chose its own serializers; it is left alone."""
    P2P = "p2p"
    """A shard of a p2p rechunk or shuffle, which sends messages of its own."""
    NO_COMMON_MEMORY = "no_common_memory"
    OTHER_DEVICE = "other_device"
    """The requester does not open handles of this GPU: its self-test has not passed."""
    DIAL_FAILED = "dial_failed"
    """The requester's socket could not be reached, or was not who it said."""
    PEER_LEFT = "peer_left"
    """The requester said good-bye (plugin unregistered) or its process ended."""
    CHANNEL_FULL = "channel_full"
    """The channel would have blocked: the peer reads too slowly."""
    DENIED = "denied"
    """This allocation, or this peer, failed to open before."""
    BUDGET = "budget"
    """``gpuipc.pinned-limit`` is reached."""
    NO_MEMORY = "no_memory"
    """The memory to share could not be had (arena cap, file descriptors, kernel)."""
    NOT_EXPORTABLE = "not_exportable"
    """The driver says that this allocation has no handle (managed, stream-ordered)."""
    NOT_READY = "not_ready"
    """The array appeared after readiness was established for this answer."""
    CAPTURING = "capturing"
    """A CUDA graph capture is in progress; recording an event would break it."""
    IMPORTED = "imported"
    """The array is another process's memory; it is never exported as one's own."""
    TRANSFER_CLOSED = "transfer_closed"
    """The answer was cancelled or is over."""
    TRANSFER_FULL = "transfer_full"
    """One answer holds at most `dask_gpuipc.wire.MAX_LEASES` leases."""
    STOPPING = "stopping"
    """This worker's plugin is being torn down."""
    DISABLED = "disabled"
    """This memory switched itself off, such as after the loss of a CUDA context."""
    ERROR = "error"
    """Something unforeseen; the log has the traceback, once."""


class Failure(StrEnum):
    """Why a consumer could not import a descriptor. Travels in a nack."""

    UNREADABLE = "unreadable"
    """Not a descriptor of this wire version. It names no lease, so there is no nack."""
    MALFORMED = "malformed"
    UNKNOWN_CONSUMER = "unknown_consumer"
    UNKNOWN_PEER = "unknown_peer"
    BARRED = "barred"
    """The producer gave this transfer up before it was loaded."""
    EVICTED = "evicted"
    """The announcement is not, or no longer, known here: announce it again."""
    STALE = "stale"
    """The handle names memory that its owner has freed."""
    OUT_OF_BOUNDS = "out_of_bounds"
    BUSY = "busy"
    """The allocation's address is still open from an earlier allocation, which closes soon."""
    OPEN_FAILED = "open_failed"
    NO_MEMORY = "no_memory"
    ERROR = "error"


class GPUIPCError(Exception):
    """Base of all errors of this package."""


class ConfigError(GPUIPCError, ValueError):
    """A setting is not what it must be."""


class WireError(GPUIPCError, ValueError):
    """Bytes from outside that are not a record of this wire version."""


class MemoryUnavailable(GPUIPCError):
    """A kind of memory cannot be shared on this machine; the text says why."""


class Refused(GPUIPCError, NotImplementedError):
    """A rung was declined; the next one is tried. Dask reads it as "next family"."""

    def __init__(self, reason: Refusal, detail: str = "") -> None:
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason
        self.detail = detail


class OpenFailed(GPUIPCError, OSError):
    """A descriptor could not be imported. Dask reads it as a failed connection."""

    def __init__(self, reason: Failure, detail: str = "") -> None:
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason
        self.detail = detail


class ChannelError(GPUIPCError, OSError):
    """Base of the channel's errors."""


class ChannelClosed(ChannelError):
    """Used after this side closed it."""


class ChannelBroken(ChannelError):
    """The other side closed it, or broke the protocol."""


class ChannelFull(ChannelError):
    """Sending now would block."""


class SharingError(GPUIPCError):
    """Base of what `dask_gpuipc.sharing` raises by itself."""


class HandleClosed(SharingError, ValueError):
    """Used after this side closed it."""


class SourceGone(SharingError, OSError):
    """The process that had the memory has ended, or given it up."""


class NotAnswering(SharingError, TimeoutError):
    """The process that has the memory lives, and did not answer in time."""


class NotPermitted(SharingError, PermissionError):
    """Not for this process to open, or not from here; the text says why."""


class StillOpen(SharingError, TimeoutError):
    """Others still hold it, after as long a wait as was asked for."""
