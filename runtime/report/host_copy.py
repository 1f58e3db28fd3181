"""Values of a device tensor on the host, without a wait for work that was queued after them.

    made    the device copies into pinned memory, and then passes an event       in the queue, behind the values
    read    the host waits for that event, and reads its own memory

``tensor.tolist()`` would queue its copy when it is called: behind all of the next step.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Owns: pinned memory with the values that ``tensor`` had when this was made; on a CPU the tensor itself."""

    def __init__(self, tensor: Tensor) -> None:
        self._values, self._arrived = tensor, None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def numbers(self) -> list[float]:
        """The values, flat; waits for the device until it has written them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.flatten().tolist()
