"""The warden: parent of all processes of a run, which outlives the harness and takes everything down when it dies.

It is a small single-threaded program of its own in its own session, started by `dtprobe.confine` over a socket. Requests
and answers are JSON lines. End of file on the socket means that the harness is dead, by whatever death: then, as on
`close`, every descendant is killed (it is a subreaper, so daemons and grandchildren in sessions of their own are among
them), what carries the run's marker is killed, and the ledger is undone last entry first. Ranks get SIGKILL from the kernel
when the warden itself dies (PDEATHSIG); what is left then, `dtprobe.leftovers` finds.
Standard library only: it runs without site-packages (`python -I -S`), so that it starts fast and no hook gets into it.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from dtprobe import cgroup, processes, undo
from dtprobe.errors import Unavailable
from dtprobe.ledger import Ledger, LedgerError, Owner, boot_id
from dtprobe.processes import Identity, Process
from dtprobe.shm import Segments

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_WITHIN_S = 2.0
"""How long one request to end everything may take before it answers with what is left (the harness waits 3 s)."""

LAST_EFFORT_S = 30.0
"""How long the warden of a dead or finished run goes on trying before it leaves the rest to the doctor."""

Reply = dict[str, Any]


class Child:
    """A process that the harness asked for: held until released, then timed."""

    def __init__(self, number: int, pid: int, hold: int, status: int, program: str) -> None:
        self.number = number
        self.pid = pid
        self.hold: int | None = hold
        self.status = status
        self.program = program
        self.started = time.monotonic()
        self.waiting: int | None = None  # the release request that waits for the program to start


class Warden:
    """One run's warden. `main` runs it until the harness closes it or dies."""

    def __init__(self, channel: socket.socket, ledger: Ledger, owner: Owner, scratch: Path, group: Path | Unavailable) -> None:
        self.channel = channel
        self.ledger = ledger
        self.owner = owner
        self.scratch = scratch
        self.group = group
        self.children: dict[int, Child] = {}
        self.segments = Segments(owner.run_id)
        self.selector = selectors.DefaultSelector()
        self.marker = processes.marker(owner.run_id, owner.harness, owner.warden)
        self.harness_gone = False
        self.dismissed = False
        self._numbers = 0
        self._buffer = b""

    def serve(self) -> None:
        """Answer requests until `close` or the end of the harness; then undo everything."""
        wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        self.selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096))
        self.selector.register(self.channel, selectors.EVENT_READ, self._requests)
        if self.segments.descriptor is not None:
            self.selector.register(self.segments.descriptor, selectors.EVENT_READ, lambda: self.segments.look(self.ledger))
        closing: int | None = None
        try:
            while closing is None and not self.harness_gone:
                # A child that the harness forked may hold the socket open: its death is also seen by our parent's pid.
                for key, _ in self.selector.select(timeout=1.0):
                    if (answered := key.data()) is not None and key.fileobj is self.channel:
                        closing = answered
                self._reap()
                self.harness_gone |= self.dismissed or os.getppid() != self.owner.harness.pid
        except Exception as error:
            self._send({"crash": f"{type(error).__name__}: {error}"})
            raise
        finally:
            self._finish(closing)

    def _finish(self, closing: int | None) -> None:
        problems = self._take_down(KILL_WITHIN_S)
        if closing is not None:
            self._send({"to": closing, "problems": problems})
        self.channel.close()
        if problems:
            self._take_down(LAST_EFFORT_S)
        self.ledger.close()

    def dismiss(self, signum: int, frame: object) -> None:
        """Signal handler: somebody ends the warden itself (the machine shuts down); it takes the run down first."""
        self.dismissed = True

    # Requests

    def _requests(self) -> int | None:
        """Read what the harness says and answer it; the number of a `close` request."""
        try:
            received = self.channel.recv(1 << 16)
        except ConnectionResetError:
            received = b""
        if not received:
            self.harness_gone = True
            return None
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        for line in lines:
            try:
                request = json.loads(line)
            except ValueError:  # the harness was interrupted in the middle of a request
                self.harness_gone = True
                return None
            number, verb = request["id"], request.pop("do")
            if verb == "close":
                return number
            try:
                reply = VERBS[verb](self, request)
            except (OSError, LedgerError, undo.UndoError) as error:
                reply = {"error": str(error)}
            if reply is not None:
                self._send({"to": number, **reply})
        return None

    def _spawn(self, request: Mapping[str, Any]) -> Reply:
        try:
            files = [
                os.open(request["stdin"], os.O_RDONLY),
                os.open(request["stdout"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
                os.open(request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            ]
        except OSError as error:
            return {"error": f"cannot open {error.filename}: {error.strerror}"}
        hold_read, hold_write = os.pipe()
        status_read, status_write = os.pipe()
        environ = {**request["env"], **self.marker}
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(request["argv"], environ, request["cwd"], files, hold_read, status_write, me)
        for descriptor in (*files, hold_read, status_write):
            os.close(descriptor)
        self._numbers += 1
        child = Child(self._numbers, pid, hold_write, status_read, request["argv"][0])
        self.children[pid] = child
        self.segments.own(pid)
        problem = None
        if isinstance(self.group, Path):
            try:
                (self.group / "cgroup.procs").write_text(str(pid), encoding="ascii")
            except OSError as error:
                problem = f"process {pid} did not join the cgroup {self.group}: {error.strerror}"
        who = processes.identity(pid)
        return {"number": child.number, "pid": pid, "start": who.start if who else 0, "problem": problem}

    def _release(self, request: Mapping[str, Any]) -> Reply | None:
        """Let a held child go on to its program; answered once the program runs, or could not be executed."""
        child = self.children.get(request["pid"])
        if child is None or child.number != request["number"] or child.hold is None:
            return {"error": f"process {request['pid']} ended before it was released"}
        child.waiting = request["id"]
        child.started = time.monotonic()
        self.selector.register(child.status, selectors.EVENT_READ, lambda: self._begun(child))
        with suppress(BrokenPipeError):  # it was killed while it was held: the status pipe ends too
            os.write(child.hold, b"g")
        os.close(child.hold)
        child.hold = None
        return None

    def _begun(self, child: Child) -> None:
        if child.waiting is None:  # answered already, when it was reaped
            return
        said = os.read(child.status, 4096).decode(errors="replace")
        self.selector.unregister(child.status)
        os.close(child.status)
        self._send({"to": child.waiting, **({"error": said} if said else {})})
        child.waiting = None

    def _signal(self, request: Mapping[str, Any]) -> Reply:
        sent = request["pid"] in self.children and processes.send(Identity(request["pid"], request["start"]), request["signum"])
        return {"sent": sent}

    def _kill_all(self, request: Mapping[str, Any]) -> Reply:
        return {"problems": self._end_processes(KILL_WITHIN_S)}

    def _undo(self, request: Mapping[str, Any]) -> Reply:
        return {"ticket": self.ledger.announce(request["kind"], request["data"])}

    def _revert(self, request: Mapping[str, Any]) -> Reply:
        self.ledger.revert(request["ticket"])
        return {}

    # Processes

    def _reap(self) -> None:
        """Wait for whoever has ended, tell the harness, and keep the processor time that the kernel hands over."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.segments.own(pid)
            code = os.waitstatus_to_exitcode(status)
            ended = {
                "pid": pid,
                "code": code if code >= 0 else None,
                "signal": -code if code < 0 else None,
                "cpu_s": usage.ru_utime + usage.ru_stime,
            }
            child = self.children.pop(pid, None)
            if child is None:
                self._send({"orphan": ended})
                continue
            if child.hold is not None:
                os.close(child.hold)
                os.close(child.status)
            elif child.waiting is not None:
                self._begun(child)
            self._send({"ended": child.number, **ended, "wall_s": time.monotonic() - child.started})

    def _end_processes(self, within_s: float) -> list[str]:
        """Kill all descendants and members of the cgroup, then remove the shared memory they left; what still lives."""
        self.segments.look(self.ledger)
        if isinstance(self.group, Path) and self.group.is_dir():
            with suppress(OSError):  # the walk below ends the same processes one by one
                undo.kill_cgroup(self.group)
        left = processes.end(lambda: processes.descendants(os.getpid()), within_s=within_s, reap=self._reap)
        # Whom the kill met between making a segment and being looked at has been reaped, and so is known.
        self.segments.look(self.ledger)
        return [f"{processes.describe(one)} could not be ended" for one in left] + self.segments.sweep(self.ledger)

    def _take_down(self, within_s: float) -> list[str]:
        problems = self._end_processes(within_s)
        spared = processes.ancestors(os.getpid()) | processes.ancestors(self.owner.harness.pid)

        def strangers() -> list[Process]:
            """Processes of the run that are not our descendants: started by the harness itself, with the marker."""
            return [one for one, _ in processes.marked(self.owner.run_id) if one.pid not in spared]

        left = processes.end(strangers, within_s=within_s, reap=self._reap)
        problems += [f"{processes.describe(one)} could not be ended" for one in left]
        return problems + self.ledger.revert_all()

    def _send(self, message: Reply) -> None:
        try:
            self.channel.sendall((json.dumps(message) + "\n").encode())
        except OSError:
            self.harness_gone = True


VERBS: Mapping[str, Callable[[Warden, Mapping[str, Any]], Reply | None]] = {
    "spawn": Warden._spawn,
    "release": Warden._release,
    "signal": Warden._signal,
    "kill_all": Warden._kill_all,
    "undo": Warden._undo,
    "revert": Warden._revert,
}


def _become(
    argv: list[str], environ: Mapping[str, str], cwd: str, files: list[int], hold: int, status: int, warden: int
) -> NoReturn:
    """In the forked child: own session, death with the warden, files in place; wait for the release; become the program."""
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != warden:  # it died before the line above
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
        for target, source in enumerate(files):
            os.dup2(source, target)
        # Other children's pipes and the socket: held here, they would hide the end of their owner.
        for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
            if descriptor > 2 and descriptor not in (hold, status):
                with suppress(OSError):  # the descriptor that listed the folder is closed already
                    os.close(descriptor)
        if os.read(hold, 1) != b"g":
            os._exit(1)
        try:
            os.chdir(cwd)
        except OSError as error:
            os.write(status, f"cannot enter the folder {cwd}: {error.strerror}".encode())
            os._exit(127)
        try:
            os.execvpe(argv[0], argv, environ)
        except OSError as error:
            os.write(status, f"cannot execute {argv[0]}: {error.strerror}".encode())
    finally:
        os._exit(127)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def main(argv: list[str]) -> None:
    """`fd harness_pid harness_start run_id ledger_folder temp_folder`: serve the harness at the other end of `fd`."""
    channel = socket.socket(fileno=int(argv[0]))
    channel.set_inheritable(False)
    harness = Identity(int(argv[1]), int(argv[2]))
    run_id, ledger_folder, temp_folder = argv[3], Path(argv[4]), Path(argv[5])
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    me = processes.identity(os.getpid())
    if me is None:
        _refuse(channel, "/proc shows no processes", "mount it")
    owner = Owner(run_id, os.uname().nodename, boot_id(), processes.pid_namespace(), harness, me)
    try:
        ledger = Ledger.create(ledger_folder, owner)
    except LedgerError as error:
        _refuse(channel, str(error), "set XDG_STATE_HOME to a folder that you can write, and use a fresh run id")
    scratch = temp_folder / f"dtprobe-{os.urandom(4).hex()}"
    try:
        ledger.announce("temp_dir", {"path": str(scratch)})
        scratch.mkdir(mode=0o700)
    except (OSError, LedgerError) as error:
        ledger.revert_all()
        ledger.close()
        reason = error.strerror if isinstance(error, OSError) else error
        _refuse(
            channel, f"cannot make a temporary folder in {temp_folder}: {reason}", "set TMPDIR to a folder that you can write"
        )
    warden = Warden(channel, ledger, owner, scratch, _make_group(ledger, run_id))
    warden._send(
        {
            "ready": True,
            "scratch": str(scratch),
            "cgroup": str(warden.group) if isinstance(warden.group, Path) else None,
            "reason": [warden.group.reason, warden.group.remedy] if isinstance(warden.group, Unavailable) else None,
            "problem": warden.segments.problem,
        }
    )
    signal.signal(signal.SIGTERM, warden.dismiss)
    warden.serve()


def _make_group(ledger: Ledger, run_id: str) -> Path | Unavailable:
    found = cgroup.place(
        f"dtprobe-{run_id}",
        mountinfo=Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape"),
        membership=Path("/proc/self/cgroup").read_text(encoding="utf-8"),
    )
    if isinstance(found, Path):
        try:
            ledger.announce("cgroup", {"path": str(found)})
            found.mkdir()
        except (OSError, LedgerError) as error:
            return Unavailable(f"cannot make the cgroup {found}: {error}")
    return found


def _refuse(channel: socket.socket, why: str, remedy: str) -> NoReturn:
    channel.sendall((json.dumps({"error": [why, remedy]}) + "\n").encode())
    sys.exit(3)
