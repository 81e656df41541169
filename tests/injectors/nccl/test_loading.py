"""However libnccl came into the process the shim finds the right one; where it is passed by, it says so."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtprobe.readers.nccl_ring import read_nccl_header, read_nccl_ring

pytestmark = pytest.mark.needs("cc")

LIMIT_S = 60
HERE = Path(__file__).resolve().parent


def run(command, folder, shim, **variables):
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LD_PRELOAD", "SLURM_PROCID")}
    return subprocess.run(
        command,
        env=kept | {"LD_PRELOAD": str(shim), "DTPROBE_NCCL_FOLDER": str(folder)} | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def ring_of(folder):
    (path,) = [*folder.glob("nccl-*.ring"), *folder.glob("rank*/nccl-*.ring")]
    return path


def problems(folder):
    return "".join(path.read_text() for path in folder.rglob("nccl-*.jsonl"))


@pytest.fixture(scope="module")
def linked(module, libraries, tmp_path_factory):
    """linked.c as a program and as a shared object, both bound to the double by RPATH, lazily or at once."""
    folder = tmp_path_factory.mktemp("linked")
    cc = str(module.build.compiler())
    rpath = f"-Wl,-rpath,{libraries.fake.parent}"

    def made(name, *flags):
        command = [cc, "-Wall", "-Werror", *flags, "-o", folder / name, HERE / "linked.c", libraries.fake, rpath]
        subprocess.run(command, check=True, timeout=LIMIT_S)
        return folder / name

    return {
        "lazy": made("lazy", "-Wl,-z,lazy"),
        "at once": made("now", "-Wl,-z,now"),
        "object": made("object.so", "-shared", "-fPIC"),
    }


@pytest.mark.parametrize("binding", ["lazy", "at once"])
def test_a_linked_program_is_interposed(linked, libraries, tmp_path, binding):
    done = run([linked[binding]], tmp_path, libraries.shim)
    assert done.stdout == "0 0 0 0 5\n", done.stderr
    assert read_nccl_ring(ring_of(tmp_path))["call"].tolist()[1:] == ["ncclCommInitRank", "ncclAllReduce", "ncclCommDestroy"]


def test_an_object_that_is_opened_later_and_finds_nccl_by_rpath_is_interposed(linked, libraries, tmp_path):
    program = f"import ctypes; ctypes.CDLL({str(linked['object'])!r}).run()"
    done = run([sys.executable, "-c", program], tmp_path, libraries.shim)
    assert done.stdout == "0 0 0 0 5\n", done.stderr
    one = read_nccl_header(ring_of(tmp_path))
    assert Path(one.library).resolve() == libraries.fake and one.called["ncclAllReduce"] == 1


def test_of_two_copies_the_caller_s_own_is_used_and_both_are_mentioned(module, linked, libraries, tmp_path):
    decoy = module.build.library(
        "libnccl.so.99",
        (HERE.parents[2] / "injectors/nccl/testing/fakenccl.c",),
        flags=("-DFAKE_VERSION=99", "-Wl,-soname,libnccl.so.99"),
        folder=tmp_path,
    )
    program = f"import ctypes; ctypes.CDLL({str(decoy)!r}, ctypes.RTLD_GLOBAL); ctypes.CDLL({str(linked['object'])!r}).run()"
    out = tmp_path / "out"
    out.mkdir()
    done = run([sys.executable, "-c", program], out, libraries.shim)
    assert done.stdout == "0 0 0 0 5\n", done.stderr
    one = read_nccl_header(ring_of(out))
    assert (Path(one.library).resolve(), one.nccl_version) == (libraries.fake, 22809)
    assert "2 copies of libnccl are loaded" in problems(out)


def test_calls_through_the_library_s_own_handle_pass_by_and_this_is_reported(libraries, tmp_path):
    program = f"import ctypes; ctypes.CDLL({str(libraries.fake)!r}).ncclGroupStart()"
    assert run([sys.executable, "-c", program], tmp_path, libraries.shim).returncode == 0
    assert list(tmp_path.glob("*.ring")) == []
    assert "is loaded but was never called through the shim" in problems(tmp_path)


def test_a_program_without_nccl_leaves_no_trace(libraries, tmp_path):
    assert run(["/bin/sh", "-c", "exit 3"], tmp_path, libraries.shim).returncode == 3
    assert list(tmp_path.iterdir()) == []


def test_a_call_that_no_loaded_library_has_fails_and_says_so(libraries, tmp_path):
    program = "import ctypes; print(ctypes.CDLL(None).ncclGroupStart())"
    done = run([sys.executable, "-c", program], tmp_path, libraries.shim)
    assert done.stdout == "5\n"
    assert "no loaded libnccl has it" in problems(tmp_path)


def test_symbols_that_newer_libraries_add_fail_cleanly_on_an_older_one(libraries, tmp_path):
    program = f"import ctypes; ctypes.CDLL({str(libraries.fake)!r}); print(ctypes.CDLL(None).ncclCommRevoke(None, 0))"
    assert run([sys.executable, "-c", program], tmp_path, libraries.shim).stdout == "5\n"
    assert "ncclCommRevoke was called" in problems(tmp_path)


UNCOVERED = {
    # asks or tells about a communicator, moves nothing
    "ncclCommCount", "ncclCommCuDevice", "ncclCommUserRank", "ncclCommMemStats", "ncclCommQueryProperties", "ncclCommGetUniqueId",
    "ncclGetVersion", "ncclGetErrorString", "ncclGetLastError", "ncclGroupSimulateEnd", "ncclWinGetUserPtr",
    # memory of this process alone
    "ncclMemAlloc", "ncclMemFree", "ncclCommRegister", "ncclCommDeregister", "ncclCommWindowDeregister",
    "ncclCommSuspend", "ncclCommResume",
    # settings
    "ncclRedOpCreatePreMulSum", "ncclRedOpDestroy", "ncclSetEncryption", "ncclResetDebugInit", "ncclResetDebugInitInternal",
    # communication that a kernel starts on the device: no host call to stand in front of
    "ncclDevCommCreate", "ncclDevCommDestroy",
}  # fmt: skip
UNCOVERED_FAMILIES = re.compile(r"ncclParam|ncclTeam|ncclGin|ncclLLA2A|ncclLsaBarrier|ncclGet(Cft|Lsa|Multimem|Peer)")


def wheel() -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    named = os.environ.get("DTPROBE_TEST_LIBNCCL")
    found = [Path(named)] if named else [path for root in roots for path in root.glob("nccl/lib/libnccl.so.2")]
    return found[0] if found else None


needs_wheel = pytest.mark.skipif(
    wheel() is None, reason="no NCCL here: pip install nvidia-nccl-cu13 (300 MB), or DTPROBE_TEST_LIBNCCL=/path/to/libnccl.so.2"
)


@needs_wheel
def test_every_function_of_the_real_library_is_covered_or_left_out_on_purpose(module):
    path = wheel()
    exported = {name.decode() for name in re.findall(rb"\0(nccl[A-Z]\w+)(?=\0)", path.read_bytes())}
    library = ctypes.CDLL(str(path))
    exported = {name for name in exported if hasattr(library, name)}
    assert "ncclAllReduce" in exported
    left = {name for name in exported - set(module.calls()) - UNCOVERED if not UNCOVERED_FAMILIES.match(name)}
    assert left == set()


@needs_wheel
def test_the_real_library_is_called_through_the_shim_and_can_be_made_to_fail(libraries, tmp_path):
    """Without a GPU: a unique id is given, a communicator cannot be made; both calls go through, the second planted once."""
    program = f"""if True:
        import ctypes
        ctypes.CDLL({str(wheel())!r})
        nccl = ctypes.CDLL(None)
        class Id(ctypes.Structure):
            _fields_ = (("bytes", ctypes.c_char * 128),)
        one, comm = Id(), ctypes.c_void_p()
        print(nccl.ncclGetUniqueId(ctypes.byref(one)), nccl.ncclGetUniqueId(ctypes.byref(one)))
    """
    plan = tmp_path / "plan"
    plan.write_text("dtprobe-nccl-plan 1\nfault action=fail call=ncclGetUniqueId nth=2 result=3 label=planted\n")
    out = tmp_path / "out"
    out.mkdir()
    done = run([sys.executable, "-c", program], out, libraries.shim, DTPROBE_NCCL_PLAN=str(plan), NCCL_SOCKET_IFNAME="lo")
    assert done.stdout == "0 3\n", done.stderr
    one = read_nccl_header(ring_of(out))
    assert Path(one.library) == wheel() and one.nccl_version > 20000
    assert read_nccl_ring(ring_of(out))["result"].tolist() == ["ncclSuccess", "ncclInternalError"]
