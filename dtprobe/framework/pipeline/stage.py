"""torch.distributed.pipelining over an exchange: what its schedules send and receive gets names, order and a deadline.

A schedule asks its stages for operations (`get_fwd_recv_ops` and its three kin) and issues them through one function of
`torch.distributed.pipelining.schedules`, `_batch_p2p`. Stages made by `exchanged` answer with operations that know their
message; those, and only those, are issued by the exchange. Run with torch 2.13; a version whose stages work otherwise is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.pipelining import schedules

from dtprobe.errors import UsageError
from dtprobe.framework.errors import FrameworkError
from dtprobe.framework.pipeline.exchange import Exchange
from dtprobe.framework.pipeline.messages import Direction, Kind, Transfer

Stage = TypeVar("Stage")

_GIVERS: tuple[tuple[str, Direction, Kind], ...] = (
    ("get_fwd_recv_ops", "receive", "forward"),
    ("get_fwd_send_ops", "send", "forward"),
    ("get_bwd_recv_ops", "receive", "backward"),
    ("get_bwd_send_ops", "send", "backward"),
)


class StageOp(dist.P2POp):
    """A point-to-point operation of a schedule that knows which message it is."""

    exchange: Exchange
    transfer: Transfer


def exchanged(stage: Stage, exchange: Exchange) -> Stage:
    """Make a stage of torch.distributed.pipelining (`PipelineStage`, or what `Pipe.build_stage` gave) use `exchange`; returns it.

    Raises UsageError when the stage was made for a group of other ranks or for another number of stages.
    """
    theirs = dist.get_process_group_ranks(stage.group)  # type: ignore[attr-defined]
    if tuple(theirs) != exchange.members or stage.num_stages != len(exchange.placement):  # type: ignore[attr-defined]
        raise UsageError(
            f"a stage of {stage.num_stages} on ranks {theirs} in an exchange of "  # type: ignore[attr-defined]
            f"{len(exchange.placement)} stages on ranks {list(exchange.members)}",
            "make the stage with group=exchange.group, and the exchange with stages=",
        )
    stage.group = exchange.group  # type: ignore[attr-defined]
    for name, direction, kind in _GIVERS:
        setattr(stage, name, _named(stage, getattr(stage, name), exchange, direction, kind))
    schedules._batch_p2p = _batch_p2p
    return stage


class _Noting(dict):
    """A placement that notes which stages were looked up: each operation is made with one look-up of its peer."""

    def __init__(self, placement: dict[int, int]) -> None:
        super().__init__(placement)
        self.asked: list[int] = []

    def __getitem__(self, stage: int) -> int:
        self.asked.append(stage)
        return super().__getitem__(stage)


def _named(stage: Any, give: Callable[[int], list[dist.P2POp]], exchange: Exchange, direction: Direction, kind: Kind) -> Any:
    def ops(microbatch: int) -> list[dist.P2POp]:
        placement = stage.stage_index_to_group_rank
        noting = stage.stage_index_to_group_rank = _Noting(placement)
        try:
            plain = give(microbatch)
        finally:
            stage.stage_index_to_group_rank = placement
        if len(noting.asked) != len(plain):
            raise FrameworkError(
                f"stage {stage.stage_index} made {len(plain)} operations and looked {len(noting.asked)} peers up: "
                "this version of torch.distributed.pipelining is not known",
                "use torch 2.13, with which it was tried",
            )
        exchange.place(placement)
        return [
            _op(
                op,
                exchange,
                Transfer(direction, peer, microbatch, kind, op.tensor, noting.asked[:at].count(peer), stage.stage_index),
            )
            for at, (op, peer) in enumerate(zip(plain, noting.asked, strict=True))
        ]

    return ops


def _op(plain: dist.P2POp, exchange: Exchange, transfer: Transfer) -> StageOp:
    op = StageOp(plain.op, plain.tensor, group=exchange.group, group_peer=plain.group_peer)
    op.exchange, op.transfer = exchange, transfer
    return op


_torchs_batch_p2p = schedules._batch_p2p


def _batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> Any:
    ours = [op for op in p2p_ops if isinstance(op, StageOp)]
    if not ours or len(ours) != len(p2p_ops):
        return _torchs_batch_p2p(p2p_ops, desc)
    return ours[0].exchange.post([op.transfer for op in ours])
