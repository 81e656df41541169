"""What the lab's image is made of. Whatever changes here, or in `guest/`, makes another image under another key."""

from __future__ import annotations

import hashlib
from pathlib import Path

RELEASE = "bookworm"
KERNEL = "linux-image-amd64"
"""A package that depends on the kernel's own: what it names on the mirror is taken, unpacked and not installed."""

PACKAGES = (
    # the system itself
    *("busybox-static", "iproute2", "iputils-ping", "kmod", "procps", "python3", "strace"),
    # soft-RoCE, and traffic beside it
    *("ethtool", "ibverbs-providers", "ibverbs-utils", "infiniband-diags", "iperf3", "nftables", "perftest"),
    *("python3-pyverbs", "rdmacm-utils"),
    # an NFS server and its client
    *("nfs-common", "nfs-kernel-server"),
)

MODULES = (
    *("arch", "crypto", "lib", "net"),
    *("drivers/block/null_blk", "drivers/block/virtio_blk.ko", "drivers/infiniband", "drivers/md", "drivers/virtio"),
    *("drivers/net/dummy.ko", "drivers/net/ifb.ko", "drivers/net/veth.ko"),
    *("fs/9p", "fs/configfs", "fs/ext4", "fs/fscache", "fs/fuse", "fs/jbd2", "fs/lockd", "fs/mbcache.ko"),
    *("fs/netfs", "fs/nfs", "fs/nfs_common", "fs/nfsd", "fs/overlayfs"),
)
"""Of the kernel's modules, these files and folders are kept (below `/lib/modules/<version>/kernel`)."""

TO_REACH_THE_DISK = ("virtio_pci", "virtio_blk", "ext4")
"""Modules that the initial RAM disk needs, with what they depend on."""

UNWANTED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists")
DISK_MIB = 1024

GUEST = Path(__file__).resolve().parent / "guest"
FILES = ("vmlinux", "initrd.gz", "root.img")
"""What an image consists of."""


def key() -> str:
    """Sixteen hexadecimal digits that change with the recipe."""
    digest = hashlib.sha256(repr((RELEASE, KERNEL, PACKAGES, MODULES, TO_REACH_THE_DISK, UNWANTED, DISK_MIB)).encode())
    for file in (*sorted(GUEST.glob("*")), Path(__file__).with_name("build.py")):
        if file.is_file():
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
