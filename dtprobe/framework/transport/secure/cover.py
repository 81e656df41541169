"""Putting encryption in front of the groups of a script that knows nothing of it."""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtprobe.framework.forwarding import stand_in
from dtprobe.framework.transport.secure.errors import NotCovered
from dtprobe.framework.transport.secure.group import SecureGroup
from dtprobe.framework.transport.secure.handshake import shake_hands
from dtprobe.framework.transport.secure.records import Rotation
from dtprobe.framework.transport.secure.secret import MasterSecret


@contextlib.contextmanager
def secured(
    secret: MasterSecret,
    *,
    timeout_s: float = 60.0,
    rotation: Rotation | None = None,
    fresh: Callable[[int], bytes] = secrets.token_bytes,
) -> Iterator[None]:
    """Encrypt every gloo group within the block, on all ranks: those that exist, and those that are made in it.

    Enter it before DDP or a mesh is built: they keep the group they were given. Groups that were made in the block stay
    encrypted after it until they are destroyed; those that were there before are as before. `timeout_s` bounds each round of a
    handshake.

    Raises WrongSecret naming the ranks whose secret differs, MissingRanks naming those that do not take part, NotCovered for a
    group of another back end. In none of these cases has anything been sent but the handshake.
    """
    covers = _Covers(secret, timeout_s, rotation, fresh)
    original = c10d._new_process_group_helper
    with contextlib.ExitStack() as undo:
        for group in list(c10d._world.pg_map):
            members = tuple(c10d._world.pg_group_ranks[group])
            outer = covers.cover(group, c10d._world.pg_map[group][1], members)
            undo.callback(_uncover, outer, group)
        c10d._new_process_group_helper = covers.making(original)
        undo.callback(setattr, c10d, "_new_process_group_helper", original)
        yield


class _Covers:
    """How groups are covered in one `secured` block."""

    def __init__(
        self, secret: MasterSecret, timeout_s: float, rotation: Rotation | None, fresh: Callable[[int], bytes]
    ) -> None:
        self._secret, self._timeout_s, self._rotation, self._fresh = secret, timeout_s, rotation, fresh

    def cover(self, group: dist.ProcessGroup, store: Any, members: tuple[int, ...]) -> SecureGroup:
        """Shake hands with the other members and stand in front of `group` in torch's tables."""
        if not group.name().endswith("gloo"):
            raise NotCovered(
                f"group {group.group_desc!r} uses {group.name()}, and only gloo is encrypted",
                "init_process_group('gloo'), or encrypt the network below (IPsec, WireGuard)",
            )
        name = f"{group.group_name}/{_covered[group.group_name]}"
        _covered[group.group_name] += 1
        session = shake_hands(
            self._secret,
            store,
            group=name,
            rank=members[group.rank()],
            members=members,
            timeout_s=self._timeout_s,
            fresh=self._fresh,
        )
        outer = SecureGroup(group, session, members, self._rotation)
        stand_in(outer, group)
        return outer

    def making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """torch's maker of groups (there is no public one: torch 2.9 to 2.13), which covers what it makes."""

        def make(group_size: int, group_rank: int, global_ranks_in_group: list[int], *args: Any, **options: Any) -> Any:
            group, store = original(group_size, group_rank, global_ranks_in_group, *args, **options)
            if store is None or isinstance(group, SecureGroup):  # not a member, or found by its tag
                return group, store
            members = tuple(global_ranks_in_group) or tuple(range(group.size()))
            c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(members)}
            try:
                return self.cover(group, store, members), store
            except BaseException:
                c10d._world.pg_group_ranks.setdefault(group, {})
                if c10d.GroupMember.WORLD is None:
                    c10d._update_default_pg(group)
                dist.destroy_process_group(group)
                raise

        return make


_covered: Counter[str] = Counter()
"""How often this process covered a group of that name: each handshake has keys of its own in the store."""


def _uncover(outer: SecureGroup, inner: dist.ProcessGroup) -> None:
    if outer in c10d._world.pg_map:
        stand_in(inner, outer)
    outer.let_go()
