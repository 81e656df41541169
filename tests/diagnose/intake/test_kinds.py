"""What a file is, by what is in it."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zipfile

import pytest

from dtprobe.diagnose.intake.kinds import kind_of


def _tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a"))
    return out.getvalue()


def _zip(name: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, "x")
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "empty"),
        (b"step 1 loss 2.0\n", "text"),
        (b"[2025-01-01 00:00:00] step 1\n", "text"),
        (b"[0] [01/01/2025-00:00:00] step 1\n", "text"),
        (b"{'loss': 2.0}\n{'loss': 1.9}\n", "text"),
        (b'{"t": 1}\n{"t": 2}\n', "jsonl"),
        (b'{\n "a": 1\n}\n', "json"),
        (b'[{"a": 1}]', "json"),
        (b'{"version": "2.10", "entries": [], "pg_config": {}}', "flight-recorder"),
        (pickle.dumps({"entries": []}), "flight-recorder"),
        (b'{"schemaVersion": 1, "deviceProperties": [], "traceEvents": []}', "kineto"),
        (b'[{"pid": 1, "thread_id": 2, "frames": []}]', "pyspy-json"),
        (b'{"nccl_version": "2.28.9", "communicators_count": 1, "communicators": []}', "ras"),
        (b"NCCL version 2.28.9 compiled with CUDA 13.0\n\nJob summary\n===========\n", "ras"),
        (b"n1:10:11 [0] NCCL INFO Bootstrap: Using eth0\nn1:10:11 [0] NCCL INFO cudaDriverVersion 13000\n", "nccl-log"),
        (b'Process 71: python train.py\nPython v3.12.3\n\nThread 71 (idle): "MainThread"\n', "stacks"),
        (b'Current thread 0x00007f1 (most recent call first):\n  File "a.py", line 1 in f\n', "stacks"),
        (b"Thread 1 (Thread 0x7f1 (LWP 71)):\n#0  0x00007f1 in epoll_wait () from libc.so.6\n", "stacks"),
        (b'10:41:02.118733 write(7, "x", 1) = 1 <0.1>\n10:41:03.118733 read(7, "x", 1) = 1 <0.1>\n', "strace"),
        (b"[pid  12] futex(0x1, FUTEX_WAIT <unfinished ...>\n", "strace"),
        (b"[Fri Mar  5 21:14:09 2021] NVRM: Xid\n[Fri Mar  5 21:14:09 2021] usb 1\n", "kernel-log"),
        (b"[   12.345678] NVRM: Xid\n[   12.345679] usb 1\n", "kernel-log"),
        (b"Jan  2 10:47:01 n1 kernel: NVRM: Xid\n", "kernel-log"),
        (b"| NVIDIA-SMI 580.1   Driver Version: 580.1 |\n", "nvidia-smi"),
        (b"PAR1\0\0", "parquet"),
        (b"SQLite format 3\0", "sqlite"),
        (b"\x7fELF\2\1\1\0", "elf"),
        (gzip.compress(b"x", mtime=0), "gzip"),
        (_tar(), "tar"),
        (_zip("a.log"), "zip"),
        (_zip("model/data.pkl"), "weights"),
        (_zip("w.npy"), "weights"),
        (b"\0\1\2\3" * 100, "binary"),
        (b"a line of a program, quite long\nanother line of a program, long\n\0\0\0\0", "text"),
        ("[rank1]: boom\n".encode("utf-16"), "text"),
        ("Überlauf: Speicher voll\n".encode("latin-1"), "text"),
    ],
)
def test_the_kind_is_told_by_the_content(content: bytes, kind: str) -> None:
    assert kind_of(content, len(content)) == kind
