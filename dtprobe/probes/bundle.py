"""What is taken of the host at a hang, besides the ranks' own evidence: connections, the kernel's log, GPUs, NCCL.

Each source gives a file in the bundle's folder or a reason why there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from dtprobe.errors import Unavailable
from dtprobe.probes import ras, sockets
from dtprobe.probes.answers import output

TIMEOUT_S = 8.0
KEPT_BYTES = 256 * 1024
"""The end of the kernel's log."""


def take(folder: Path, environ: Mapping[str, str]) -> dict[str, Unavailable]:
    """Write `sockets.txt`, `kernel.txt`, `gpu.txt`, `nccl-ras.txt` into `folder`; the sources that gave nothing, with the reason."""
    folder.mkdir(parents=True, exist_ok=True)
    sources: Mapping[str, Callable[[Mapping[str, str]], str | Unavailable]] = {
        "sockets": sockets.listing,
        "kernel": _kernel,
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


def _kernel(environ: Mapping[str, str]) -> str | Unavailable:
    text = output(("dmesg",), environ, package="util-linux", timeout_s=TIMEOUT_S)
    return text if isinstance(text, Unavailable) else text[-KEPT_BYTES:]


def _gpu(environ: Mapping[str, str]) -> str | Unavailable:
    return output(("nvidia-smi", "-q"), environ, timeout_s=TIMEOUT_S)
