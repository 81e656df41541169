"""Checked mode: every collective is announced, compared across ranks, and only then run.

What a rank is about to call (operation, shapes, dtypes, reduce operation, root, group) is agreed on through the store before
anything is sent. A rank that calls something else, or does not come before the deadline, is named in an error that every
rank raises. `TORCH_DISTRIBUTED_DEBUG=DETAIL` compares neither reduce operation, root nor group order. The call site is
reported but not compared: `if rank == 0: broadcast(...) else: broadcast(...)` is correct code.

Not checked: point-to-point operations, and groups that DDP or a mesh captured before `checked` was entered.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtprobe.errors import Unavailable
from dtprobe.framework.agreement import Agreement, Said, difference, named
from dtprobe.framework.errors import CollectiveMismatch
from dtprobe.framework.forwarding import COLLECTIVES, ForwardingGroup, stand_in
from dtprobe.framework.part import torch_distributed

_COMPARED = ("op", "group", "reduce_op", "root", "dtype", "shape")
_END = "the end of checking"
_REMEDY = "make every rank call the same collectives in the same order; the call sites are named above"
_OURS = (str(Path(__file__).parent), str(Path(dist.__file__).parent), str(Path(torch.__file__).parent / "autograd"))

NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
}
"""From the method of `ProcessGroup` to the name users know; names that are the same are left out."""


def probe() -> Unavailable | None:
    """None where torch.distributed was built in."""
    return torch_distributed()


class CheckedGroup(ForwardingGroup):
    """A group whose collectives are compared across its ranks before they run.

    `timeout_s` is the deadline of each comparison (seconds). After `limit` comparisons (None: never) collectives pass
    unchecked. Each comparison waits for all ranks, so asynchronous collectives start together, not each in its own time.
    """

    def __init__(self, inner: dist.ProcessGroup, *, timeout_s: float, limit: int | None = None) -> None:
        super().__init__(inner)
        members = tuple(dist.get_process_group_ranks(inner))
        label = inner.group_desc if inner.group_desc not in ("", "undefined", "default_pg") else inner.group_name
        self._label = "world" if inner is c10d.GroupMember.WORLD else label
        self._members = members
        self._timeout_s = timeout_s
        self._limit = limit
        self._history: deque[str] = deque(maxlen=4096)
        _blocks[inner.group_name] += 1
        prefix = f"dtprobe.checked/{inner.group_name}/{_blocks[inner.group_name]}"
        self._agreement = Agreement(c10d._get_default_store(), rank=dist.get_rank(), members=members, prefix=prefix)

    @property
    def compared(self) -> int:
        """How many collectives were compared so far."""
        return self._agreement.done

    def before(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if op in COLLECTIVES and (self._limit is None or self._agreement.done < self._limit):
            said = fingerprint(op, (*args, *kwargs.values()), rank=self.rank(), size=self.size())
            self._compare(said | {"group": self._label, "site": call_site()})

    def finish(self) -> None:
        """Agree that all ranks made the same number of collectives; the last call on this group."""
        if self._limit is None or self._agreement.done < self._limit:
            self._compare({"op": _END, "group": self._label, "site": call_site()})

    def leave(self, reason: str) -> None:
        """This rank will make no further collective: the others learn it at once instead of at their deadline."""
        self._agreement.leave(reason)

    def let_go(self) -> None:
        super().let_go()
        self._agreement.close()

    def _compare(self, said: Said) -> None:
        what = f"collective {self._agreement.done} of group {self._label!r}, {described(said)} at {said['site']}"
        verdict = self._agreement.reach(said, self._judge, self._timeout_s, what=what)
        if verdict:
            raise CollectiveMismatch(
                f"collective {self._agreement.done - 1} of group {self._label!r}: {verdict['wrong']}",
                _REMEDY,
                ranks=verdict["ranks"],
                decided=verdict["decided"],
                differences={
                    field: {int(rank): value for rank, value in values.items()} for field, values in verdict["fields"].items()
                },
            )
        self._history.append(_key(said))

    def _judge(self, heard: Mapping[int, list[Said]]) -> Said:
        twice = [rank for rank, said in heard.items() if len(said) > 1]
        if twice:
            return {"wrong": f"two processes claim to be {named(twice)}", "ranks": twice, "decided": True, "fields": {}}
        said = {rank: each[0] for rank, each in heard.items()}
        expected = predicted(self._history)

        def right(one: Said) -> bool:
            # whoever stops while others go on is the one to ask, unless the group's own past says otherwise
            return _key(one) == expected if expected is not None else one["op"] != _END

        found = difference(said, _COMPARED, right)
        if found is None:
            return self._judge_pairs(said)
        calls: dict[str, list[int]] = {}
        for rank, one in sorted(said.items()):
            calls.setdefault(f"{described(one)} at {one['site']}", []).append(rank)
        blamed = "" if found.decided else "; nothing decides which of them is wrong"
        return {
            "wrong": "; ".join(f"{named(ranks)}: {call}" for call, ranks in calls.items()) + blamed,
            "ranks": list(found.ranks),
            "decided": found.decided,
            "fields": found.fields,
        }

    def _judge_pairs(self, said: Mapping[int, Said]) -> Said:
        """What rank a sends to rank b must be what b expects of a (gather, scatter, all_to_all, uneven all_gather)."""
        for at, source in enumerate(self._members):
            for to, target in enumerate(self._members):
                sends, takes = said[source].get("sends"), said[target].get("takes")
                if sends and takes and sends[to] != takes[at]:
                    wrong = (
                        f"rank {source} sends {sends[to]} elements to rank {target} at {said[source]['site']}, "
                        f"which expects {takes[at]} at {said[target]['site']} ({said[source]['op']})"
                    )
                    fields = {"shape": {source: str(sends[to]), target: str(takes[at])}}
                    return {"wrong": wrong, "ranks": [source, target], "decided": False, "fields": fields}
        return {}


_blocks: Counter[str] = Counter()
"""Checked blocks of this process by group: every rank enters the same ones, and each block has keys of its own."""


@contextlib.contextmanager
def checked(
    group: dist.ProcessGroup | None = None, *, timeout_s: float = 30.0, limit: int | None = None
) -> Iterator[CheckedGroup]:
    """Check every collective on `group` (default: the default group) within the `with` block, on all of its ranks.

    Inside the block the group is replaced everywhere torch looks it up, so that unchanged code is checked; use the
    yielded group where you hold a handle. Raises, on every rank, CollectiveMismatch or MissingRanks. At the end of the
    block ranks agree that all made the same number of collectives; a rank that leaves by an exception tells the others.
    """
    inner = group if group is not None else c10d._get_default_group()
    outer = CheckedGroup(inner, timeout_s=timeout_s, limit=limit)
    stand_in(outer, inner)
    try:
        try:
            yield outer
        except BaseException as error:
            outer.leave(f"{type(error).__name__}: {error}"[:500])
            raise
        outer.finish()
    finally:
        if outer in c10d._world.pg_map:
            stand_in(inner, outer)
        outer.let_go()


def fingerprint(op: str, args: Sequence[Any], *, rank: int, size: int) -> dict[str, Any]:
    """What must agree in the call of a `ProcessGroup` method `op` with `args`, for the member `rank` (in the group) of `size`.

    `shape`, `dtype`, `reduce_op`, `root` (group rank) are compared; `sends` and `takes` (elements by peer) are matched pairwise.
    """
    said: dict[str, Any] = {"op": NAMES.get(op, op)}
    for arg in args:
        if (
            reduce_op := getattr(arg, "reduceOp", arg if isinstance(arg, dist.ReduceOp | dist.ReduceOp.RedOpType) else None)
        ) is not None:
            said["reduce_op"] = str(getattr(reduce_op, "op", reduce_op)).rpartition(".")[2].rstrip(">").partition(":")[0]
        if op in _ROOTED and (root := getattr(arg, "rootRank", arg if type(arg) is int else None)) is not None:
            said["root"] = root
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor | list | tuple)]
    said["dtype"] = ",".join(sorted({str(one.dtype).removeprefix("torch.") for one in _flat(tensors)}))
    said |= _SHAPES[op](tensors, rank, size, said.get("root")) if op in _SHAPES else {"shape": _shapes(tensors[:1])}
    return said


def described(said: Said) -> str:
    """A fingerprint for people: `all_reduce(float32 [4], SUM)`."""
    parts = [f"{said['dtype']} {said['shape']}".strip()] if said.get("dtype") else []
    parts += [said["reduce_op"]] if "reduce_op" in said else []
    parts += [f"root {said['root']}"] if "root" in said else []
    return f"{said['op']}({', '.join(parts)})" if parts else str(said["op"])


def predicted(history: Sequence[str], depth: int = 8) -> str | None:
    """What a repeating program calls next: what followed the longest recent run (up to `depth`) that ends like the history."""
    past = list(history)
    best, answer = 0, None
    for at in range(len(past) - 2, -1, -1):
        run = 0
        while run < depth and run <= at and past[at - run] == past[-1 - run]:
            run += 1
        if run > best:
            best, answer = run, past[at + 1]
    return answer


def call_site() -> str:
    """`file.py:line function` of the innermost frame outside torch.distributed and this package."""
    frame = sys._getframe(1)
    for inner, outer in pairwise(_frames(frame)):
        if not outer.f_code.co_filename.startswith(_OURS) and not outer.f_code.co_filename.endswith("contextlib.py"):
            return f"{Path(outer.f_code.co_filename).name}:{outer.f_lineno} {outer.f_code.co_name}"
        del inner
    return "C++ (no Python frame)"


def _frames(frame: Any) -> Iterator[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _key(said: Said) -> str:
    return json.dumps([said.get(name) for name in _COMPARED])


def _flat(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _flat(value)


def _shapes(values: Any) -> str:
    return ", ".join(str(list(one.shape)) for one in _flat(values))


def _sizes(values: Any) -> list[int]:
    return [one.numel() for one in _flat(values)]


def _all_gather(tensors: list[Any], rank: int, size: int, root: int | None) -> dict[str, Any]:
    outputs, inputs = tensors[0], tensors[1]
    return {"shape": "", "sends": [sum(_sizes([inputs]))] * size, "takes": _sizes([outputs])}


def _gather(tensors: list[Any], rank: int, size: int, root: int | None) -> dict[str, Any]:
    outputs, inputs = tensors[0], tensors[1]
    sends = [0] * size
    sends[root or 0] = sum(_sizes([inputs]))
    return {"shape": "", "sends": sends, "takes": _sizes([outputs]) if rank == root else [0] * size}


def _scatter(tensors: list[Any], rank: int, size: int, root: int | None) -> dict[str, Any]:
    outputs, inputs = tensors[0], tensors[1]
    takes = [0] * size
    takes[root or 0] = sum(_sizes([outputs]))
    return {"shape": "", "sends": _sizes([inputs]) if rank == root else [0] * size, "takes": takes}


def _all_to_all(tensors: list[Any], rank: int, size: int, root: int | None) -> dict[str, Any]:
    return {"shape": "", "sends": _sizes([tensors[1]]), "takes": _sizes([tensors[0]])}


def _all_to_all_single(tensors: list[Any], rank: int, size: int, root: int | None) -> dict[str, Any]:
    output, source, out_splits, in_splits = tensors
    return {"shape": "", "sends": _split(source, in_splits, size), "takes": _split(output, out_splits, size)}


def _split(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    if not splits:
        return [tensor.numel() // size] * size
    row = tensor.numel() // max(tensor.shape[0], 1)
    return [count * row for count in splits]


def _input(tensors: list[Any], rank: int, size: int, root: int | None) -> dict[str, Any]:
    return {"shape": _shapes([tensors[1]])}


_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_SHAPES = {
    "allgather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "alltoall": _all_to_all,
    "alltoall_base": _all_to_all_single,
    "all_to_all_single": _all_to_all_single,
    **dict.fromkeys(
        (
            "allgather_coalesced",
            "_allgather_base",
            "all_gather_single",
            "all_gather_single_coalesced",
            "allgather_into_tensor_coalesced",
            "reduce_scatter",
            "_reduce_scatter_base",
            "reduce_scatter_single",
            "reduce_scatter_single_coalesced",
            "reduce_scatter_tensor_coalesced",
        ),
        _input,
    ),
}
"""How to read the tensors of methods whose first argument alone does not tell."""
