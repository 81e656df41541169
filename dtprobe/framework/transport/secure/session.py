"""The keys of one session: a session is what one run of a group agreed on, and no two sessions share a key.

Why no nonce is ever used twice under one key, over crash, restart and rotation:

1. A key is HKDF-SHA256 of the master secret with the transcript of the handshake as salt and (sender, receiver, lane, epoch)
   as info. The transcript holds 32 fresh bytes of *every* member. A sealer belongs to one session, in one process.
2. So a restarted process, which has forgotten its counters, cannot meet an old key: its own contribution is new, whatever a
   lost disk, a store that was rolled back, or a peer that repeats itself supplies. Nothing needs to be remembered, so nothing
   can be lost. (A counter on disk fails where the disk is new or shared by two incarnations; a boot number in the store fails
   with the store, which ends with the job and which nobody authenticates.)
3. Within a session a sealer's sequence number is the counter of the nonce. It is spent before it is used, never goes back, and
   goes on counting over rotations. A sealer refuses to work in a forked child, and cannot be copied or pickled.

The same contributions make a recording of an earlier session useless against this one. Probability of failure: that of
two equal 32-byte draws.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dtprobe.framework.transport.secure.secret import MasterSecret

VERSION = 1
"""Of the record format and the handshake; part of every key and of every record's associated data."""


@dataclass(frozen=True)
class Channel:
    """One direction between two global ranks; records of one `lane` of it (a tag, or the collectives) are strictly ordered."""

    sender: int
    receiver: int
    lane: str


@dataclass(frozen=True)
class Session:
    """Keys of one session of one group. `transcript` is a digest of all that its members contributed (32 bytes)."""

    secret: MasterSecret
    transcript: bytes = field(repr=False)

    @classmethod
    def between(cls, secret: MasterSecret, group: str, fresh: Mapping[int, bytes]) -> Session:
        """The session of `group` whose members (global ranks) contributed `fresh` bytes each."""
        said = [VERSION, group, [[rank, fresh[rank].hex()] for rank in sorted(fresh)]]
        return cls(secret, hashlib.sha256(json.dumps(said).encode()).digest())

    def key(self, channel: Channel, epoch: int) -> bytes:
        """The AES-256 key of `channel` in `epoch` (32 bytes)."""
        return self._derived(["record", channel.sender, channel.receiver, channel.lane, epoch])

    def proof(self, rank: int) -> bytes:
        """What only a holder of the secret who took part in this handshake can say as `rank` (32 bytes)."""
        return hmac.digest(self._derived(["proof", rank]), self.transcript, "sha256")

    def camp(self) -> bytes:
        """The same for all members that hold one secret. It proves nothing; it tells whom to name when proofs fail."""
        return hmac.digest(self._derived(["camp"]), self.transcript, "sha256")

    def _derived(self, purpose: list[str | int]) -> bytes:
        info = json.dumps(["dtprobe.secure", VERSION, *purpose]).encode()
        return HKDF(hashes.SHA256(), 32, self.transcript, info).derive(self.secret.material())
