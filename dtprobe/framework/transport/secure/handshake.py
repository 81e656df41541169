"""The handshake: every member contributes fresh bytes, and proves that it holds the master secret, before anything is sent.

It goes through the store, which is trusted with nothing: what it changes makes a proof fail, what it withholds makes the
deadline pass.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from dtprobe.framework.agreement import Agreement, Said, difference, named
from dtprobe.framework.transport.secure.errors import HandshakeFailed, WrongSecret
from dtprobe.framework.transport.secure.secret import MasterSecret
from dtprobe.framework.transport.secure.session import VERSION, Session

_FRESH_BYTES = 32
_REMEDY = "give every rank the same secret file"


def shake_hands(
    secret: MasterSecret,
    store: Any,
    *,
    group: str,
    rank: int,
    members: tuple[int, ...],
    timeout_s: float,
    fresh: Callable[[int], bytes] = secrets.token_bytes,
) -> Session:
    """The session of `members` (global ranks) of `group`; called by all of them. `fresh` draws random bytes.

    Raises WrongSecret naming the ranks whose secret differs, HandshakeFailed when versions or members do, MissingRanks naming
    those that do not come within `timeout_s` (seconds, of each of the two rounds).
    """
    agreement = Agreement(store, rank=rank, members=members, prefix=f"dtprobe.secure/{group}")
    try:
        mine = fresh(_FRESH_BYTES)
        said = {"version": VERSION, "members": list(members), "fresh": mine.hex()}
        heard = agreement.reach(said, _contributions, timeout_s, what=f"contributions to the keys of group {group!r}")
        if "wrong" in heard:
            raise HandshakeFailed(heard["wrong"], "start all ranks with the same version and groups", ranks=heard["ranks"])
        contributed = {int(other): bytes.fromhex(value) for other, value in heard["fresh"].items()}
        if contributed.get(rank) != mine or sorted(contributed) != sorted(members):
            raise HandshakeFailed(f"group {group!r}: the store changed what rank {rank} contributed", "look at the store")
        session = Session.between(secret, group, contributed)
        proof = {"proof": session.proof(rank).hex(), "camp": session.camp().hex()}
        heard = agreement.reach(proof, _camps, timeout_s, what=f"proofs of the secret of group {group!r}")
        if "wrong" in heard:
            raise WrongSecret(f"group {group!r}: {heard['wrong']}", _REMEDY, ranks=heard["ranks"])
    finally:
        agreement.close()
    unproven = [
        other
        for other in members
        if not hmac.compare_digest(session.proof(other).hex(), str(heard["proofs"].get(str(other), "")))
    ]
    if unproven:
        raise WrongSecret(
            f"group {group!r}: {named(unproven)} could not prove to rank {rank} that they hold its secret",
            _REMEDY,
            ranks=unproven,
        )
    return session


def _contributions(heard: Mapping[int, list[Said]]) -> Said:
    return _differ(heard, ("version", "members"), "ranks differ") or {
        "fresh": {rank: said[0]["fresh"] for rank, said in heard.items()}
    }


def _camps(heard: Mapping[int, list[Said]]) -> Said:
    return _differ(heard, ("camp",), "ranks hold different master secrets") or {
        "proofs": {rank: said[0]["proof"] for rank, said in heard.items()}
    }


def _differ(heard: Mapping[int, list[Said]], fields: tuple[str, ...], what: str) -> Said:
    twice = [rank for rank, said in heard.items() if len(said) > 1]
    if twice:
        return {"ranks": twice, "wrong": f"two processes claim to be {named(twice)}"}
    found = difference({rank: said[0] for rank, said in heard.items()}, fields)
    if found is None:
        return {}
    camps: dict[str, list[int]] = {}
    for rank, said in sorted(heard.items()):
        camps.setdefault(str([said[0].get(name) for name in fields]), []).append(rank)
    shown = " against ".join(named(ranks) for ranks in camps.values())
    return {"ranks": list(found.ranks), "wrong": f"{what}: {shown}"}
