"""No nonce is used twice under one key, whatever crashes, restarts, rotates or lies: a model of two ranks, and the fault."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable

import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from dtprobe.framework.transport.secure import (
    Channel,
    Description,
    MasterSecret,
    Opener,
    RecordError,
    Rotation,
    Sealer,
    Session,
    records,
)

SECRET = MasterSecret(b"s" * 32)
X = Description("send", "uint8", ())
RANKS = st.sampled_from((0, 1))
LANES = st.sampled_from(("collectives", "tag 0"))


class RepeatedNonce(AssertionError):
    pass


class WatchedCipher:
    """AES-GCM that refuses what must never happen: a nonce that was used with the same key before."""

    used: set[tuple[bytes, bytes]]

    def __init__(self, key: bytes) -> None:
        self._key, self._cipher = key, AESGCM(key)
        self.decrypt_into = self._cipher.decrypt_into

    def encrypt_into(self, nonce: bytes, *rest: object) -> int:
        if (self._key, nonce) in self.used:
            raise RepeatedNonce(f"nonce {nonce.hex()}")
        self.used.add((self._key, nonce))
        return self._cipher.encrypt_into(nonce, *rest)


def never_equal() -> Callable[[int], bytes]:
    """What the operating system's randomness is trusted to be: draws that differ, and nothing more."""
    numbers = itertools.count()
    return lambda size: hashlib.sha256(b"draw %d" % next(numbers)).digest()[:size]


class TwoRanks(RuleBasedStateMachine):
    """Two ranks of one job, which the test starts, kills and lets talk as it likes; the store between them is hostile."""

    draws = staticmethod(never_equal)

    def __init__(self) -> None:
        super().__init__()
        WatchedCipher.used = set()
        self.fresh = self.draws()
        self.now = 0.0
        self.contributed: list[list[bytes]] = [[b"\0" * 32], [b"\0" * 32]]
        self.sessions: list[Session | None] = [None, None]
        self.sealers: dict[Channel, Sealer] = {}
        self.seen: list[tuple[Channel, Session, bytes]] = []

    @rule(rank=RANKS, data=st.data())
    def start(self, rank: int, data: st.DataObject) -> None:
        """A rank starts, or starts again. What it hears of its peer is anything that the peer ever said, or rubbish."""
        self.crash(rank)
        mine = self.fresh(32)
        self.contributed[rank].append(mine)
        theirs = data.draw(st.sampled_from(self.contributed[1 - rank]))
        self.sessions[rank] = Session.between(SECRET, "world", {rank: mine, 1 - rank: theirs})

    @rule(rank=RANKS)
    def crash(self, rank: int) -> None:
        """Everything that it knew is gone, between any two records."""
        self.sessions[rank] = None
        self.sealers = {channel: sealer for channel, sealer in self.sealers.items() if channel.sender != rank}

    @precondition(lambda self: any(self.sessions))
    @rule(rank=RANKS, lane=LANES, size=st.integers(0, 5), rotates=st.booleans())
    def send(self, rank: int, lane: str, size: int, rotates: bool) -> None:
        session = self.sessions[rank]
        if session is None:
            return
        channel = Channel(rank, 1 - rank, lane)
        if channel not in self.sealers:
            self.sealers[channel] = Sealer(session, channel, rotation=Rotation(3, 10), clock=lambda: self.now)
        if rotates:
            self.sealers[channel].rotate()
        out = bytearray(records.sealed_size(size))
        self.sealers[channel].seal(memoryview(bytes(size)), X, memoryview(out))
        self.seen.append((channel, session, bytes(out)))

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def replay_into_a_new_session(self, data: st.DataObject) -> None:
        """What was recorded in one session never opens in another, however the receiver starts."""
        channel, session, message = data.draw(st.sampled_from(self.seen))
        other = self.sessions[channel.receiver]
        if other is None or other.transcript == session.transcript:
            return
        size = len(message) % records.OVERHEAD
        with pytest.raises(RecordError):
            Opener(other, channel).open(memoryview(message), X, memoryview(bytearray(size)))


class WithoutFreshness(TwoRanks):
    """The same without what each rank contributes anew: keys that depend on the master secret and the ranks alone."""

    draws = staticmethod(lambda: bytes)


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(records, "AESGCM", WatchedCipher)
    monkeypatch.setattr(records, "RECORD", 2)  # a message is up to three records


def run(machine: type[TwoRanks], examples: int) -> None:
    chosen = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize("examples", [pytest.param(60, id="some"), pytest.param(1_000, id="many", marks=pytest.mark.nightly)])
def test_no_nonce_repeats_over_crash_restart_and_rotation(watched, examples):
    run(TwoRanks, examples)


def test_the_same_model_finds_the_repetition_where_restarts_contribute_nothing(watched):
    with pytest.raises(RepeatedNonce):
        run(WithoutFreshness, 200)
