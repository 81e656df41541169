"""The proxy between a rank and the rendezvous store: passes bytes on, but for what the faults make of the rank's messages.

A rank says on a unix socket where its store is, and gets a port of its own on the loopback. Everything is
one asyncio loop; the configuration file is the only argument.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from wire import Messages

from dtprobe.inject.helper import Aim, Log, Windows, listen

LOOPBACK = "127.0.0.1"
PIECE = 1 << 18
AGAIN_S = 0.02
LINGER_NOT = struct.pack("ii", 1, 0)
"""SO_LINGER of zero: a close sends RST instead of FIN."""


class Proxy:
    """All ranks that come through one fault."""

    def __init__(self, part: dict[str, Any], log: Log) -> None:
        self.part = part
        self.log = log
        self.windows = Windows([part])
        self.ranks: list[Rank] = []

    async def register(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A rank comes: where its store is goes in, its own port comes out."""
        with suppress(ConnectionError, ValueError):
            said = json.loads(await reader.readline())
            rank = Rank(self, said["rank"], said["address"], said["port"])
            port = await rank.open()
            self.ranks.append(rank)
            writer.write((json.dumps({"address": LOOPBACK, "port": port}) + "\n").encode())
            await writer.drain()
        writer.close()

    def command(self, command: dict[str, Any]) -> None:
        on = command["do"] == "begin"
        self.windows.turn(command["index"], command["rank"], on)
        for rank in self.ranks:
            if command["rank"] in (None, rank.number):
                rank.turned(on)


class Rank:
    """One rank: its port, its store, its connections, its count of messages."""

    def __init__(self, proxy: Proxy, number: int | None, address: str, port: int) -> None:
        self.proxy = proxy
        self.part = proxy.part
        self.log = proxy.log
        self.number = number
        self.store = (address, port)
        self.aim = Aim(proxy.part, number, proxy.windows)
        self.pairs: set[Pair] = set()
        self.silent: list[tuple[Pair, str | None]] = []
        self._port = 0
        self._server: asyncio.Server | None = None
        self._refusing = False
        self._first: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> int:
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        self._port = holder.getsockname()[1]
        if self.part["action"] == "refuse" and self.proxy.windows.on(self.part["index"], self.number):
            # Bound and not listening: the kernel refuses, and nobody else gets the port.
            self._refuse(holder)
        else:
            keep(self._listen(holder))
        return self._port

    async def _listen(self, holder: socket.socket) -> None:
        """Let the rank in once its store does: until then it is refused, as it would be without a proxy."""
        while self._first is None:
            try:
                self._first = await asyncio.open_connection(*self.store)
            except OSError:
                await asyncio.sleep(AGAIN_S)
        self._server = await asyncio.start_server(self._accept, sock=holder)

    def _refuse(self, holder: socket.socket) -> None:
        self._refusing = True
        seconds = self.part["seconds"]
        number = self.log.fired(
            self.part["index"], self.number, call="connect", detail=f"nobody listens on the rank's port for {seconds:g} s"
        )

        async def wait() -> None:
            await asyncio.sleep(seconds)
            self._refusing = False
            self.log.ended(number)
            await self._listen(holder)

        keep(wait())

    def turned(self, on: bool) -> None:
        """The fault begins or ends for this rank."""
        if self.part["action"] == "refuse" and on and self._server is not None and not self._refusing:
            self._server.close()
            for pair in list(self.pairs):
                pair.reset()
            holder = socket.socket()
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((LOOPBACK, self._port))
            self._refuse(holder)
        if not on:
            for pair, number in self.silent:
                # The host that went away is back, and knows nothing of the connection.
                pair.reset()
                self.log.ended(number)
            self.silent.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        store, self._first = self._first, None
        try:
            store = store or await asyncio.open_connection(*self.store)
        except OSError as error:
            self.log.say("note", text=f"the store of rank {self.number} at {self.store} cannot be reached: {error}")
            _abort(writer)
            return
        pair = Pair(self, reader, writer, *store)
        self.pairs.add(pair)
        try:
            await pair.run()
        finally:
            self.pairs.discard(pair)


class Pair:
    """A rank's connection and the one to the store that belongs to it."""

    def __init__(
        self,
        rank: Rank,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        store_reader: asyncio.StreamReader,
        store_writer: asyncio.StreamWriter,
    ) -> None:
        self.rank = rank
        self.reader, self.writer = reader, writer
        self.store_reader, self.store_writer = store_reader, store_writer
        self.silent = False
        for one in (writer, store_writer):
            one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def run(self) -> None:
        back = keep(self._back())
        with suppress(OSError):  # either side is gone: so is the other below
            await self._forth()
        if not self.silent:
            with suppress(OSError):
                self.store_writer.write_eof()
            with suppress(asyncio.TimeoutError, OSError):
                await asyncio.wait_for(back, 60)
            for one in (self.writer, self.store_writer):
                one.close()

    def reset(self) -> None:
        self.silent = True
        for one in (self.writer, self.store_writer):
            _abort(one)

    async def _forth(self) -> None:
        messages = Messages()
        act = ACTIONS.get(self.rank.part["action"])
        while data := await self.reader.read(PIECE):
            for name, message in messages.feed(data):
                if self.silent:
                    continue
                number = None if act is None else self.rank.aim.meets(name)
                if act is None or number is None:
                    self.store_writer.write(message)
                else:
                    await act(self, name, message, number)
            if not self.silent:
                await self.store_writer.drain()

    async def _back(self) -> None:
        with suppress(OSError):
            while data := await self.store_reader.read(PIECE):
                if self.silent:
                    continue
                self.writer.write(data)
                await self.writer.drain()
        if not self.silent:
            with suppress(OSError):
                self.writer.write_eof()

    def fired(self, name: str, number: int, detail: str) -> str | None:
        return self.rank.log.fired(self.rank.part["index"], self.rank.number, call=name, nth=number, detail=detail)

    async def delay(self, name: str, message: bytes, number: int) -> None:
        mark = self.fired(name, number, f"{len(message)} bytes held back")
        await asyncio.sleep(self.rank.part["seconds"])
        self.rank.log.ended(mark)
        self.store_writer.write(message)

    async def drop(self, name: str, message: bytes, number: int) -> None:
        self.fired(name, number, f"{len(message)} bytes not passed on")

    async def cut(self, name: str, message: bytes, number: int) -> None:
        self.fired(name, number, "connection reset on both sides")
        self.reset()

    async def slice(self, name: str, message: bytes, number: int) -> None:
        size, pause_s = self.rank.part["bytes"], self.rank.part["pause_s"]
        mark = self.fired(name, number, f"{len(message)} bytes in {-(-len(message) // size)} pieces")
        for at in range(0, len(message), size):
            if at:
                await asyncio.sleep(pause_s)
            self.store_writer.write(message[at : at + size])
            await self.store_writer.drain()
        self.rank.log.ended(mark)

    async def half_open(self, name: str, message: bytes, number: int) -> None:
        mark = self.fired(name, number, "nothing passes any more, either way; the connection stays open")
        self.silent = True
        self.rank.silent.append((self, mark))


Act = Callable[[Pair, str, bytes, int], Coroutine[Any, Any, None]]
ACTIONS: dict[str, Act] = {
    "delay": Pair.delay,
    "drop": Pair.drop,
    "reset": Pair.cut,
    "slice": Pair.slice,
    "half_open": Pair.half_open,
}
"""What happens to a message; `refuse` is none of them, it meets connections."""

_tasks: set[asyncio.Task[Any]] = set()


def keep(coroutine: Any) -> asyncio.Task[Any]:
    """A task that nobody awaits would be collected in its sleep."""
    task = asyncio.get_running_loop().create_task(coroutine)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


def _abort(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
    writer.transport.abort()


async def serve(config: dict[str, Any]) -> None:
    log = Log()
    proxy = Proxy(config["parts"][0], log)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    # A relative name: the folder may be longer than an address of a unix socket.
    os.chdir(config["folder"])
    server = await asyncio.start_unix_server(proxy.register, config["socket"])

    def act(command: dict[str, Any]) -> None:
        if command["do"] == "stop":
            loop.call_soon_threadsafe(stop.set)
        else:
            loop.call_soon_threadsafe(proxy.command, command)

    listen(act)
    log.say("ready")
    await stop.wait()
    server.close()
    for rank in proxy.ranks:
        for _, number in rank.silent:
            log.ended(number)
    log.close()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
    os._exit(0)  # what is still connected ends with the job, not before it
