"""Builds the lab's image from Debian packages: kernel, initial RAM disk and root disk, into a folder. Needs root.

debootstrap and what it starts run in a mount and a process namespace of their own: ended half-way, nothing stays mounted and
nothing goes on.
"""

from __future__ import annotations

import gzip
import lzma
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dtprobe.errors import DtprobeError
from dtprobe.launch.lab import recipe
from dtprobe.launch.lab.leash import leashed

STEP_TIMEOUT_S = 900
DEBOOTSTRAP_LINES = 860
"""So many lines debootstrap says for this recipe (counted): the measure of its progress."""

XZ, ELF = b"\xfd7zXZ\0", b"\x7fELF"
ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
UNREACHED = re.compile(
    r"^(?:E|W|Err).*(?:Failed getting release|Could ?n.t (?:download|resolve|connect)|Unable to connect|Failed to fetch|"
    r"Temporary failure|Connection (?:refused|timed out)|Invalid Release).*$",
    re.MULTILINE,
)
"""How debootstrap and apt say that they did not get to the mirror."""

Told = Callable[[str, float], None]
"""Called with what is being done and the share of all work that is done, 0 to 1."""


def image(into: Path, told: Told, *, environ: Mapping[str, str], mirror: str | None = None) -> None:
    """Leave `recipe.FILES` in the folder `into`. Raises DtprobeError with the failed step's own words."""
    mirror = mirror or own_mirror(environ)
    with tempfile.TemporaryDirectory(dir=into, prefix="work-") as scratch:
        work = _Work(Path(scratch), told, environ, mirror)
        work.base()
        version = work.kernel(into)
        work.ram_disk(into, version)
        work.disk(into)


def own_mirror(environ: Mapping[str, str]) -> str | None:
    """The Debian mirror that this host's apt uses, None where it uses none (debootstrap then takes its own default)."""
    asked = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(CODENAME) $(REPO_URI)", "Created-By: Packages"]
    try:
        ran = subprocess.run(asked, env=environ, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next((line.split()[2] for line in ran.stdout.splitlines() if re.fullmatch(r"Debian [a-z]+ \S+", line)), None)


class _Work:
    """The steps, on one scratch folder."""

    def __init__(self, scratch: Path, told: Told, environ: Mapping[str, str], mirror: str | None) -> None:
        self.scratch = scratch
        self.root = scratch / "root"
        self.told = told
        self.environ = {**environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
        self.mirror = mirror
        self.log = scratch / "said.log"

    def base(self) -> None:
        """A Debian with the recipe's packages in `root`."""
        packages = ",".join(recipe.PACKAGES)
        argv = ["debootstrap", "--variant=minbase", f"--include={packages}", recipe.RELEASE, str(self.root)]
        self._run([*argv, *filter(None, [self.mirror])], "Debian packages", 0.0, 0.80, DEBOOTSTRAP_LINES)

    def kernel(self, into: Path) -> str:
        """The kernel beside the disk and the wanted modules in `root`; its version."""
        resolver = Path("/etc/resolv.conf")
        if resolver.exists():
            shutil.copyfile(resolver, self.root / "etc/resolv.conf")
        self._inside(["apt-get", "update"], "package lists", 0.80)
        named = self._inside(["apt-cache", "depends", recipe.KERNEL], "kernel's name", 0.82)
        found = re.search(r"Depends: (linux-image-\S+)", named)
        if found is None:
            raise DtprobeError(f"the mirror has no kernel: {recipe.KERNEL} depends on nothing", "try another mirror")
        place = self.root / "kernel"
        place.mkdir()
        self._inside(["apt-get", "-o", "APT::Sandbox::User=root", "download", found[1]], "kernel", 0.84, cwd="/kernel")
        [package] = place.glob("*.deb")
        self._inside(["dpkg", "-x", f"/kernel/{package.name}", "/kernel/unpacked"], "kernel, unpacked", 0.88)
        unpacked = place / "unpacked"
        [kernel] = (unpacked / "boot").glob("vmlinuz-*")
        (into / "vmlinux").write_bytes(_unpacked(kernel.read_bytes()))
        version = kernel.name.removeprefix("vmlinuz-")
        source, target = (base / "lib/modules" / version for base in (unpacked, self.root))
        for name in recipe.MODULES:
            kept, made = source / "kernel" / name, target / "kernel" / name
            made.parent.mkdir(parents=True, exist_ok=True)
            if kept.is_dir():
                shutil.copytree(kept, made)
            elif kept.is_file():
                shutil.copyfile(kept, made)
            else:
                raise DtprobeError(f"kernel {version} has no module {name}", "the recipe is for another kernel")
        for file in source.glob("modules.[bo]*"):  # modules.builtin*, modules.order: what depmod reads
            shutil.copyfile(file, target / file.name)
        shutil.rmtree(place)
        self._inside(["depmod", version], "modules", 0.91)
        return version

    def ram_disk(self, into: Path, version: str) -> None:
        """A busybox and the modules that the disk needs, in the order in which they are loaded."""
        self.told("initial RAM disk", 0.92)
        ram, order = self.scratch / "ram", []
        for name in ("bin", "modules", "proc", "sys", "dev", "disk"):
            (ram / name).mkdir(parents=True)
        shutil.copy2(self.root / "bin/busybox", ram / "bin/busybox")
        shutil.copyfile(recipe.GUEST / "init", ram / "init")
        (ram / "init").chmod(0o755)
        for module in recipe.TO_REACH_THE_DISK:
            shown = self._inside(["modprobe", "-S", version, "--show-depends", module], "initial RAM disk", 0.92)
            for path in re.findall(r"^insmod (/\S+)", shown, re.MULTILINE):
                if (name := Path(path).name) not in order:
                    shutil.copyfile(self.root / path.lstrip("/"), ram / "modules" / name)
                    order.append(name)
        (ram / "order").write_text("".join(f"{name}\n" for name in order), encoding="ascii")
        names = sorted(str(path.relative_to(ram)) for path in ram.rglob("*"))
        packed = subprocess.run(
            ["cpio", "-o", "-H", "newc", "--quiet"],
            input="\n".join(names).encode(),
            cwd=ram,
            capture_output=True,
            timeout=STEP_TIMEOUT_S,
            check=False,
        )
        if packed.returncode:
            raise DtprobeError(f"cpio failed: {packed.stderr.decode(errors='replace').strip()[-300:]}")
        (into / "initrd.gz").write_bytes(gzip.compress(packed.stdout, 1))

    def disk(self, into: Path) -> None:
        """The root disk: ext4 without a journal, since nothing that is written to it is kept."""
        shutil.copyfile(recipe.GUEST / "lab-init", self.root / "sbin/lab-init")
        (self.root / "sbin/lab-init").chmod(0o755)
        for name in recipe.UNWANTED:
            shutil.rmtree(self.root / name, ignore_errors=True)
        (self.root / "etc/resolv.conf").unlink(missing_ok=True)
        disk = into / "root.img"
        with disk.open("wb") as file:
            file.truncate(recipe.DISK_MIB << 20)
        self._run(["mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", str(self.root), str(disk)], "root disk", 0.94, 1.0)

    def _inside(self, argv: Sequence[str], what: str, at: float, cwd: str = "/") -> str:
        return self._run(["chroot", str(self.root), "env", "-C", cwd, *argv], what, at, at)

    def _run(self, argv: Sequence[str], what: str, start: float, end: float, lines: int = 0) -> str:
        """Run a step to its end; what it said on standard output. Raises DtprobeError."""
        self.told(what, start)
        began = time.monotonic()
        with self.log.open("w+b") as log:
            process = subprocess.Popen(
                leashed([*ALONE, *argv]), env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.scratch
            )
            try:
                while process.poll() is None:
                    if time.monotonic() - began > STEP_TIMEOUT_S:
                        raise DtprobeError(f"building the lab's image: {what} took more than {STEP_TIMEOUT_S} s")
                    time.sleep(0.1)
                    if lines:
                        self.told(what, start + (end - start) * min(1.0, self._text().count("\n") / lines))
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
        text = self._text()
        if process.returncode:
            raise self._failure(what, text)
        return text

    def _text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _failure(self, what: str, text: str) -> DtprobeError:
        unreached = UNREACHED.search(text)
        if unreached:
            return DtprobeError(
                f"the lab's image cannot be built: the package mirror cannot be reached: {unreached[0].strip()[:200]}",
                "check that host and its proxy (http_proxy), or `python -m dtprobe.launch.lab build --mirror URL`",
            )
        last = [line for line in text.strip().splitlines() if line.strip()][-3:]
        return DtprobeError(f"the lab's image cannot be built: {what} failed: {' | '.join(last)[-400:]}")


def _unpacked(kernel: bytes) -> bytes:
    """The ELF file within a bzImage compressed by xz, as Debian's are: unpacking it at each boot takes emulation 3 s.

    QEMU starts it by its PVH entry (CONFIG_PVH).
    """
    at = kernel.find(XZ)
    try:
        found = lzma.LZMADecompressor().decompress(kernel[at:]) if at >= 0 else b""
    except lzma.LZMAError:
        found = b""
    if not found.startswith(ELF):
        raise DtprobeError("the mirror's kernel is not packed by xz, as this recipe expects")
    return found


def unmet() -> str:
    """Why this process cannot build, empty where it can."""
    return "" if os.geteuid() == 0 else f"building needs root (user id {os.geteuid()})"
