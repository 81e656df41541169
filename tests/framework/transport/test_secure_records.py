"""Records: what was sealed opens once, in order, at the right place, and nothing else opens at all."""

from __future__ import annotations

import copy
import os
import pickle
import random
import zlib
from collections import Counter

import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dtprobe.framework.transport.secure import (
    Channel,
    Description,
    ForkedSealer,
    MasterSecret,
    Mismatched,
    Opener,
    OutOfOrder,
    RecordError,
    Replayed,
    Rotation,
    Sealer,
    Session,
    Tampered,
    Truncated,
    WrongChannel,
    WrongEpoch,
    records,
)

SESSION = Session.between(MasterSecret(b"s" * 32), "world", {0: b"a" * 32, 1: b"b" * 32, 2: b"c" * 32})
CHANNEL = Channel(0, 1, "collectives")
X = Description("all_reduce", "float32", (3,))


def sealed(sealer: Sealer, plain: bytes, description: Description = X) -> bytes:
    out = bytearray(records.sealed_size(len(plain)))
    assert sealer.seal(memoryview(plain), description, memoryview(out)) == len(out)
    return bytes(out)


def opened(opener: Opener, message: bytes, size: int, description: Description = X) -> bytes:
    out = bytearray(b"?" * size)
    try:
        opener.open(memoryview(message), description, memoryview(out))
    except RecordError:
        assert out == bytes(size), "a refused message left bytes behind"
        raise
    return bytes(out)


@pytest.fixture
def small(monkeypatch):
    """Records of 64 bytes, so that messages of several records are cheap."""
    monkeypatch.setattr(records, "RECORD", 64)


@pytest.mark.parametrize("size", [0, 1, records.RECORD - 1, records.RECORD, records.RECORD + 1, 3 * records.RECORD + 7])
def test_what_was_sealed_opens(size):
    plain = os.urandom(size)
    assert opened(Opener(SESSION, CHANNEL), sealed(Sealer(SESSION, CHANNEL), plain), size) == plain


def test_a_record_is_what_the_documentation_says():
    """Made again with nothing but HKDF and AES-GCM, from the description in the module's text."""
    message = sealed(Sealer(SESSION, CHANNEL), b"twelve bytes")
    info = b'["dtprobe.secure", 1, "record", 0, 1, "collectives", 0]'
    key = HKDF(hashes.SHA256(), 32, SESSION.transcript, info).derive(b"s" * 32)
    header, body = message[:40], message[40:]
    text = b'["all_reduce", "float32", [3]]'
    assert AESGCM(key).decrypt(bytes(4) + bytes(8), body, header + text) == b"twelve bytes"
    assert header[:28] == bytes([1, 0, 0, 0]) + bytes(4) + bytes([0, 0, 0, 1]) + bytes(4) + bytes(8) + bytes(4)


def test_each_kind_of_wrong_message_has_its_error_with_both_values():
    def stream():
        sealer = Sealer(SESSION, CHANNEL)
        return Opener(SESSION, CHANNEL), sealed(sealer, b"first"), sealed(sealer, b"second")

    opener, first, second = stream()
    with pytest.raises(OutOfOrder) as error:
        opened(opener, second, 6)
    assert (error.value.sender, error.value.receiver, error.value.sequence) == (0, 1, 0)
    assert (error.value.expected, error.value.got, error.value.ranks) == (0, 1, (0,))
    assert "rank 1, from rank 0, record 0" in str(error.value)
    assert opened(opener, first, 5) == b"first"
    with pytest.raises(Replayed):
        opened(opener, first, 5)
    with pytest.raises(Truncated):
        opened(opener, second[:-1], 6)
    with pytest.raises(Tampered):
        opened(opener, second[:-1] + bytes([second[-1] ^ 1]), 6)
    with pytest.raises(Mismatched):
        opened(opener, second, 6, Description("all_reduce", "int32", (3,)))
    with pytest.raises(WrongChannel):
        opened(Opener(SESSION, Channel(1, 0, "collectives")), second, 6)
    with pytest.raises(WrongChannel):
        opened(opener, bytes([2]) + second[1:], 6)
    with pytest.raises(WrongEpoch):
        opened(opener, second[:15] + bytes([2]) + second[16:], 6)
    assert opened(opener, second, 6) == b"second"


def test_a_sealer_rotates_by_count_by_time_and_when_told_and_the_opener_follows(small):
    now = [0.0]
    sealer = Sealer(SESSION, CHANNEL, rotation=Rotation(records=4, seconds=10), clock=lambda: now[0])
    opener = Opener(SESSION, CHANNEL)

    def passed(size: int) -> int:
        plain = os.urandom(size)
        assert opened(opener, sealed(sealer, plain), size) == plain
        return opener.epoch

    assert [passed(64), passed(64), passed(128), passed(64)] == [0, 0, 0, 1]
    now[0] = 11
    assert passed(1) == 2
    sealer.rotate()
    sealer.rotate()  # no record between: the receiver's window is not left behind
    assert passed(1) == 3
    assert passed(64 * 12) == 6  # within one message, too


def test_a_message_of_an_old_epoch_does_not_open_after_the_rotation():
    sealer, opener = Sealer(SESSION, CHANNEL), Opener(SESSION, CHANNEL)
    old = sealed(sealer, b"old")
    opened(opener, old, 3)
    sealer.rotate()
    opened(opener, sealed(sealer, b"new"), 3)
    with pytest.raises(RecordError):
        opened(opener, old, 3)


def test_a_sealer_is_neither_copied_nor_pickled_nor_used_in_a_child():
    sealer = Sealer(SESSION, CHANNEL)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ForkedSealer):
            attempt(sealer)
    child = os.fork()
    if not child:
        try:
            sealed(sealer, b"x")
        except ForkedSealer:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


OTHER = Description("all_reduce", "float32", (4,))
ELSEWHERE = Session.between(MasterSecret(b"s" * 32), "world", {0: b"a" * 32, 1: b"d" * 32, 2: b"c" * 32})
MUTATIONS = (
    "flip",
    "flip header",
    "replay",
    "reorder",
    "truncate",
    "extend",
    "splice",
    "records swapped",
    "cross pair",
    "cross lane",
    "cross epoch",
    "cross session",
    "other tensor",
)


def attack(count: int, seed: int) -> Counter[str]:
    """Deliver `count` messages that were changed in all these ways, and after each round the true one; how often each kind."""
    rng = random.Random(seed)
    done: Counter[str] = Counter()
    while done.total() < count:
        plain = rng.randbytes(rng.choice((0, 1, 63, 64, 65, 150, 192)))
        sealer, opener = Sealer(SESSION, CHANNEL), Opener(SESSION, CHANNEL)
        past = []
        for _ in range(rng.randrange(1, 4)):
            past.append(sealed(sealer, plain))
            opened(opener, past[-1], len(plain))
            if rng.random() < 0.3:
                sealer.rotate()
        genuine, following = sealed(sealer, plain), sealed(sealer, plain)
        for kind in MUTATIONS:
            message = _mutated(kind, rng, past, genuine, following, opener, plain)
            if message == genuine and kind != "other tensor":  # nothing to swap in one record; a cut where both are equal
                continue
            before = (opener.epoch, opener.sequence)
            with pytest.raises(RecordError):
                opened(opener, message, len(plain), OTHER if kind == "other tensor" else X)
            assert (opener.epoch, opener.sequence) == before
            done[kind] += 1
        assert opened(opener, genuine, len(plain)) == plain
    return done


def _mutated(kind, rng, past, genuine, following, opener, plain) -> bytes:
    if kind.startswith("flip"):
        bit = rng.randrange(8 * (40 if kind == "flip header" else len(genuine)))
        changed = bytearray(genuine)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)
    if kind == "replay":
        return rng.choice(past)
    if kind == "reorder":
        return following
    if kind == "truncate":
        return genuine[: rng.randrange(len(genuine))]
    if kind == "extend":
        return genuine + rng.randbytes(rng.randrange(1, 70))
    if kind == "splice":
        cut = rng.randrange(1, len(genuine))
        return rng.choice((genuine[:cut] + following[cut:], following[:cut] + genuine[cut:], genuine[:cut] + past[0][cut:]))
    if kind == "records swapped":
        end = 64 + records.OVERHEAD
        return genuine[end : 2 * end] + genuine[:end] + genuine[2 * end :]
    if kind == "other tensor":  # with the checksum that would make it look right, or without
        checksum = zlib.crc32(OTHER.encoded).to_bytes(4, "big")
        return rng.choice((genuine, genuine[:36] + checksum + genuine[40:]))
    session, channel, epoch = SESSION, CHANNEL, opener.epoch
    if kind == "cross pair":
        channel = rng.choice((Channel(1, 0, "collectives"), Channel(0, 2, "collectives"), Channel(2, 1, "collectives")))
    elif kind == "cross lane":
        channel = Channel(0, 1, "tag 0")
    elif kind == "cross session":
        session = ELSEWHERE
    else:
        epoch = rng.choice([each for each in range(opener.epoch + 5) if each - opener.epoch not in (0, 1)])
    other = Sealer(session, channel)
    other._sequence = opener.sequence  # the right place, which makes it as hard to tell as can be
    other._start(epoch)
    message = sealed(other, plain)
    if kind == "cross pair" and rng.random() < 0.5:  # under a header that names the right ranks
        return genuine[:12] + message[12:]
    return message


def test_thousands_of_changed_messages_are_all_refused_and_disturb_nothing(small):
    assert set(attack(4_000, seed=1)) == set(MUTATIONS)


@pytest.mark.nightly
def test_a_hundred_thousand_changed_messages_are_all_refused(small):
    assert min(attack(100_000, seed=2).values()) > 1_000
