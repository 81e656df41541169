"""Rounds in which two contenders try to be the one that sets up a folder; exactly one should win each.

Modes: `turns` lets the shell pattern's contenders come one after the other, `race` lets them come together, `exclusive`
does too, with the claim of the framework's file store in place of the shell's look-then-create.

By hand: `python claim.py --mode race`
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from dtprobe import record

CONTENDERS = 2


class Contender(Protocol):
    """Tries to claim one folder at a time: `ask` does not wait, `answer` says whether it won."""

    def ask(self, folder: Path) -> None: ...

    def answer(self) -> bool: ...

    def close(self) -> None: ...


class Shell:
    """A shell that runs `claim.sh`."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("claim.sh")
        self._process = subprocess.Popen(["/bin/sh", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin and self._process.stdout
        self._ask, self._said = self._process.stdin, self._process.stdout

    def ask(self, folder: Path) -> None:
        self._ask.write(f"{folder}\n")
        self._ask.flush()

    def answer(self) -> bool:
        return self._said.readline().strip() == "won"

    def close(self) -> None:
        self._ask.close()
        self._process.wait(5)
        self._said.close()


class Exclusive:
    """A process that claims through the framework: whoever makes a run's store is its rank 0, all others are refused."""

    def __init__(self) -> None:
        import dtprobe.framework.filestore  # noqa: F401  before the fork: the children need not import torch again

        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=self._claims, args=(theirs,))
        self._process.start()
        theirs.close()

    @staticmethod
    def _claims(pipe: Connection) -> None:
        from dtprobe.framework.filestore import SafeFileStore, StaleStore

        while (folder := pipe.recv()) is not None:
            try:
                SafeFileStore(folder, run="round", rank=0, world_size=CONTENDERS)
                pipe.send(True)
            except StaleStore:
                pipe.send(False)

    def ask(self, folder: Path) -> None:
        self._pipe.send(folder)

    def answer(self) -> bool:
        return bool(self._pipe.recv())

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("turns", "race", "exclusive"), default="turns")
    parser.add_argument("--rounds", type=int, default=150)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="claims-") as shared:
        compete(args.mode, args.rounds, Path(shared))


def compete(mode: str, rounds: int, shared: Path) -> None:
    """Run the rounds, each over a folder of its own in `shared`, and record how many won each."""
    contenders: list[Contender] = [Exclusive() if mode == "exclusive" else Shell() for _ in range(CONTENDERS)]
    began = time.perf_counter()
    for number in range(rounds):
        folder = shared / str(number)
        if mode == "turns":
            won = []
            for one in contenders:
                one.ask(folder)
                won.append(one.answer())
        else:
            for one in contenders:
                one.ask(folder)
            won = [one.answer() for one in contenders]
        record("round", number=number, winners=sum(won))
    record("work", duration_s=time.perf_counter() - began)
    for one in contenders:
        one.close()


if __name__ == "__main__":
    main()
