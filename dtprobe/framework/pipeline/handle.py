"""A message in flight, and what the main thread waits for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dtprobe.framework.pipeline.blame import Item
from dtprobe.framework.pipeline.errors import BufferBusy

if TYPE_CHECKING:
    from dtprobe.framework.pipeline.exchange import Exchange


class Handle:
    """A posted message. It holds tensor and work until the message has completed, whether or not the caller keeps it.

    `tensor` is where a received message lies (None before `wait` where the shape is dynamic).
    """

    def __init__(self, exchange: Exchange, item: Item, rank: int, tensor: torch.Tensor | None, tag: int) -> None:
        self.item = item
        self.tensor = tensor
        self.rank = rank
        self.tag = tag
        self.done = False
        self.work: dist.Work | None = None
        self.wire = tensor
        self.occasion = "first"
        self._exchange = exchange
        self._version = _version(tensor) if item.direction == "send" else None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for this message; see `Exchange.wait`. Takes a timedelta, as torch's own works do."""
        self._exchange.wait([self], timeout.total_seconds() if timeout else None)
        return True

    def is_completed(self) -> bool:
        """Whether it has been waited for. gloo tells nobody earlier."""
        return self.done

    def finish(self) -> None:
        """The message is through: let the work go; raises BufferBusy where what was sent was written meanwhile."""
        written = self._version is not None and self.tensor is not None and self._version != _version(self.tensor)
        self.done, self.work, self.wire = True, None, None
        if self.item.direction == "send":
            self.tensor = None
        if written:
            raise BufferBusy(
                f"{self.item.message}: the tensor was written between post and wait, so what arrived may be either",
                "write it after the handle's wait, or send a clone",
            )


@dataclass(frozen=True)
class Wait:
    """What the main thread is waiting for, since when, and until when at most (the exchange's clock, seconds)."""

    handles: tuple[Handle, ...]
    since: float
    deadline: float


def _version(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_inference() else tensor._version
