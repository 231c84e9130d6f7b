"""The errors of backends, free of torch; `interlock.errors` exports them with all the others."""

from __future__ import annotations

from interlock.specs import InterlockError


class DeviceUnavailable(InterlockError):
    """The device that was asked for cannot be used here."""


class DeviceInUse(InterlockError):
    """An adapter was given to a second run while the first has not given its device back."""


class DeviceLost(InterlockError):
    """The device died in this process. No call reaches it any more, not even a query."""


class ForeignDevice(DeviceUnavailable):
    """Code names CUDA itself where the simulated device is what it runs on."""


class ForeignMisused(InterlockError, ValueError):
    """`simulator.foreign` was asked for something other than to map or to refuse."""


class StrikeMisused(InterlockError, ValueError):
    """A strike on the simulated device as it was described would never strike."""
