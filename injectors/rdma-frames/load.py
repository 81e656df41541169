"""The helper of `load`: `ib_write_bw` from a device to itself, for a bounded time, once the fault begins. CONFIG is the only argument."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from dtprobe.inject.helper import Log, listen

LISTENS_S = 60.0
GRACE_S = 30.0
LOOK_S = 0.1
FIGURES = re.compile(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", re.MULTILINE)
"""perftest's line of figures: bytes, iterations, peak, average (Gbit/s with --report_gbits), messages."""


def command(part: dict[str, Any]) -> list[str]:
    """perftest 4.5's words. The limit is by software: not every device limits a queue pair itself."""
    words = [f"--ib-dev={part['device']}", f"--duration={part['seconds']}", f"--port={part['port']}", "--report_gbits"]
    if part["gbits"] is not None:
        words += [f"--rate_limit={part['gbits']:g}", "--rate_limit_type=SW"]
    return ["ib_write_bw", *words]


def start(argv: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def listens(server: subprocess.Popen[str], port: int) -> bool:
    with suppress(psutil.Error):
        found = psutil.Process(server.pid).net_connections("tcp")
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in found)
    return False


def load(part: dict[str, Any], log: Log, commands: queue.Queue[dict[str, Any]]) -> bool:
    """One load; whether `stop` came meanwhile. What goes wrong is said in the firing, which then has no figures."""

    def stopped() -> bool:
        with suppress(queue.Empty):
            return commands.get(timeout=LOOK_S)["do"] == "stop"
        return False

    argv = command(part)
    server = start(argv)
    running, client = [server], None
    give_up = time.monotonic() + LISTENS_S
    while (
        not (stop := stopped()) and server.poll() is None and not listens(server, part["port"]) and time.monotonic() < give_up
    ):
        pass
    if not stop and listens(server, part["port"]):
        number = log.fired(part["index"], None, call="ib_write_bw", detail=" ".join(argv))
        client = start([*argv, "127.0.0.1"])
        running.append(client)
        give_up = time.monotonic() + part["seconds"] + GRACE_S
        while not (stop := stopped()) and client.poll() is None and time.monotonic() < give_up:
            pass
    for one in running:
        if one.poll() is None and (stop or client is None or client.poll() is None):
            one.terminate()
    texts = [one.communicate(timeout=GRACE_S)[0] for one in running]
    words = " ".join(texts[-1].split())[-300:]
    if client is None:
        if not stop:
            log.say("refused", index=part["index"], detail=f"ib_write_bw did not listen: {words}")
        return stop
    figures = FIGURES.search(texts[-1])
    log.ended(
        number, f"{' '.join(argv)}: {figures[1]} Gbit/s on average" if figures else f"{' '.join(argv)}: no figures: {words}"
    )
    return stop


def main(file: str) -> None:
    (part,) = json.loads(Path(file).read_text(encoding="utf-8"))["parts"]
    log = Log()
    commands: queue.Queue[dict[str, Any]] = queue.Queue()
    listen(commands.put)
    log.say("ready")
    begun = part["on"] or commands.get()["do"] == "begin"
    if begun and load(part, log, commands):
        return
    while begun and commands.get()["do"] != "stop":
        pass


if __name__ == "__main__":
    main(sys.argv[1])
