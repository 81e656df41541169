"""Receives that look at a message before they take it.

Open MPI 5.0.11 reports a message that is longer than the buffer as MPI_ERR_TRUNCATE, and yet writes all of it, past the
buffer's end, where it fetches the data itself (from 4 KiB on one host, more over TCP; seen with two ranks of mpi4py alone).
"""

from __future__ import annotations

from typing import Any

import torch
from mpi4py import MPI

from dtprobe.framework.transport.mpi import tensors as t


class Mailbox:
    """The receives under way on a communicator; used by the engine's thread alone."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.waiting: list[Receive] = []

    def receive(self, into: torch.Tensor, source: int, tag: int) -> Receive:
        """Receive into flat memory; earlier receives that the same message fits have it first, as MPI wants it."""
        made = Receive(self, into, source, tag)
        self.waiting.append(made)
        return made


class Receive:
    """Stands among MPI's requests. `came` is the number of elements that arrived, -1 before; `source` the rank they are from."""

    def __init__(self, box: Mailbox, into: torch.Tensor, source: int, tag: int) -> None:
        self._box, self._into, self._wanted, self._tag = box, into, source, tag
        self._request: Any = None
        self.came, self.source = -1, source

    def Test(self) -> bool:
        """Whether it is complete; raises MPI's error. A message of another size is taken too, to memory of its own."""
        if self._request is None:
            if self in self._box.waiting and not self._match():
                return False
            if self._request is None:
                return True  # dropped
        return bool(self._request.Test())

    def drop(self) -> None:
        """Wait no longer; a message that is on its way already still arrives."""
        if self in self._box.waiting:
            self._box.waiting.remove(self)

    @property
    def expected(self) -> int:
        return self._into.numel()

    @property
    def fits(self) -> bool:
        """Whether what came is what was expected."""
        return self.came == self.expected

    def _match(self) -> bool:
        for earlier in self._box.waiting:
            if earlier is self:
                break
            if earlier._tag == self._tag and (
                MPI.ANY_SOURCE in (earlier._wanted, self._wanted) or earlier._wanted == self._wanted
            ):
                return False
        found = MPI.Status()
        message = self._box.comm.Improbe(self._wanted, self._tag, found)
        if message is None:
            return False
        self._box.waiting.remove(self)
        datatype = t.moving(self._into)
        size = found.Get_count(MPI.BYTE)
        self.source, self.came = found.Get_source(), size // self._into.element_size()
        if size <= self._into.numel() * self._into.element_size():
            self._request = message.Irecv([t.memory(self._into), self.came, datatype])
        else:
            self._request = message.Irecv([bytearray(size), MPI.BYTE])
        return True
