"""What happens to files while the job runs, and which ranks hold them open: `inotify.txt` in the arm run's folder.

A line `<seconds since the epoch> <path> <EVENTS> <holders>`, as `inotifywait --timefmt %s --format '%T %w%f %e'` writes it with
one word more: a JSON list of `[pid, "command", descriptor]` of the ranks and their children that had the file open just
then (what `fuser` shows), or `-` where nobody looked. The kernel gives no times: an event is up to the interval older. Nor
are all holders looked up, and what the kernel's queue could not keep shows as Q_OVERFLOW.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil

from dtprobe import doctor
from dtprobe.clock import Clock, SystemClock
from dtprobe.errors import Unavailable, UsageError
from dtprobe.probes import RankProcess, Recorded, Recorder, Where
from dtprobe.probes.pacing import Sampler

SHARE = 0.01
HOLDERS_EVERY_S = 0.05
LONGEST = 200_000
"""Lines; a file store that spins makes a hundred thousand events a second."""

_LOOKED_UP = ("IN_CREATE", "IN_OPEN", "IN_MODIFY", "IN_CLOSE_WRITE", "IN_DELETE", "IN_MOVED_TO")


@dataclass(frozen=True, kw_only=True)
class Inotify:
    """Watches `paths` and all folders below. `{scratch}` stands for the run's temporary folder (the ranks' TMPDIR),
    `{folder}` for the arm run's.

    Raises UsageError for another placeholder.
    """

    name: ClassVar[str] = "inotify"
    heavy: ClassVar[bool] = False

    paths: tuple[str, ...] = ("{scratch}",)
    interval_s: float = 0.02

    def __post_init__(self) -> None:
        for path in self.paths:
            try:
                path.format(scratch="", folder="")
            except (KeyError, IndexError, ValueError) as error:
                raise UsageError(
                    f"inotify: path {path!r} has an unknown placeholder", "there are {scratch} and {folder}"
                ) from error

    def probe(self) -> Unavailable | None:
        # pyinotify imports asyncore, which Python 3.12 no longer has.
        without_asyncore = doctor.capability("python>=3.12") is None and doctor.capability("package:pyasyncore")
        return doctor.capability("inotify") or without_asyncore or None

    def recorder(self, where: Where) -> InotifyRecorder:
        return InotifyRecorder(self, where)


class InotifyRecorder(Recorder):
    def __init__(self, config: Inotify, where: Where, clock: Clock | None = None) -> None:
        self._where = where
        self._clock = clock or SystemClock()
        self._paths = [path.format(scratch=where.scratch, folder=where.folder) for path in config.paths]
        self._file = where.folder / "inotify.txt"
        self._problems: list[str] = []
        self._lines = 0
        self._dropped = 0
        self._holders: dict[str, list[list[object]]] = {}
        self._looked_at = float("-inf")
        self._manager: Any = None
        self._notifier: Any = None
        self._sampler = Sampler("inotify", self._look, interval_s=config.interval_s, share=SHARE, clock=self._clock)

    def start(self, processes: Sequence[RankProcess]) -> None:
        import pyinotify  # here, since it is an optional package and warns when imported

        pyinotify.log.setLevel("CRITICAL")  # it prints what add_watch also returns: a folder that has gone again

        mask = pyinotify.ALL_EVENTS & ~pyinotify.IN_ACCESS
        self._manager = pyinotify.WatchManager()
        self._notifier = pyinotify.Notifier(self._manager, default_proc_fun=self._event, timeout=0)
        self._out = self._file.open("a", encoding="utf-8", errors="surrogateescape")
        for path in self._paths:
            Path(path).mkdir(parents=True, exist_ok=True)
            made = self._manager.add_watch(path, mask, rec=True, auto_add=True)
            refused = [name for name, number in made.items() if number < 0]
            if refused:
                self._problems.append(f"{refused[0]} cannot be watched: see sysctl fs.inotify.max_user_watches")
        self._sampler.start()

    def stop(self) -> Recorded:
        if self._sampler.stop() and self._notifier is not None:
            self._look()
            self._notifier.stop()
            self._out.close()
        if self._dropped:
            self._problems.append(f"{self._dropped} events after the first {LONGEST} were counted only")
        return Recorded(
            files=(self._file,) if self._lines else (),
            cpu_s=self._sampler.cpu_s,
            problems=(*self._problems, *self._sampler.problems),
        )

    def _look(self) -> float:
        if self._notifier.check_events(timeout=0):
            self._notifier.read_events()
            self._notifier.process_events()
            self._out.flush()
        return 0.0

    def _event(self, event: Any) -> None:
        if event.pathname == str(self._file):
            return
        if self._lines >= LONGEST:
            self._dropped += 1
            return
        names = event.maskname.split("|")
        holders = "-"
        if any(name in _LOOKED_UP for name in names) and not event.dir:
            holders = self._holders_of(event.pathname)
        now_ns = self._clock.now_ns()
        words = ",".join(name.removeprefix("IN_") for name in names)
        # A line break in a name would make two lines of one.
        path = event.pathname.replace("\n", "\\n")
        self._out.write(f"{now_ns // 10**9}.{now_ns % 10**9:09d} {path} {words} {holders}\n")
        self._lines += 1

    def _holders_of(self, path: str) -> str:
        """Who has the path open; `-` where the last look is too long ago to say, and too short ago to look again."""
        now = self._clock.monotonic()
        if now - self._looked_at >= HOLDERS_EVERY_S:
            self._looked_at = now
            self._holders = self._open_files()
        elif path not in self._holders:
            return "-"
        return json.dumps(self._holders.get(path, []), separators=(",", ":")).replace(" ", "\\u0020")

    def _open_files(self) -> dict[str, list[list[object]]]:
        """Path -> holders, over the ranks and their children."""
        found: dict[str, list[list[object]]] = {}
        for rank in self._where.processes():
            try:
                top = psutil.Process(rank.pid)
                family = [top, *top.children(recursive=True)]
            except psutil.Error:
                continue
            for process in family:
                try:
                    name, files = process.name(), process.open_files()
                except psutil.Error:
                    continue
                for file in files:
                    found.setdefault(file.path, []).append([process.pid, name, file.fd])
        return found
