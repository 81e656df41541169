"""The master secret: 32 or more random bytes in a file that only its owner can read."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from dtprobe.framework.transport.secure.errors import SecretRefused

VARIABLE = "DTPROBE_SECRET_FILE"
"""The environment variable that names the file. Never the secret itself: an environment is readable in many places."""

_LEAST_BYTES = 32


class MasterSecret:
    """The secret all ranks of a job share. It is never printed, pickled or copied; what is derived from it encrypts."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) < _LEAST_BYTES:
            raise SecretRefused(f"a master secret of {len(key)} bytes", f"use {_LEAST_BYTES} random bytes or more")
        self._key = bytes(key)

    @classmethod
    def from_file(cls, path: Path) -> MasterSecret:
        """Read hexadecimal digits from `path`; raises SecretRefused unless it is a regular file of this user, closed to others."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise SecretRefused(f"cannot read the master secret {path}: {error.strerror}", _MAKE) from None
        try:
            _refuse_unless_closed(path, os.fstat(descriptor), os.geteuid())
            text = os.read(descriptor, 4096).strip()
        finally:
            os.close(descriptor)
        if not re.fullmatch(rb"(?:[0-9a-fA-F]{2})+", text):
            raise SecretRefused(f"the master secret {path} is not a line of hexadecimal digits", _MAKE)
        return cls(bytes.fromhex(text.decode()))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> MasterSecret:
        """Read the file that DTPROBE_SECRET_FILE names."""
        if not environ.get(VARIABLE):
            raise SecretRefused(f"{VARIABLE} is not set", f"let it name the file of the master secret; {_MAKE}")
        return cls.from_file(Path(environ[VARIABLE]))

    @staticmethod
    def create(path: Path, *, fresh: Callable[[int], bytes] = secrets.token_bytes) -> None:
        """Write a new secret to `path` with mode 0600; raises SecretRefused when something is there already."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise SecretRefused(f"cannot create {path}: {error.strerror}", "choose a path that does not exist yet") from None
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(fresh(_LEAST_BYTES).hex() + "\n")
            file.flush()
            os.fsync(descriptor)

    def material(self) -> bytes:
        """The bytes, for key derivation alone."""
        return self._key

    def __repr__(self) -> str:
        return "MasterSecret(hidden)"

    def __reduce__(self) -> NoReturn:
        raise SecretRefused("a master secret is neither pickled nor copied", "give each process the path of its file")


def _refuse_unless_closed(path: Path, status: os.stat_result, user: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SecretRefused(f"the master secret {path} is not a regular file", _MAKE)
    if status.st_uid not in (user, 0):
        raise SecretRefused(
            f"the master secret {path} belongs to user {status.st_uid}, this process is user {user}", f"chown {user} {path}"
        )
    if status.st_mode & 0o077:
        raise SecretRefused(
            f"the master secret {path} has mode {stat.S_IMODE(status.st_mode):04o}: others may use it",
            f"chmod 600 {path}, and make a new secret if others could read it",
        )


_MAKE = "make one with `python -m dtprobe.framework.transport.secure new FILE` and give every host a copy"
