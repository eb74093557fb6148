"""Time that a test moves."""

from __future__ import annotations

from typing import Final

LIMIT: Final = 60.0
"""Seconds that anything in this package waits for another thread or process before it fails."""


class ManualClock:
    """Monotonic seconds that pass when told to; takes the place of `time.monotonic`.

    Safe to read from any thread; advanced by one.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now

    def __call__(self) -> float:
        """The time now."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass; raises ValueError if it would run backwards."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot advance by {seconds} s")
        self._now += seconds
