"""A run's process tree, temporary folder, cgroup and undo ledger, with a teardown that survives the harness's own death."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dtprobe import ledger, processes
from dtprobe.errors import DtprobeError, Unavailable

ANSWER_S = 30.0
"""How long the warden may take to answer: it never waits for anything but a program's start and an undo step."""

CLOSE_S = 2.8
"""How long `close` waits; the warden goes on by itself after that."""

BOOT = "import sys; sys.path.append(sys.argv[1]); from dtprobe.warden import main; main(sys.argv[2:])"
DEV_NULL = Path(os.devnull)


@dataclass(frozen=True)
class Child:
    """A process of the run. `number` is its own within the run: pids are used again."""

    number: int
    pid: int
    start: int


@dataclass(frozen=True)
class Exit:
    """How a process ended: `code`, or `signal` when one killed it. `wall_s` counts from its release.

    `cpu_s` is user and system time of the process and of the children that it waited for (wait4(2)).
    """

    code: int | None
    signal: int | None
    wall_s: float
    cpu_s: float


class Confinement:
    """Processes of one run under a warden, and the promise that nothing of them stays. A context manager.

    All methods may be called from any thread. When the warden dies (somebody killed it), every call but `close` raises
    DtprobeError, and `close` cleans up in its place.
    """

    def __init__(
        self, run_id: str, warden: subprocess.Popen[bytes], channel: socket.socket, environ: Mapping[str, str]
    ) -> None:
        self.run_id = run_id
        self.environ = environ
        self.problems: list[str] = []
        self._marker: Mapping[str, str] = {}
        self.scratch = Path()
        self.journal = ledger.folder(environ) / f"{run_id}.jsonl"
        self.cgroup: Path | Unavailable = Unavailable("not asked for yet")
        self._warden = warden
        self._channel = channel
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._next = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._released: set[int] = set()
        self._exits: dict[int, Exit] = {}
        self._orphans: dict[int, Exit] = {}
        self._ready: dict[str, Any] | None = None
        self._gone = False
        self._closed = False
        self._reader = threading.Thread(target=self._read, name="dtprobe-confine", daemon=True)
        self._reader.start()

    @classmethod
    def open(cls, run_id: str, *, environ: Mapping[str, str] = os.environ) -> Self:
        """Start the warden of a run; `environ` says where journals (`ledger.folder`) and temporary folders (TMPDIR) lie.

        Raises DtprobeError where the journal or the temporary folder cannot be made, or the run id is in use.
        """
        me = processes.identity(os.getpid())
        if me is None:
            raise DtprobeError("/proc shows no processes", "mount it: the harness cannot confine a run without")
        ours, theirs = socket.socketpair()
        argv = [
            *(sys.executable, "-I", "-S", "-c", BOOT, str(Path(__file__).resolve().parent.parent)),
            *(
                str(theirs.fileno()),
                str(me.pid),
                str(me.start),
                run_id,
                str(ledger.folder(environ).absolute()),
                str(Path(environ.get("TMPDIR", "/tmp")).absolute()),
            ),
        ]
        with theirs:
            warden = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={**environ, **processes.marker(run_id, me)},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        box = cls(run_id, warden, ours, environ)
        box._marker = processes.marker(run_id, me, processes.identity(warden.pid))
        try:
            box._await_ready()
        except BaseException:
            box.close()
            raise
        return box

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def warden_pid(self) -> int:
        """The warden: parent of all processes of the run."""
        return self._warden.pid

    @property
    def marker(self) -> Mapping[str, str]:
        """Variables for the environment of a process that the harness starts by itself (a recorder, say).

        With them the warden ends it too, after the harness's own death as at `close`. Processes from `spawn` have them.
        """
        return self._marker

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stdout: Path,
        stderr: Path,
        stdin: Path = DEV_NULL,
        held: bool = True,
    ) -> Child:
        """Create a process in a session of its own, output appended to files; `env` is its whole environment.

        A held process has its pid and waits before its program until `release`, so that recorders can attach.
        Raises DtprobeError: `cannot open FILE: reason`, and for one that is not held `cannot execute PROGRAM: reason`.
        """
        reply = self._ask(
            "spawn", argv=list(argv), env=dict(env), cwd=str(cwd), stdin=str(stdin), stdout=str(stdout), stderr=str(stderr)
        )
        if reply["problem"]:
            self.problems.append(reply["problem"])
        child = Child(reply["number"], reply["pid"], reply["start"])
        if not held:
            self.release(child)
        return child

    def release(self, child: Child) -> None:
        """Let a held process become its program; returns when the program runs. Released again, it does nothing.

        Raises DtprobeError (`cannot execute PROGRAM: reason`) when it could not.
        """
        with self._changed:
            if child.number in self._released:
                return
            self._released.add(child.number)
        self._ask("release", pid=child.pid, number=child.number)

    def poll(self, child: Child) -> Exit | None:
        """How the process ended, None while it runs."""
        with self._changed:
            return self._exits.get(child.number)

    def wait(self, child: Child, timeout_s: float) -> Exit | None:
        """As `poll`, after waiting for the end at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: child.number in self._exits or self._gone, timeout_s)
            found = self._exits.get(child.number)
        if found is None and self._gone:
            raise self._dead()
        return found

    def wait_any(self, timeout_s: float) -> None:
        """Wait until any process of the run ends, at most so long."""
        with self._changed:
            self._changed.wait(timeout_s)

    def orphan(self, pid: int) -> Exit | None:
        """How a process that came to the warden because its parent had died ended (wall time unknown: 0), else None."""
        with self._changed:
            return self._orphans.get(pid)

    def signal(self, child: Child, signum: int) -> bool:
        """Send a signal; False when the process has ended."""
        return bool(self._ask("signal", pid=child.pid, start=child.start, signum=int(signum))["sent"])

    def kill_all(self) -> tuple[str, ...]:
        """End every process of the run, daemons and stopped ones too, and remove their shared memory; what resisted, in words.

        The confinement stays open for the next processes.
        """
        return tuple(self._ask("kill_all")["problems"])

    def undo(self, kind: str, **data: Any) -> int:
        """Announce something *before* making it, so that it is undone whatever happens; a ticket for `revert`.

        Kinds and their fields are in `dtprobe.undo`. Raises DtprobeError for what exists already (it is not ours to remove).
        """
        return int(self._ask("undo", kind=kind, data=data)["ticket"])

    def revert(self, ticket: int) -> None:
        """Undo one announced thing now. Raises DtprobeError when that fails; it is tried again at the end."""
        self._ask("revert", ticket=ticket)

    def close(self) -> tuple[str, ...]:
        """End all processes, undo the ledger last entry first, remove the temporary folder; what resisted, in words.

        Returns within 3 s. What resists (a process in an uninterruptible call, say) the warden goes on trying by itself, and
        the journal then keeps for `dtprobe doctor --leftovers`. Closed again, it does nothing.
        """
        if self._closed:
            return tuple(self.problems)
        self._closed = True
        give_up = time.monotonic() + CLOSE_S
        try:
            self._warden.send_signal(signal.SIGCONT)  # a stopped warden can end nothing
            number = self._say("close")
            with self._changed:
                self._changed.wait_for(lambda: number in self._answers or self._gone, give_up - time.monotonic())
                answer = self._answers.pop(number, None)
        except DtprobeError:
            answer = None
        if answer is not None:
            self.problems += answer["problems"]
        elif not self._gone:
            self.problems.append(f"the warden {self._warden.pid} has not finished; it goes on by itself")
        try:
            self._warden.wait(max(0.05, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass  # it is busy with what resists; `problems` names it
        else:
            self._clean_up_for_warden()
        self._channel.shutdown(socket.SHUT_RDWR)
        self._reader.join(timeout=0.5)
        self._channel.close()
        return tuple(self.problems)

    def _clean_up_for_warden(self) -> None:
        """After a warden that was killed: its journal is still there."""
        from dtprobe import leftovers

        self.problems += leftovers.take_over(self.journal, self._warden.pid)

    def _await_ready(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready is not None or self._gone, ANSWER_S)
            ready = self._ready
        if ready is None:
            raise DtprobeError(f"the warden of run {self.run_id} did not start", f"try: {sys.executable} -I -S -c pass")
        if "error" in ready:
            raise DtprobeError(*ready["error"])
        self.scratch = Path(ready["scratch"])
        self.cgroup = Path(ready["cgroup"]) if ready["cgroup"] else Unavailable(*ready["reason"])
        if ready["problem"]:
            self.problems.append(ready["problem"])

    def _say(self, verb: str, **fields: Any) -> int:
        with self._sending:
            self._next += 1
            number = self._next
            try:
                self._channel.sendall((json.dumps({"id": number, "do": verb, **fields}) + "\n").encode())
            except OSError as error:
                raise self._dead() from error
        return number

    def _ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        if self._closed:
            raise DtprobeError(f"run {self.run_id} is closed: cannot {verb}")
        number = self._say(verb, **fields)
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers or self._gone, ANSWER_S)
            answer = self._answers.pop(number, None)
        if answer is None:
            raise self._dead()
        if "error" in answer:
            raise DtprobeError(answer["error"])
        return answer

    def _dead(self) -> DtprobeError:
        what = "died" if self._gone else "does not answer"
        return DtprobeError(
            f"the warden {self._warden.pid} of run {self.run_id} {what}",
            "see `dtprobe doctor --leftovers --clean`, and run again",
        )

    def _read(self) -> None:
        """The reader thread: answers and ends of processes, until the warden is gone."""
        buffer = b""
        while True:
            try:
                received = self._channel.recv(1 << 16)
            except OSError:
                received = b""
            *lines, buffer = (buffer + received).split(b"\n")
            with self._changed:
                for line in lines:
                    self._take(json.loads(line))
                self._gone = not received
                self._changed.notify_all()
            if not received:
                return

    def _take(self, message: dict[str, Any]) -> None:
        if "to" in message:
            self._answers[message["to"]] = message
        elif "ended" in message:
            self._exits[message["ended"]] = _exit(message, message["wall_s"])
        elif "orphan" in message:
            self._orphans[message["orphan"]["pid"]] = _exit(message["orphan"], 0.0)
        elif "crash" in message:
            self.problems.append(f"the warden {self._warden.pid} failed: {message['crash']}")
        else:
            self._ready = message


def _exit(message: Mapping[str, Any], wall_s: float) -> Exit:
    return Exit(message["code"], message["signal"], wall_s, message["cpu_s"])
