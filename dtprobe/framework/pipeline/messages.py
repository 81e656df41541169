"""Messages between stages: their names, the tags made of the names, and the one order that both ends agree on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from dtprobe.errors import UsageError

Kind = Literal["forward", "backward", "set-up"]
Direction = Literal["send", "receive"]

KINDS: tuple[Kind, ...] = ("forward", "backward")
"""Kinds of messages that users post; what goes over the exchange's group by other ways is of kind `set-up`, with its tag for a micro-batch."""
SLOTS = 16
"""How many tensors one stage may pass to another for one micro-batch."""
_OURS = 1 << 30
"""Tags from here to the 31-bit limit are the exchange's; torch's pipelining sends its set-up messages with tag 0."""


@dataclass(frozen=True, order=True)
class Channel:
    """A stream of like messages, one a micro-batch, in the same order at both ends."""

    kind: Kind
    source: int
    destination: int
    slot: int = 0

    def __str__(self) -> str:
        several = f" (tensor {self.slot})" if self.slot else ""
        return f"{self.kind} from stage {self.source} to stage {self.destination}{several}"


@dataclass(frozen=True, order=True)
class Message:
    """What a message is called at both ends. The order of messages is the order in which a batch of them is issued."""

    microbatch: int
    channel: Channel

    def __str__(self) -> str:
        return f"micro-batch {self.microbatch} {self.channel}"

    def tag(self, stages: int) -> int:
        """The tag of this message among `stages` stages; UsageError when it does not fit in the 30 bits there are."""
        channel = self.channel
        if channel.kind not in KINDS:
            raise UsageError(f"a message of kind {channel.kind!r}", "forward or backward")
        number = KINDS.index(channel.kind)
        for digit, base in ((channel.source, stages), (channel.destination, stages), (channel.slot, SLOTS)):
            if not 0 <= digit < base:
                raise UsageError(f"{self}: {digit} is outside 0 to {base - 1}", f"there are {stages} stages and {SLOTS} slots")
            number = number * base + digit
        room = _OURS // (len(KINDS) * stages * stages * SLOTS)
        if not 0 <= self.microbatch < room:
            raise UsageError(f"{self}: micro-batches of {stages} stages are numbered 0 to {room - 1}")
        return _OURS + number * room + self.microbatch


@dataclass(frozen=True)
class Transfer:
    """One message that a stage sends or receives, and the tensor it lies in.

    `peer` is the stage at the other end; `stage` is this end's, needed only where a rank has several. `tensor` may be None
    when receiving in an exchange with dynamic shapes. `slot` tells several tensors of one micro-batch apart (below 16).
    """

    direction: Direction
    peer: int
    microbatch: int
    kind: Kind
    tensor: torch.Tensor | None = field(repr=False)
    slot: int = 0
    stage: int | None = None

    def message(self, stage: int) -> Message:
        """The name of the message, this end being `stage`."""
        source, destination = (stage, self.peer) if self.direction == "send" else (self.peer, stage)
        return Message(self.microbatch, Channel(self.kind, source, destination, self.slot))


def contract(tensor: torch.Tensor) -> str:
    """What both ends of a message have to have in common: `float32 [4, 8]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def empty(agreed: str, device: torch.device) -> torch.Tensor:
    """A tensor for what `contract` described."""
    dtype, _, shape = agreed.partition(" ")
    return torch.empty([int(each) for each in shape[1:-1].split(",") if each], dtype=getattr(torch, dtype), device=device)
