"""The shim under the compiler's sanitizers: many threads, communicators that come and go, faults, and plans of any content."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest

from dtprobe.readers.nccl_ring import read_nccl_header

pytestmark = [pytest.mark.needs("cc"), pytest.mark.nightly]

HERE = Path(__file__).resolve().parent
FAKE = HERE.parents[2] / "injectors" / "nccl" / "testing" / "fakenccl.c"
LIMIT_S = 240
PLAN = """dtprobe-nccl-plan 1
fault action=delay call=ncclAllReduce rank=1 every=50 hold_ns=1000000 label=nccl:delay,rank=1
fault action=op call=ncclAllReduce rank=0 ppm=100000 seed=3 label=nccl:op,rank=0
fault action=async call=ncclAllReduce nth=100+200 result=6 comm_index=0 label=nccl:async_error
"""


@pytest.fixture(scope="module", params=["thread", "address,undefined"])
def stress(request, module, tmp_path_factory):
    """stress.c, the shim and the double, all of them instrumented; linked, since a preloaded sanitizer must come first."""
    folder = tmp_path_factory.mktemp("sanitized")
    cc = str(module.build.compiler())
    flags = ["-std=gnu11", "-O1", "-g", f"-fsanitize={request.param}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    shared = [*flags, "-fPIC", "-shared"]
    hidden = "-fvisibility=hidden"

    def cc_run(*words):
        return subprocess.run([cc, *map(str, words)], capture_output=True, text=True, timeout=LIMIT_S, check=False)

    (folder / "probe.c").write_text("int main(void) { return 0; }\n")
    compiled = cc_run(*flags, "-o", folder / "probe", folder / "probe.c")
    if compiled.returncode or subprocess.run([folder / "probe"], check=False, timeout=LIMIT_S).returncode:
        pytest.skip(f"no -fsanitize={request.param} here: apt-get install gcc (with libasan, libtsan, libubsan)")
    done = [
        cc_run(*shared, hidden, "-o", folder / "libshim.so", *module.build.SHIM_SOURCES, "-ldl", "-lpthread"),
        cc_run(*shared, "-Wl,-soname,libnccl.so.2", "-o", folder / "libnccl.so.2", FAKE),
        cc_run(
            *(*flags, "-o", folder / "stress", HERE / "stress.c", f"-L{folder}", "-Wl,--no-as-needed", "-lshim"),
            *("-l:libnccl.so.2", "-lpthread", f"-Wl,-rpath,{folder}"),
        ),
    ]
    assert not [one.stderr for one in done if one.returncode]
    return folder / "stress"


def run(stress, plan, folder, turns):
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LD_PRELOAD", "SLURM_PROCID")}
    environ = kept | {
        "DTPROBE_NCCL_PLAN": str(plan),
        "DTPROBE_NCCL_FOLDER": str(folder),
        "TSAN_OPTIONS": "die_after_fork=0",
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    return subprocess.run([stress, str(turns)], env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_threads_and_faults_race_nowhere_and_touch_nothing_foreign(stress, tmp_path):
    plan = tmp_path / "plan"
    plan.write_text(PLAN)
    done = run(stress, plan, tmp_path, 1000)
    assert (done.returncode, done.stderr) == (0, "")
    fired = {path.parent.name: read_nccl_header(path).fired for path in tmp_path.rglob("nccl-*.ring")}
    assert fired["rank1"]["nccl:delay,rank=1"] == 1020 // 50
    assert all(one["nccl:async_error"] == 2 for one in fired.values())


def test_plans_of_any_content_are_read_or_refused(stress, tmp_path):
    chance = random.Random(1)
    for turn in range(120):
        raw = bytearray(PLAN.encode())
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(raw))
            piece = chance.choice(
                [b"", b"+", b"=", b" ", b"\n", b"9" * 30, b"label=", bytes([chance.randrange(256)]), b"x" * 5000]
            )
            raw[at : at + chance.randint(0, 12)] = piece
        plan = tmp_path / f"plan-{turn}"
        plan.write_bytes(bytes(raw))
        done = run(stress, plan, tmp_path, 0)
        assert (done.returncode, done.stderr) == (0, ""), bytes(raw)
