"""What the encrypted transport raises. A `RecordError` means that nothing of the message was taken over."""

from __future__ import annotations

from dtprobe.errors import UsageError
from dtprobe.framework.errors import FrameworkError, RankError


class RecordError(RankError):
    """A message that does not open. `sender`, `receiver` are global ranks, `sequence` the record expected next on their channel.

    `expected` and `got` are the values in conflict. Which subclass is raised is decided by the clear header, which an attacker
    can write: it tells how the record was wrong, not who made it so. `ranks` holds the sender that the receiver waited for.
    """

    def __init__(
        self, message: str, remedy: str, *, sender: int, receiver: int, sequence: int, expected: object, got: object
    ) -> None:
        super().__init__(
            f"rank {receiver}, from rank {sender}, record {sequence}: {message} (expected {expected}, got {got})",
            remedy,
            ranks=(sender,),
        )
        self.sender = sender
        self.receiver = receiver
        self.sequence = sequence
        self.expected = expected
        self.got = got


class Tampered(RecordError):
    """The tag does not verify: a changed bit, another key, or associated data that differ."""


class Replayed(RecordError):
    """A sequence number that was used already."""


class OutOfOrder(RecordError):
    """A sequence number beyond the next one: records before it were dropped or come later."""


class WrongEpoch(RecordError):
    """An epoch outside the window of the current and the next one."""


class WrongChannel(RecordError):
    """A record of another pair of ranks, of the other direction, or of another version of the format."""


class Truncated(RecordError):
    """Fewer or more bytes, or records, than the message must have."""


class Mismatched(RecordError):
    """The sender described another tensor (name, dtype or shape) than the receiver asked for."""


class PeerSilent(RankError):
    """A peer sent nothing before the timeout, or the connection to it broke."""


class HandshakeFailed(RankError):
    """Ranks could not agree on a session; none was begun. `ranks` are those that differ."""


class WrongSecret(HandshakeFailed):
    """Ranks hold different master secrets, or could not prove that they hold one."""


class SecretRefused(UsageError):
    """The file of the master secret is missing, readable by others, or holds no secret."""


class NotCovered(UsageError):
    """Something that the encrypted transport does not do; refused so that it does not travel in the clear."""


class ForkedSealer(FrameworkError):
    """A sealer used in another process than the one that made it: both would use the same nonces."""
