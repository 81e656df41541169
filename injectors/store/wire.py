"""Messages of a TCPStore client, cut out of the stream of bytes: one query each.

The layout (torch/csrc/distributed/c10d/TCPStoreBackend.hpp, TCPStore.cpp; read off the wire with torch 2.13): one byte for the
kind of query, then its fields. Numbers are little-endian, 8 bytes; a text is its length and its bytes. A query has no answer
of its own kind, and several may come in one piece: the first piece of a client holds `validate` and `ping`.
"""

from __future__ import annotations

SIZE = 8
MESSAGE_MAX = 64 << 20
"""A longer text is taken for another protocol's bytes."""

QUERIES: dict[int, tuple[str, str]] = {
    0: ("validate", "4"),
    1: ("set", "tt"),
    2: ("compare_set", "ttt"),
    3: ("get", "t"),
    4: ("add", "t8"),
    5: ("check", "*t"),
    6: ("wait", "*t"),
    7: ("num_keys", ""),
    8: ("delete_key", "t"),
    9: ("append", "tt"),
    10: ("multi_get", "*t"),
    11: ("multi_set", "*tt"),
    12: ("cancel_wait", ""),
    13: ("ping", "4"),
}
"""First byte -> name and fields: a digit is so many bytes, `t` a text, `*` a count of what follows."""

OTHER = "other"


class Messages:
    """Cuts a client's bytes into messages. What it does not know comes as it arrived, as `other`."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """The messages, (name, bytes), that are complete with these bytes."""
        self._rest += data
        found = []
        while self._rest:
            kind = QUERIES.get(self._rest[0])
            end = -1 if kind is None else _end(self._rest, kind[1])
            if end == 0:
                break
            name = OTHER if kind is None or end < 0 else kind[0]
            end = len(self._rest) if end < 0 else end
            found.append((name, self._rest[:end]))
            self._rest = self._rest[end:]
        return found


def _end(data: bytes, fields: str) -> int:
    """Where the message ends; 0 where it is not complete yet, -1 where it cannot be one."""
    at, times = 1, 1
    if fields.startswith("*"):
        if len(data) < at + SIZE:
            return 0
        times, fields = int.from_bytes(data[at : at + SIZE], "little"), fields[1:]
        at += SIZE
        if times > MESSAGE_MAX // SIZE:
            return -1
    for field in fields * times:
        if field == "t":
            if len(data) < at + SIZE:
                return 0
            at += SIZE + int.from_bytes(data[at : at + SIZE], "little")
        else:
            at += int(field)
        if at > MESSAGE_MAX:
            return -1
        if at > len(data):
            return 0
    return at
