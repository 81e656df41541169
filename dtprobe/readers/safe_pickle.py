"""Pickles from strangers: lists, tuples, dicts, strings, bytes, numbers, None, and nothing else, in bounded memory.

Three guards, each enough against what it is for:

1. The opcodes are walked first, mostly by one regular expression and without building anything. An opcode that names, calls or
   builds an object refuses the file, and the error says what it would have run.
2. The walk bounds what the C unpickler does not: a memo index of four bytes (`LONG_BINPUT`) makes it allocate, and touch, a
   table of that length, up to 64 GiB; a tuple nested deep enough overflows the C stack when it is hashed as a key.
3. What is left is loaded by an unpickler that refuses every global.

Measured on a dump of 2,000 entries with 10 frames (510 kB, 167,000 opcodes): the walk takes 5 ms, the C unpickler 5 ms.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Callable
from typing import Any, NoReturn

MAX_TUPLES = 5_000
"""So many tuples may be nested in each other without harm; a pickle with more of them is loaded with their depth watched."""


class RefusedPickle(ValueError):
    """The pickle would build or call something, or would cost out of proportion. Nothing of it was loaded."""


class CutPickle(ValueError):
    """The pickle ends too early. `value` is what its complete part builds, open containers closed; None if nothing."""

    def __init__(self, message: str, value: Any) -> None:
        super().__init__(message)
        self.value = value


def loads(data: bytes) -> Any:
    """The value of a pickle of protocol 2 to 5 made of plain containers and scalars.

    Raises RefusedPickle, CutPickle with what could be read, or ValueError for bytes that are no pickle.
    """
    end, tuples, cut = _walk(data)
    if cut or tuples > MAX_TUPLES:
        return _Watched(data[:end]).value(cut)
    try:
        # of a stream that can be peeked into, the C unpickler reads blocks: three times as fast
        stream = io.BufferedReader(io.BytesIO(data if end == len(data) else data[:end]))
        return _Plain(stream, encoding="utf-8", errors="replace").load()
    except RefusedPickle:
        raise
    except Exception as error:  # a malformed stream makes it raise almost anything
        raise ValueError(f"malformed pickle: {type(error).__name__}: {error}") from error


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise RefusedPickle(f"it asks for {module}.{name}")


# opcodes of fixed length; protocol 0's, whose arguments are lines of text, are not among them: nobody writes it
_FIXED = rb"[\]}()aeustdl01N\x85-\x89\x94]|[hqK].|M..|[jJ]....|[G].{8}|\x95.{8}|\x80[\x01-\x05]|\x8a\x08.{8}|r%s"
_SIZES = {ord("X"): 4, ord("B"): 4, ord("T"): 4, 0x8B: 4, 0x8C: 1, ord("U"): 1, ord("C"): 1, 0x8A: 1, 0x8D: 8, 0x8E: 8, 0x96: 8}
_OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}
_TUPLES = (b"t", b"\x85", b"\x86", b"\x87")
_STOP = ord(".")
_LENGTHS = {ord(code): length for code, length in zip("hqKMjJGr", (2, 2, 2, 3, 5, 5, 9, 5), strict=True)} | {0x95: 9, 0x80: 2}


def _walk(data: bytes) -> tuple[int, int, bool]:
    """Where the pickle ends, about how many tuples it makes at most, and whether it ends too early."""
    if not data:
        raise ValueError("the file is empty")
    if data[0] != 0x80 or (len(data) > 1 and not 2 <= data[1] <= 5):
        raise ValueError(f"not a pickle: it begins with {data[:8]!r}")
    run = re.compile(b"(?:" + _FIXED % _index(len(data)) + b")*+", re.DOTALL)
    match_run, size_of, total = run.match, _SIZES.get, len(data)
    at, cut, runs = 0, False, []
    while True:
        match = match_run(data, at)
        if match is not None:
            runs.append(match[0])
            at = match.end()
        if at >= total:
            at, cut = total, True
            break
        code = data[at]
        if code == _STOP:
            at += 1
            break
        width = size_of(code)
        if width is None:
            if code in _LENGTHS and at + _LENGTHS[code] > total:
                cut = True
                break
            raise RefusedPickle(_why(data, at))
        after = at + 1 + width
        behind = after + int.from_bytes(data[at + 1 : after], "little")
        if behind > total:
            cut = True
            break
        at = behind
    opcodes = b"".join(runs)
    return at, sum(map(opcodes.count, _TUPLES)), cut


def _index(size: int) -> bytes:
    """A pattern of four little-endian bytes that admits no number much above `size`: each memo entry takes bytes of the file."""
    most = size.to_bytes(4, "little") if size < 2**32 else b"\xff" * 4
    high = max(at for at in range(4) if most[at] or at == 0)
    return b"." * high + b"[\\x00-\\x%02x]" % most[high] + b"\\x00" * (3 - high)


def _why(data: bytes, at: int) -> str:
    """What an opcode that is not allowed would do."""
    known = _OPCODES.get(chr(data[at]))
    if known is None:
        return f"byte {data[at]:#04x} at {at} is no pickle opcode"
    if known.name in ("GLOBAL", "INST"):
        names = data[at + 1 : at + 300].split(b"\n")[:2]
        return f"it asks for {b'.'.join(names).decode('ascii', 'backslashreplace')}: it would run code"
    if known.name == "STACK_GLOBAL":
        names = re.findall(rb"[\x8cX].(?:\0\0\0)?([A-Za-z_][\w.]*)", data[max(0, at - 300) : at])[-2:]
        return f"it asks for {b'.'.join(names).decode('ascii', 'backslashreplace') or 'an object'}: it would run code"
    if known.name == "LONG_BINPUT":
        return f"opcode LONG_BINPUT at {at} asks for a table of {int.from_bytes(data[at + 1 : at + 5], 'little')} places"
    return f"opcode {known.name} at {at} is not one of plain data"


class _Watched(pickle._Unpickler):
    """The interpreter's own unpickler in Python: it can be asked what it had built when the bytes ended, and watches depth."""

    stack: list[Any]
    metastack: list[list[Any]]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8", errors="replace")
        self._depths: dict[int, int] = {}

    def _tuple(self, load: Callable[[Any], None]) -> None:
        load(self)
        made = self.stack[-1]
        depth = 1 + max((self._depths.get(id(one), 0) for one in made if isinstance(one, tuple)), default=0)
        if depth > MAX_TUPLES:
            raise RefusedPickle(f"tuples nested more than {MAX_TUPLES} deep")
        self._depths[id(made)] = depth

    dispatch = dict(pickle._Unpickler.dispatch)  # noqa: RUF012

    def find_class(self, module: str, name: str) -> NoReturn:
        raise RefusedPickle(f"it asks for {module}.{name}")

    def value(self, cut: bool) -> Any:
        try:
            value = self.load()
        except RefusedPickle:
            raise
        except EOFError:
            raise CutPickle("the pickle is cut", self._closed()) from None
        except Exception as error:  # a malformed stream makes it raise almost anything
            raise ValueError(f"malformed pickle: {type(error).__name__}: {error}") from error
        if cut:
            raise CutPickle("the pickle is cut", value)
        return value

    def _closed(self) -> Any:
        """The outermost object, with what lay on the stack put into the containers that were open."""
        levels = [*self.metastack, self.stack]
        while len(levels) > 1:
            inner = levels.pop()
            outer = levels[-1][-1] if levels[-1] else None
            if isinstance(outer, list):
                outer.extend(inner)
            elif isinstance(outer, dict):
                pairs = zip(inner[::2], inner[1::2], strict=False)
                outer.update({key: value for key, value in pairs if isinstance(key, str | int)})
        return levels[0][0] if levels[0] else None


def _watched(load: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda self: self._tuple(load)


_Watched.dispatch.update({code: _watched(_Watched.dispatch[code]) for code in b"t\x85\x86\x87"})
