"""The collectives that are counted: c10d's operators, and torch.distributed's names for them. Read by both sides of the hook."""

from __future__ import annotations

OPERATORS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_coalesced_": "all_gather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
"""Operator of the dispatcher's library `c10d` -> name. isend and irecv are send and recv; object collectives are those they
are made of. Source: torch/csrc/distributed/c10d/Ops.cpp, as of torch 2.13."""

NAMES = tuple(dict.fromkeys(OPERATORS.values()))

REDUCING = tuple(name for name in NAMES if "reduce" in name)
"""These take a reduce op."""

ROOTED = ("broadcast", "reduce", "gather", "scatter", "send", "recv")
"""These name a root or a peer."""

WITHOUT_DATA = ("barrier", "monitored_barrier")
