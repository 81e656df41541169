"""What kind of artifact a file is, by its first bytes."""

from __future__ import annotations


def kind_of(head: bytes, size: int) -> str:
    """`empty`, `flight-recorder`, `binary` or `text`."""
    if not size:
        return "empty"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "flight-recorder"
    if head.lstrip()[:1] in (b"{", b"[") and b'"entries"' in head:
        return "flight-recorder"
    if b"\0" in head:
        return "binary"
    return "text"
