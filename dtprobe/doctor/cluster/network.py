"""Interfaces and addresses of a host, and which of them gloo and NCCL choose.

Sources: torch/csrc/distributed/c10d/ProcessGroupGloo.cpp (`createDefaultDevice`: the address that the host's name resolves to,
loopback where it resolves to none of this host) and GlooDeviceFactory; nccl/src/misc/socket.cc (`ncclFindInterfaces`: interfaces
named ib*, then any but docker* and lo, then docker*, then lo).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

VIRTUAL = ("docker", "virbr", "br-", "veth", "cni", "flannel", "cali", "podman", "lxc", "ifb", "tun", "tap")
"""Beginnings of the names of interfaces that other hosts usually cannot reach."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface. `addresses` are "ADDRESS/PREFIX"; `speed_mbit` is None where the driver does not say."""

    name: str
    up: bool
    loopback: bool
    mtu: int
    speed_mbit: int | None
    addresses: tuple[str, ...]

    @property
    def virtual(self) -> bool:
        return self.name.startswith(VIRTUAL)

    @property
    def routable(self) -> bool:
        """Up, with an address that is neither loopback nor link-local."""
        return self.up and not self.loopback and any(not _of(each).ip.is_link_local for each in self.addresses)


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network of one host as a rank sees it."""

    interfaces: tuple[Interface, ...]
    host_addresses: tuple[str, ...]
    """What the host's own name resolves to; empty where it does not."""
    gloo_interface: str | None
    """The interface that gloo chooses, None where it cannot."""
    gloo_because: str
    nccl_interface: str | None
    nccl_because: str
    gloo_address: str | None = None
    """Where gloo really listens, once it does."""

    def named(self, name: str | None) -> Interface | None:
        return next((each for each in self.interfaces if each.name == name), None)

    def holding(self, address: str | None) -> Interface | None:
        """The interface that has this address."""
        return next(
            (each for each in self.interfaces if any(held.partition("/")[0] == address for held in each.addresses)), None
        )


def network(environ: Mapping[str, str], *, host_name: str) -> Network:
    """This host's network, and what `environ` and the host's name make gloo and NCCL choose."""
    found = interfaces()
    resolved = _resolved(host_name)
    gloo, gloo_because = gloo_choice(environ, found, resolved)
    nccl, nccl_because = nccl_choice(environ, found)
    return Network(
        interfaces=found,
        host_addresses=resolved,
        gloo_interface=gloo,
        gloo_because=gloo_because,
        nccl_interface=nccl,
        nccl_because=nccl_because,
    )


def interfaces() -> tuple[Interface, ...]:
    """All interfaces of this network namespace."""
    stats = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        about = stats.get(name)
        addresses = []
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6) or not entry.netmask:
                continue
            address = entry.address.partition("%")[0]
            addresses.append(f"{address}/{_prefix(entry.netmask)}")
        found.append(
            Interface(
                name=name,
                up=bool(about and about.isup),
                loopback=any(_of(each).ip.is_loopback for each in addresses) or name == "lo",
                mtu=about.mtu if about else 0,
                speed_mbit=about.speed or None if about else None,
                addresses=tuple(addresses),
            )
        )
    return tuple(found)


def gloo_choice(environ: Mapping[str, str], found: Sequence[Interface], resolved: Sequence[str]) -> tuple[str | None, str]:
    """The interface gloo would choose, and why; None with the reason where it could not."""
    wanted = environ.get("GLOO_SOCKET_IFNAME") or ""
    names = {each.name: each for each in found}
    if wanted:
        for name in filter(None, wanted.split(",")):
            if name not in names:
                return None, f"GLOO_SOCKET_IFNAME={wanted}, but there is no {name} (there are {', '.join(names)})"
            if not names[name].up or not names[name].addresses:
                return None, f"GLOO_SOCKET_IFNAME={wanted}, but {name} is {'without address' if names[name].up else 'down'}"
        return wanted.split(",", maxsplit=1)[0], f"GLOO_SOCKET_IFNAME={wanted}"
    for address in resolved:
        for each in found:
            if any(held.partition("/")[0] == address for held in each.addresses) or (
                each.loopback and ipaddress.ip_address(address).is_loopback
            ):
                return each.name, f"the host's name resolves to {address}"
    told = f"resolves to {', '.join(resolved)}, no address of this host" if resolved else "does not resolve"
    return next((each.name for each in found if each.loopback), None), f"the host's name {told}: gloo falls back to loopback"


def nccl_choice(environ: Mapping[str, str], found: Sequence[Interface]) -> tuple[str | None, str]:
    """The interface NCCL would use for its sockets (bootstrap, and data where there is no RDMA), and why."""
    usable = [each for each in found if each.up and each.addresses]
    wanted = environ.get("NCCL_SOCKET_IFNAME") or ""
    if wanted:
        names = [name for name in wanted.lstrip("^=").split(",") if name]
        exclude, exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
        for each in usable:
            hit = each.name in names if exact else each.name.startswith(tuple(names))
            if hit != exclude:
                return each.name, f"NCCL_SOCKET_IFNAME={wanted}"
        return None, f"NCCL_SOCKET_IFNAME={wanted} matches no interface that is up ({', '.join(one.name for one in usable)})"
    for beginnings, allowed in ((("ib",), True), (("docker", "lo", "virbr"), False), (("docker",), True), (("lo",), True)):
        for each in usable:
            if each.name.startswith(beginnings) == allowed:
                return each.name, "the first in NCCL's own order"
    return None, "no interface is up"


def subnet(interface: Interface, address: str) -> str:
    """The network an address of this interface lies in."""
    held = next((each for each in interface.addresses if each.partition("/")[0] == address), f"{address}/32")
    return str(_of(held).network)


def _resolved(host_name: str) -> tuple[str, ...]:
    try:
        entries = socket.getaddrinfo(host_name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries))


def _prefix(netmask: str) -> int:
    return bin(int(ipaddress.ip_address(netmask))).count("1")


def _of(address: str) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface:
    return ipaddress.ip_interface(address)
