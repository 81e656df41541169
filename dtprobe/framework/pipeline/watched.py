"""The group that torch's pipelining is given: what it sends past the exchange is watched, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dtprobe.framework.forwarding import ForwardingGroup
from dtprobe.framework.groups import ScopedGroup

if TYPE_CHECKING:
    from dtprobe.framework.pipeline.exchange import Exchange


class WatchedGroup(ForwardingGroup):
    """A group whose plain sends and receives go through an exchange, so that a wait for them ends with a named stage."""

    def __init__(self, inner: ScopedGroup, exchange: Exchange) -> None:
        super().__init__(inner)
        self._exchange = exchange

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        return self._exchange.post_raw("send", tensors[0], dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        return self._exchange.post_raw("receive", tensors[0], src, tag)
