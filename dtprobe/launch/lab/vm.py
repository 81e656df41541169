"""One boot of the lab VM for one program, with certain end."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import dtprobe
from dtprobe.errors import DtprobeError, UsageError
from dtprobe.launch import RANK_FOLDER
from dtprobe.launch.lab.image import Image, ensure
from dtprobe.launch.lab.leash import leashed

EMULATOR = "qemu-system-x86_64"
START_S = 120.0
"""How much longer than its job a VM may live: it boots in 4 s on a quiet machine."""

BOOT_WORDS = "console=ttyS0 panic=-1 quiet mitigations=off tsc=reliable no_timer_check nokaslr cryptomgr.notests rcupdate.rcu_expedited=1"
"""What the kernel is told: to reboot (which ends QEMU) when it panics, and to leave out self-tests that emulation makes slow."""

HARNESS = "/harness"
WORKER = "/worker"
JOB = "/job"
PASSED_ON = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
TIMED_OUT = 124


@dataclass(frozen=True)
class Share:
    """A folder of the host, at a place in the VM; read-only there unless `writable`."""

    folder: Path
    at: str
    writable: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the VM is for: one program as root. `env` is added to PATH, HOME and LC_ALL.

    One core is the default: with two, packets overtake each other, and RDMA's counters move although nothing was lost.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/root"
    shares: tuple[Share, ...] = ()
    timeout_s: float = 120.0
    cores: int = 1
    memory_mib: int = 1024


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the program ended. `exit_code` is negative for a signal; `boot_s` is the guest's uptime when it began.

    `out` has `stdout.log`, `stderr.log`, the VM's `console.log` and what the program left in `/job`.
    """

    out: Path
    exit_code: int
    timed_out: bool
    boot_s: float
    ran_s: float
    wall_s: float

    @property
    def status(self) -> int:
        """As a shell says it: 124 at the time limit, 128 and more for a signal."""
        if self.timed_out:
            return TIMED_OUT
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code


def run(job: Job, *, out: Path, environ: Mapping[str, str], image: Image | None = None) -> Ended:
    """Boot, run the job, switch off. `out` is made for it, and must be new or empty.

    The calling thread holds the VM: when it, or its process, ends by whatever death, the kernel kills the VM.
    Raises UsageError for a share that is no folder, DtprobeError where the VM does not come to its job or dies in it.
    """
    if shutil.which(EMULATOR, path=environ.get("PATH")) is None:
        raise DtprobeError(f"{EMULATOR} is not installed", "apt-get install qemu-system-x86 seabios")
    image = image or ensure(environ)
    shares = (*job.shares, Share(Path(dtprobe.__file__).resolve().parent, f"{HARNESS}/dtprobe"))
    for share in shares:
        if not share.folder.is_dir():
            raise UsageError(f"the share {share.folder} is no folder", "give one that exists")
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise UsageError(f"the folder {out} is not empty", "give a new one: what a job leaves goes there")
    told = {
        "argv": list(job.argv),
        "cwd": job.cwd,
        "env": {"PYTHONPATH": HARNESS, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", **job.env},
        "timeout_s": job.timeout_s,
        "shares": [(f"share{number}", share.at, share.writable) for number, share in enumerate(shares)],
    }
    (out / "job.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    began = time.monotonic()
    with (out / "qemu.log").open("wb") as log:
        machine = subprocess.Popen(
            leashed(command(image, job, shares, out)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # the snapshot's file has no name once it is open
            env={**environ, "TMPDIR": str(out)},
        )
        try:
            machine.wait(job.timeout_s + START_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if machine.poll() is None:
                machine.kill()
            machine.wait()
    return _ended(job, out, time.monotonic() - began)


def worker(
    program: Path,
    args: Sequence[str] = (),
    *,
    environ: Mapping[str, str],
    timeout_s: float = 120.0,
    cores: int = 1,
    shares: Sequence[Share] = (),
) -> int:
    """Run a Python program in the VM as if it were this rank's own; the status to end with.

    For the program of an Arm. The program's folder is shared read-only, so that it may import what lies beside it; what it
    records and leaves goes into `vm/` in the rank's folder. DTPROBE_*, RANK and WORLD_SIZE are passed on.
    """
    folder = environ.get(RANK_FOLDER)
    if folder is None:
        raise UsageError(f"{RANK_FOLDER} is not set", "start it through the harness: dtprobe run NAME")
    passed = {name: value for name, value in environ.items() if name in PASSED_ON or name.startswith("DTPROBE_")}
    job = Job(
        argv=("python3", f"{WORKER}/{program.name}", *args),
        env={**passed, RANK_FOLDER: JOB},
        cwd=JOB,
        shares=(Share(program.resolve().parent, WORKER), *shares),
        timeout_s=timeout_s,
        cores=cores,
    )
    return run(job, out=Path(folder) / "vm", environ=environ).status


def command(image: Image, job: Job, shares: Sequence[Share], out: Path) -> list[str]:
    """QEMU's command line: software emulation, no network device, the disk as a snapshot."""
    argv = [
        *(EMULATOR, "-M", "q35", "-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max"),
        *("-smp", str(job.cores), "-m", str(job.memory_mib), "-nodefaults", "-display", "none", "-no-reboot"),
        *("-serial", f"file:{out / 'console.log'}".replace(",", ",,"), "-kernel", str(image.kernel)),
        *("-initrd", str(image.ram_disk), "-append", BOOT_WORDS),
        *("-drive", f"file={_escaped(image.disk)},format=raw,if=virtio,snapshot=on"),
    ]
    for tag, folder, writable in [
        ("job", out, True),
        *((f"share{number}", share.folder.resolve(), share.writable) for number, share in enumerate(shares)),
    ]:
        more = "" if writable else ",readonly=on"
        argv += ["-fsdev", f"local,id={tag},path={_escaped(folder)},security_model=none,multidevs=remap{more}"]
        argv += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    return argv


def _escaped(path: Path) -> str:
    return str(path).replace(",", ",,")


def _ended(job: Job, out: Path, wall_s: float) -> Ended:
    try:
        said = json.loads((out / "ended.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        last = " | ".join(_last(out / "console.log") + _last(out / "qemu.log")) or "nothing was said"
        raise DtprobeError(
            f"the lab VM did not come to the end of {job.argv[0]} within {wall_s:.0f} s: {last[-600:]}",
            f"its console is in {out / 'console.log'}",
        ) from None
    if problem := said.get("problem"):
        raise DtprobeError(f"in the lab VM: {problem}")
    return Ended(
        out=out,
        exit_code=said["exit_code"],
        timed_out=said["timed_out"],
        boot_s=said["boot_s"],
        ran_s=said["ran_s"],
        wall_s=wall_s,
    )


def _last(file: Path, lines: int = 5) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()][-lines:]
