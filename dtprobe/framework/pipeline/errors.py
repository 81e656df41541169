"""What an exchange raises: each names the stage at the root, its rank, and what this stage was waiting for."""

from __future__ import annotations

from dtprobe.framework.errors import FrameworkError, RankError


class StageError(RankError):
    """An exchange failed because of one stage; raised on every rank of the exchange with the same `stage`.

    `stage` is the stage at the root (None where the evidence does not single one out), `ranks` its global rank, `microbatch`, `kind`
    ("forward" or "backward") and `direction` ("send" or "receive") are the message that this rank was waiting for (None when it waited for
    none), and `completed` is how many messages this rank had exchanged before.
    """

    def __init__(
        self,
        message: str,
        remedy: str = "",
        *,
        ranks: tuple[int, ...] = (),
        stage: int | None = None,
        microbatch: int | None = None,
        kind: str | None = None,
        direction: str | None = None,
        completed: int = 0,
    ) -> None:
        super().__init__(message, remedy, ranks=ranks)
        self.stage, self.microbatch, self.kind = stage, microbatch, kind
        self.direction, self.completed = direction, completed


class StageTimeout(StageError):
    """A stage did not send or take a message in time: it is stopped, computes for too long, or skipped the message."""


class StageLost(StageError):
    """A stage ended, or left the exchange with an exception."""


class MessageMismatch(StageError):
    """One end of a message has another dtype or shape than the other; nothing was transferred."""


class BufferBusy(FrameworkError):
    """A buffer was written, or given to a second message, before the exchange had completed the first."""
