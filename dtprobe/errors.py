"""Errors and unavailability as types: each carries what is wrong, with the values in conflict, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass


class DtprobeError(Exception):
    """The harness could not do its work; the command line prints it as one line and exits with `exit_code`.

    `message` says what is wrong and names the values in conflict, `remedy` what to do about it.
    """

    exit_code = 3

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class UsageError(DtprobeError):
    """The caller asked for something that does not exist or cannot be: exit code 2, nothing was started."""

    exit_code = 2


@dataclass(frozen=True)
class Unavailable:
    """Why a capability, recorder or framework part cannot be used here, and what would make it usable.

    `remedy` is a command or a sentence; it is empty where nothing on this machine helps (no GPU, say).
    """

    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.reason} ({self.remedy})" if self.remedy else self.reason
