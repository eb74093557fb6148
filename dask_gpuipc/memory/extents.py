"""Which parts of a block are free."""

from __future__ import annotations

import bisect
from typing import Any


class Extents:
    """Free extents of one arena, first fit, neighbours joined. Not thread-safe."""

    def __init__(self, size: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size)]

    def __iter__(self) -> Any:
        return iter(self._free)

    def take(self, nbytes: int) -> int | None:
        """Offset of the first extent that is large enough, cut to size; None if there is none."""
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= nbytes:
                if stop - start == nbytes:
                    del self._free[i]
                else:
                    self._free[i] = (start + nbytes, stop)
                return start
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Take an extent back."""
        i = bisect.bisect_left(self._free, (offset, offset))
        start, stop = offset, offset + nbytes
        if i < len(self._free) and self._free[i][0] == stop:
            stop = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == start:
            start = self._free.pop(i - 1)[0]
            i -= 1
        self._free.insert(i, (start, stop))
