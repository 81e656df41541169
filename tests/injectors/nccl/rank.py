"""One rank that makes the NCCL calls it is told to: `rank.py STEPS`, a JSON list of [step, argument...].

Prints one JSON line a step: its name, NCCL's result, the values it left behind. How libnccl is loaded is LOAD's choice: `local` (as
torch does), `global`, or `bypass` (called through the handle, past any preloaded library).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

INT, FLOAT = 2, 7
LIMIT_S = 30.0


class UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


class Rank:
    def __init__(self) -> None:
        self.rank = int(os.environ["TEST_RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self.shared = Path(os.environ["SHARED"])
        path, mode = os.environ["LIBNCCL"], os.environ.get("LOAD", "local")
        loaded = ctypes.CDLL(path, ctypes.RTLD_GLOBAL if mode == "global" else ctypes.RTLD_LOCAL)
        self.nccl = loaded if mode == "bypass" else ctypes.CDLL(None)
        self.comms: list[ctypes.c_void_p] = []
        self.ids = 0
        self.values: list[float] = []

    def unique_id(self) -> UniqueId:
        """Rank 0's, handed to the others in a file."""
        self.ids += 1
        file = self.shared / f"id-{self.ids}"
        one = UniqueId()
        if self.rank == 0:
            assert self.nccl.ncclGetUniqueId(ctypes.byref(one)) == 0
            fresh = file.with_suffix(".new")
            fresh.write_bytes(bytes(one))
            fresh.replace(file)
        else:
            self.until(file)
            ctypes.memmove(ctypes.byref(one), file.read_bytes(), 128)
        return one

    def until(self, file: Path) -> int:
        deadline = time.monotonic() + LIMIT_S
        while not file.exists():
            if time.monotonic() > deadline:
                sys.exit(f"{file} never came")
            time.sleep(0.01)
        return 0

    def made(self, comm: ctypes.c_void_p, result: int) -> int:
        if comm.value:
            self.comms.append(comm)
        return result

    def init(self, form: str = "plain") -> int:
        comm, one = ctypes.c_void_p(), self.unique_id()
        if form == "config":
            return self.made(
                comm, self.nccl.ncclCommInitRankConfig(ctypes.byref(comm), self.size, one, self.rank, ctypes.c_void_p())
            )
        if form == "scalable":
            return self.made(
                comm,
                self.nccl.ncclCommInitRankScalable(
                    ctypes.byref(comm), self.size, self.rank, 1, ctypes.byref(one), ctypes.c_void_p()
                ),
            )
        return self.made(comm, self.nccl.ncclCommInitRank(ctypes.byref(comm), self.size, one, self.rank))

    def split(self, color: int, key: int) -> int:
        comm = ctypes.c_void_p()
        return self.made(comm, self.nccl.ncclCommSplit(self.comms[0], color, key, ctypes.byref(comm), ctypes.c_void_p()))

    def shrink(self, *excluded: int) -> int:
        comm, ranks = ctypes.c_void_p(), (ctypes.c_int * len(excluded))(*excluded)
        return self.made(
            comm, self.nccl.ncclCommShrink(self.comms[0], ranks, len(excluded), ctypes.byref(comm), ctypes.c_void_p(), 0)
        )

    def all_reduce(self, count: int = 4, op: int = 0, comm: int = 0) -> int:
        data = (ctypes.c_float * count)(*[self.rank + 1.0] * count)
        result = self.nccl.ncclAllReduce(data, data, ctypes.c_size_t(count), FLOAT, op, self.comms[comm], None)
        self.values = list(data)
        return result

    def reduce_scatter(self) -> int:
        data, out = (ctypes.c_int * self.size)(*range(self.size)), (ctypes.c_int * 1)()
        result = self.nccl.ncclReduceScatter(data, out, ctypes.c_size_t(1), INT, 0, self.comms[0], None)
        self.values = list(out)
        return result

    def all_gather(self) -> int:
        data, out = (ctypes.c_int * 1)(self.rank + 10), (ctypes.c_int * self.size)()
        result = self.nccl.ncclAllGather(data, out, ctypes.c_size_t(1), INT, self.comms[0], None)
        self.values = list(out)
        return result

    def all_to_all(self) -> int:
        data = (ctypes.c_int * self.size)(*(10 * self.rank + i for i in range(self.size)))
        out = (ctypes.c_int * self.size)()
        result = self.nccl.ncclAlltoAll(data, out, ctypes.c_size_t(1), INT, self.comms[0], None)
        self.values = list(out)
        return result

    def gather(self, root: int = 0) -> int:
        data, out = (ctypes.c_int * 1)(self.rank + 10), (ctypes.c_int * self.size)()
        result = self.nccl.ncclGather(data, out, ctypes.c_size_t(1), INT, root, self.comms[0], None)
        self.values = list(out)
        return result

    def scatter(self, root: int = 0) -> int:
        data, out = (ctypes.c_int * self.size)(*range(self.size)), (ctypes.c_int * 1)()
        result = self.nccl.ncclScatter(data, out, ctypes.c_size_t(1), INT, root, self.comms[0], None)
        self.values = list(out)
        return result

    def reduce(self, root: int = 0, op: int = 0) -> int:
        data, out = (ctypes.c_int * 1)(self.rank + 1), (ctypes.c_int * 1)()
        result = self.nccl.ncclReduce(data, out, ctypes.c_size_t(1), INT, op, root, self.comms[0], None)
        self.values = list(out)
        return result

    def broadcast(self, root: int = 0) -> int:
        data, out = (ctypes.c_int * 2)(self.rank + 10, self.rank + 20), (ctypes.c_int * 2)()
        result = self.nccl.ncclBroadcast(data, out, ctypes.c_size_t(2), INT, root, self.comms[0], None)
        self.values = list(out)
        return result

    def bcast(self, root: int = 0) -> int:
        data = (ctypes.c_int * 1)(self.rank + 10)
        result = self.nccl.ncclBcast(data, ctypes.c_size_t(1), INT, root, self.comms[0], None)
        self.values = list(data)
        return result

    def send(self, peer: int, value: int = 7) -> int:
        self.kept = (ctypes.c_int * 1)(value)
        return self.nccl.ncclSend(self.kept, ctypes.c_size_t(1), INT, peer, self.comms[0], None)

    def recv(self, peer: int) -> int:
        self.inbox = (ctypes.c_int * 1)()
        result = self.nccl.ncclRecv(self.inbox, ctypes.c_size_t(1), INT, peer, self.comms[0], None)
        self.values = list(self.inbox)
        return result

    def group_start(self) -> int:
        return self.nccl.ncclGroupStart()

    def group_end(self) -> int:
        result = self.nccl.ncclGroupEnd()
        self.values = list(getattr(self, "inbox", ()))
        return result

    def async_error(self, polls: int = 1) -> int:
        error = ctypes.c_int(-1)
        seen = []
        for _ in range(polls):
            assert self.nccl.ncclCommGetAsyncError(self.comms[0], ctypes.byref(error)) == 0
            seen.append(float(error.value))
        self.values = seen
        return 0

    def abort(self) -> int:
        return self.nccl.ncclCommAbort(self.comms.pop())

    def destroy(self) -> int:
        return self.nccl.ncclCommDestroy(self.comms.pop())

    def finalize(self) -> int:
        return self.nccl.ncclCommFinalize(self.comms[-1])

    def abort_soon(self, file: str) -> int:
        """Another thread aborts the communicator when the file is there."""
        comm = self.comms[0]

        def wait() -> None:
            self.until(self.shared / file)
            self.nccl.ncclCommAbort(comm)

        self.aborter = threading.Thread(target=wait)
        self.aborter.start()
        return 0

    def all_reduce_in_a_thread(self, count: int) -> int:
        """Returns once the other thread is about to call."""
        comm, calling = self.comms[0], threading.Event()
        data = (ctypes.c_float * count)(*[self.rank + 1.0] * count)

        def call() -> None:
            calling.set()
            self.nccl.ncclAllReduce(data, data, ctypes.c_size_t(count), FLOAT, 0, comm, None)

        threading.Thread(target=call).start()
        calling.wait()
        return 0

    def empty_groups(self, many: int) -> int:
        """Two calls a turn that need no other rank."""
        return sum(self.nccl.ncclGroupStart() + self.nccl.ncclGroupEnd() for _ in range(many))

    def hammer(self, file: str) -> int:
        """All-reduces whose counts follow from their number, until the file is there."""
        data, turn = (ctypes.c_float * 8)(), 0
        while not (self.shared / file).exists():
            for _ in range(500):
                turn += 1
                count = ctypes.c_size_t(turn % 7 + 1)
                assert self.nccl.ncclAllReduce(data, data, count, FLOAT, turn % 4, self.comms[0], None) == 0
        self.values = [float(turn)]
        return 0

    def touch(self, file: str) -> int:
        (self.shared / file).touch()
        return 0

    def wait(self, file: str) -> int:
        return self.until(self.shared / file)

    def block(self) -> int:
        threading.Event().wait()
        return 0

    def stop(self) -> int:
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0

    def fork(self) -> int:
        """A child makes a call of its own and ends."""
        child = os.fork()
        if child == 0:
            version = UniqueId()
            os._exit(0 if self.nccl.ncclGetUniqueId(ctypes.byref(version)) == 0 else 1)
        self.values = [float(child)]
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def hold_gil(self, file: str) -> int:
        """Blocks in C with the interpreter's lock held: a collective that the other ranks join only after the file."""
        held = ctypes.PyDLL(None)
        data = (ctypes.c_float * 1)(1.0)
        (self.shared / file).touch()
        return held.ncclAllReduce(data, data, ctypes.c_size_t(1), FLOAT, 0, self.comms[0], None)


def main(steps: list[list[Any]]) -> None:
    rank = Rank()
    for name, *arguments in steps:
        rank.values = []
        result = getattr(rank, name)(*arguments)
        print(json.dumps({"step": name, "result": result, "values": rank.values}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
