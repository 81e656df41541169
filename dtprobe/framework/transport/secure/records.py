"""Sealing and opening: tensors' bytes to AES-256-GCM records and back. No input or output, no threads.

A message is one or more records of at most 1 MiB of plaintext, each

    header (40 bytes, clear, authenticated) | ciphertext | tag (16 bytes)

The header holds version, sender, receiver, epoch, sequence, index and count of the record in its message, length of the plaintext,
and a checksum of the description. The associated data are the header and the description itself (name, dtype, shape). The
nonce is the sender (4 bytes) and the sequence (8 bytes); see `session` for why it never repeats.
"""

from __future__ import annotations

import functools
import json
import os
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from dtprobe.framework.transport.secure import errors
from dtprobe.framework.transport.secure.session import VERSION, Channel, Session

RECORD = 1 << 20
"""Plaintext bytes of a full record: large enough for the cipher's full speed, small enough to stay in a core's cache."""

_HEADER = struct.Struct(">B3xIIIQIIII")
_TAG = 16
OVERHEAD = _HEADER.size + _TAG
"""Bytes that a record adds to its plaintext."""

_SAME_JOB = "the sender must be of this job and session; if it is, something between the two changes traffic"


@dataclass(frozen=True)
class Description:
    """What a message holds: `name` of the operation, `dtype` and `shape` of the tensor. Both ends must agree on it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def encoded(self) -> bytes:
        return _encoded(self)


@functools.lru_cache(maxsize=4096)
def _encoded(description: Description) -> bytes:
    return json.dumps([description.name, description.dtype, description.shape]).encode()


@dataclass(frozen=True)
class Rotation:
    """When a sealer goes on to the next epoch: after `records` records, or the first one after `seconds`.

    2**20 records are at most 1 TiB, or 2**36 AES blocks, under one key: an attacker's advantage stays below 2**-57 (the margin
    that TLS 1.3 keeps, RFC 8446 5.5).
    """

    records: int = 1 << 20
    seconds: float = 3600.0


def sealed_size(plain_bytes: int) -> int:
    """Bytes of the message that holds `plain_bytes` of plaintext; an empty one is a record too."""
    return plain_bytes + _count(plain_bytes) * OVERHEAD


def _count(plain_bytes: int) -> int:
    return max(1, -(-plain_bytes // RECORD))


class Sealer:
    """The sending end of one channel. Not thread-safe; bound to the process that made it."""

    def __init__(
        self,
        session: Session,
        channel: Channel,
        *,
        rotation: Rotation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._channel = channel
        self._rotation = rotation if rotation is not None else Rotation()
        self._clock = clock
        self._process = os.getpid()
        self._sender = channel.sender.to_bytes(4, "big")
        self._sequence = 0
        self._start(0)

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def sequence(self) -> int:
        """The number of the next record."""
        return self._sequence

    def rotate(self) -> None:
        """The next record is of the next epoch. Nothing changes when this epoch has no record yet: a receiver's window is two."""
        if self._sequence > self._first:
            self._start(self._epoch + 1)

    def seal(self, plain: memoryview, description: Description, out: memoryview) -> int:
        """Write the message of `plain` to `out` (bytes, at least `sealed_size(len(plain))`); how many bytes it has.

        Raises ForkedSealer in another process than the one that made this sealer.
        """
        if os.getpid() != self._process:
            raise errors.ForkedSealer(
                f"the sealer of {self._channel} was made in process {self._process} and used in {os.getpid()}",
                "make a group of its own in a forked child",
            )
        text = description.encoded
        mark, count, at = zlib.crc32(text), _count(len(plain)), 0
        for index in range(count):
            if self._sequence - self._first >= self._rotation.records or self._clock() >= self._ends:
                self.rotate()
            part = plain[index * RECORD : (index + 1) * RECORD]
            sequence = self._sequence
            self._sequence += 1  # spent before it is used: whatever goes wrong below, nobody uses it again
            header = _HEADER.pack(
                VERSION, self._channel.sender, self._channel.receiver, self._epoch, sequence, index, count, len(part), mark
            )
            end = at + _HEADER.size + len(part) + _TAG
            out[at : at + _HEADER.size] = header
            nonce = self._sender + sequence.to_bytes(8, "big")
            self._cipher.encrypt_into(nonce, part, header + text, out[at + _HEADER.size : end])
            at = end
        return at

    def _start(self, epoch: int) -> None:
        self._epoch = epoch
        self._first = self._sequence
        self._ends = self._clock() + self._rotation.seconds
        self._cipher = AESGCM(self._session.key(self._channel, epoch))

    def __reduce__(self) -> NoReturn:
        raise errors.ForkedSealer("a sealer is neither copied nor pickled: both would use the same nonces", "make another one")


@dataclass(frozen=True)
class _Position:
    """Where a receiving end is: the epoch of the last record that opened, and the sequence that must come next."""

    epoch: int
    sequence: int


class Opener:
    """The receiving end of one channel. A message that does not open leaves it as it was. Not thread-safe."""

    def __init__(self, session: Session, channel: Channel) -> None:
        self._session = session
        self._channel = channel
        self._at = _Position(0, 0)
        self._ciphers = {epoch: AESGCM(session.key(channel, epoch)) for epoch in (0, 1)}

    @property
    def epoch(self) -> int:
        return self._at.epoch

    @property
    def sequence(self) -> int:
        """The number that the next record must have."""
        return self._at.sequence

    def open(self, sealed: memoryview, description: Description, out: memoryview) -> None:
        """Write the plaintext of the message `sealed` to `out` (bytes, as many as the message was made of).

        Raises a RecordError when any record is not exactly the next one; `out` is zeroed then.
        """
        try:
            self._at = self._opened(sealed, description, out)
        except errors.RecordError:
            out[:] = bytes(len(out))
            raise
        for epoch in (self._at.epoch, self._at.epoch + 1):
            if epoch not in self._ciphers:
                self._ciphers[epoch] = AESGCM(self._session.key(self._channel, epoch))
        self._ciphers = {epoch: self._ciphers[epoch] for epoch in (self._at.epoch, self._at.epoch + 1)}

    def _opened(self, sealed: memoryview, description: Description, out: memoryview) -> _Position:
        now = self._at
        if len(sealed) != sealed_size(len(out)):
            raise self._wrong(errors.Truncated, "the message has another size", now, sealed_size(len(out)), len(sealed))
        text = description.encoded
        count, at = _count(len(out)), 0
        for index in range(count):
            part = out[index * RECORD : (index + 1) * RECORD]
            header = bytes(sealed[at : at + _HEADER.size])
            end = at + _HEADER.size + len(part) + _TAG
            now = self._due(header, now, (index, count, len(part)), description)
            nonce = self._channel.sender.to_bytes(4, "big") + now.sequence.to_bytes(8, "big")
            try:
                self._cipher(now.epoch).decrypt_into(nonce, sealed[at + _HEADER.size : end], header + text, part)
            except InvalidTag:
                raise self._wrong(errors.Tampered, "the record is not authentic", now, "a valid tag", "another") from None
            now = _Position(now.epoch, now.sequence + 1)
            at = end
        return now

    def _cipher(self, epoch: int) -> AESGCM:
        if epoch not in self._ciphers:  # a message that rotates more than once
            self._ciphers[epoch] = AESGCM(self._session.key(self._channel, epoch))
        return self._ciphers[epoch]

    def _due(self, header: bytes, now: _Position, place: tuple[int, int, int], description: Description) -> _Position:
        """The position of a record whose `header` says that it is the next one; raises otherwise."""
        version, sender, receiver, epoch, sequence, index, count, length, mark = _HEADER.unpack(header)
        if version != VERSION:
            raise self._wrong(errors.WrongChannel, "another version of the format", now, VERSION, version)
        if (sender, receiver) != (self._channel.sender, self._channel.receiver):
            expected = f"{self._channel.sender} to {self._channel.receiver}"
            raise self._wrong(errors.WrongChannel, "a record of other ranks", now, expected, f"{sender} to {receiver}")
        if sequence < now.sequence:
            raise self._wrong(errors.Replayed, "this sequence number was used before", now, now.sequence, sequence)
        if sequence > now.sequence:
            raise self._wrong(errors.OutOfOrder, "records before this one are missing", now, now.sequence, sequence)
        if epoch not in (now.epoch, now.epoch + 1):
            window = f"{now.epoch} or {now.epoch + 1}"
            raise self._wrong(errors.WrongEpoch, "the epoch is outside the window", now, window, epoch)
        if (index, count, length) != place:
            raise self._wrong(
                errors.Truncated, "part, parts and bytes of the record differ", now, place, (index, count, length)
            )
        if mark != zlib.crc32(description.encoded):
            raise self._wrong(errors.Mismatched, "the sender described another tensor", now, description, "another description")
        return _Position(epoch, sequence)

    def _wrong(
        self, kind: type[errors.RecordError], message: str, now: _Position, expected: object, got: object
    ) -> errors.RecordError:
        remedy = "call the same operations with the same dtypes and shapes on both ranks"
        return kind(
            message,
            remedy if kind is errors.Mismatched else _SAME_JOB,
            sender=self._channel.sender,
            receiver=self._channel.receiver,
            sequence=now.sequence,
            expected=expected,
            got=got,
        )
