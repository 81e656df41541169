"""What is taken of the host at a hang, besides the ranks' own evidence: connections, the kernel's log, GPUs, NCCL.

Each source gives a file in the bundle's folder or a reason why there is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from dtprobe.errors import Unavailable
from dtprobe.probes import ras, sockets
from dtprobe.probes.answers import output

TIMEOUT_S = 8.0
KEPT_BYTES = 256 * 1024
"""The end of the kernel's log."""
_STAMP = re.compile(r"\[ *(\d+\.\d+)\]")


def take(folder: Path, environ: Mapping[str, str], since_s: float = 0.0) -> dict[str, Unavailable]:
    """Write `sockets.txt`, `kernel.txt`, `gpu.txt`, `nccl-ras.txt` into `folder`; the sources that gave nothing, with the reason.

    Of the kernel's log only what came `since_s`, seconds since boot: what it said of other jobs before is no evidence for this one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sources: Mapping[str, Callable[[Mapping[str, str]], str | Unavailable]] = {
        "sockets": sockets.listing,
        "kernel": lambda given: _kernel(given, since_s),
        "gpu": _gpu,
        "nccl-ras": ras.ask,
    }
    missing = {}
    for name, source in sources.items():
        answer = source(environ)
        if isinstance(answer, Unavailable):
            missing[name] = answer
        else:
            (folder / f"{name}.txt").write_text(answer, encoding="utf-8", errors="replace")
    return missing


def _kernel(environ: Mapping[str, str], since_s: float) -> str | Unavailable:
    text = output(("dmesg",), environ, package="util-linux", timeout_s=TIMEOUT_S)
    if isinstance(text, Unavailable):
        return text
    lines = text.splitlines(keepends=True)
    stamps = [float(found[1]) if (found := _STAMP.match(line)) else None for line in lines]
    first = next((at for at, stamp in enumerate(stamps) if stamp is not None and stamp >= since_s), len(lines))
    return "".join(lines[first:])[-KEPT_BYTES:]


def _gpu(environ: Mapping[str, str]) -> str | Unavailable:
    return output(("nvidia-smi", "-q"), environ, timeout_s=TIMEOUT_S)
