"""In a rank: serves torch's flight recorder on a unix socket, and writes it out when the interpreter ends.

The socket is `<DTPROBE_FR_SOCKETS>/fr-<pid>.sock`, answered by torch's own worker server from C++ threads (`pt_workerserver`,
nine of them on a small machine): also while the main thread waits in a collective or holds the GIL. At a normal end, and at
one by an uncaught exception, the records are left in `fr-exit.json` (and NCCL's own in `fr-exit-nccl.json`). Stack traces
are never asked for: the first dump with them takes seconds.
"""

from __future__ import annotations

import atexit
import os

SOCKETS = "DTPROBE_FR_SOCKETS"
DUMPS = (("_dump_fr_trace_json", "fr-exit.json"), ("_dump_nccl_trace_json", "fr-exit-nccl.json"))


def install(hook) -> None:
    hook.after_import("torch.distributed", lambda module: _begin(hook, module))


def _begin(hook, distributed) -> None:
    if not distributed.is_available():
        hook.say("this torch is built without torch.distributed: no flight recorder")
        return
    from torch._C import _distributed_c10d as c10d

    server = None
    if not hasattr(c10d, "_WorkerServer"):
        hook.say("this torch has no worker server: the flight recorder is written at exit only")
    elif SOCKETS in hook.environ:
        try:
            with _Quiet():
                server = c10d._WorkerServer(_socket(hook), -1)
        except Exception as error:  # noqa: BLE001  torch raises several kinds here; the dump at exit still works
            hook.say(f"torch's worker server does not start: {error}; the flight recorder is written at exit only")
        else:
            import ctypes  # torch has loaded it; a Python that never imports torch need not

            # Never destroyed: in a forked child its destructor would wait for threads that exist in the parent only.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    atexit.register(_end, hook, c10d, server, os.getpid())


def _end(hook, c10d, server, pid: int) -> None:
    if os.getpid() != pid:
        return
    for name, file in DUMPS:
        if hasattr(c10d, name):
            hook.run(_dump, hook.folder, getattr(c10d, name), file)
    if server is not None:
        with _Quiet():
            hook.run(server.shutdown)
        os.unlink(_socket(hook))  # noqa: PTH108


def _dump(folder: str, dump, file: str) -> None:
    text = dump()
    if b'"entries"' not in text:
        return
    os.makedirs(folder, exist_ok=True)  # noqa: PTH103
    with open(f"{folder}/.{file}", "wb") as temporary:  # noqa: PTH123
        temporary.write(text)
    os.replace(f"{folder}/.{file}", f"{folder}/{file}")  # noqa: PTH105


def _socket(hook) -> str:
    return f"{hook.environ[SOCKETS]}/fr-{os.getpid()}.sock"


class _Quiet:
    """Holds standard error back for an instant, and then lets through all but the worker server's own log lines.

    torch writes them as warnings and has no switch for them alone. A user would take them for his own program's.
    """

    def __enter__(self) -> None:
        self._kept = None
        try:
            self._kept = os.dup(2)
        except OSError:  # standard error is closed: nobody sees anything
            return
        self._held = os.memfd_create("dtprobe-stderr")
        os.dup2(self._held, 2)

    def __exit__(self, *failure: object) -> None:
        if self._kept is None:
            return
        os.dup2(self._kept, 2)
        os.close(self._kept)
        lines = os.pread(self._held, os.lseek(self._held, 0, os.SEEK_CUR), 0).splitlines(keepends=True)
        os.close(self._held)
        if rest := b"".join(line for line in lines if b"WorkerServer.cpp" not in line):
            os.write(2, rest)
