"""Loading mpi4py and initialising MPI, without holding the interpreter and with enough threads."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

from dtprobe.framework.transport.mpi.errors import MpiUnavailable, ThreadLevelTooLow


def load(environ: MutableMapping[str, str]) -> tuple[Any, bool]:
    """mpi4py's MPI, initialised, and whether it was initialised here, and so is ours to finalise.

    Blocks until every rank of the job has initialised MPI. Raises MpiUnavailable or ThreadLevelTooLow.
    """
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MpiUnavailable(f"mpi4py cannot be used: {error}", "pip install 'dtprobe[mpi]'") from None
    if MPI.Is_finalized():
        raise MpiUnavailable("MPI has been finalised in this process already", "it can be started once a process")
    ours = not MPI.Is_initialized()
    if ours:
        with _alone(environ):
            _initialize(MPI)
    level = MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED:
        names = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED"}
        raise ThreadLevelTooLow(
            f"MPI was initialised with thread level {names.get(level, level)}, at least SERIALIZED is needed",
            "let register() initialise it, or ask for THREAD_MULTIPLE (mpi4py's default)",
        )
    return MPI, ours


@contextlib.contextmanager
def _alone(environ: MutableMapping[str, str]) -> Iterator[None]:
    """A process that no launcher started gets no shared memory: Open MPI 5.0.11 leaves its segment in /dev/shm for ever."""
    name = "OMPI_MCA_btl"
    if name in environ or any(each.startswith(("PMIX_", "PMI_")) for each in environ):
        yield
        return
    environ[name] = "self"
    try:
        yield
    finally:
        del environ[name]


def _initialize(mpi: Any) -> None:
    """MPI_Init_thread, which waits for all ranks of the job, without holding the interpreter: mpi4py's own call holds it."""
    library = ctypes.CDLL(mpi.__file__)
    provided = ctypes.c_int()
    wanted = ctypes.c_int(int(mpi.THREAD_MULTIPLE))
    code = library.MPI_Init_thread(None, None, wanted, ctypes.byref(provided))
    if code != mpi.SUCCESS:
        raise MpiUnavailable(f"MPI_Init_thread failed with code {code}", "look at what the MPI library wrote")
    for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # as mpi4py does when it initialises
