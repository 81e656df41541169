"""torch's ProcessGroup over MPI: the collectives, point-to-point and sub-groups that DDP, DTensor and FSDP2 use.

Every method checks its arguments in the caller's thread and hands the operation to the engine's. Operations of one group start
in the order of the calls, as MPI needs it. A tensor that is not plain memory (a transposed one, say) goes through a copy.
Names that torch 2.13 introduced (`all_gather_single`) stand beside those of 2.9 (`_allgather_base`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C import _distributed_c10d as c10d

from dtprobe.framework.errors import FrameworkError, GroupEnded
from dtprobe.framework.transport.mpi import NAME
from dtprobe.framework.transport.mpi import tensors as t
from dtprobe.framework.transport.mpi.engine import Channel, Engine, Operation
from dtprobe.framework.transport.mpi.errors import Unsupported
from dtprobe.framework.transport.mpi.tensors import Flat
from dtprobe.framework.transport.mpi.work import JoinedWork, MpiWork

Tensors = Sequence[torch.Tensor]


class MpiGroup(dist.ProcessGroup):
    """A process group whose members are ranks of MPI's world; made by torch through `register`, not by hand."""

    def __init__(self, engine: Engine, channel: Channel, store: Any, rank: int, timeout: timedelta) -> None:
        super().__init__(rank, len(channel.members))  # type: ignore[call-arg]  # its stub knows one of two constructors
        self._engine = engine
        self._channel = channel
        self._store = store
        self._timeout_s = timeout.total_seconds()
        self._known_name = channel.name
        self._known_desc = channel.shown
        self._order = threading.Lock()
        self._batch: list[MpiWork] | None = None
        self._ended = False

    # what torch asks of a group beside collectives

    @property
    def group_name(self) -> Any:
        return self._known_name

    def _set_group_name(self, name: Any) -> None:
        self._known_name = name

    @property
    def group_desc(self) -> str:
        return self._known_desc

    def _set_group_desc(self, desc: str) -> None:
        self._known_desc = self._channel.shown = desc

    def getGroupName(self) -> str:
        return self._known_name

    def getGroupDesc(self) -> str:
        return self._known_desc

    def getBackendName(self) -> str:
        return NAME

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """The timeout of operations from now on that name none."""
        self._timeout_s = timeout.total_seconds()

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def _set_sequence_number_for_group(self) -> None:
        """MPI numbers operations itself."""

    def _get_sequence_number_for_group(self) -> int:
        return self._channel.issued

    @property
    def failure(self) -> FrameworkError | None:
        """Why no operation can be issued any more, or None."""
        return self._channel.failure

    def shutdown(self) -> None:
        """End the group: operations in flight complete first, or end by their timeout; then MPI lets its communicator go."""
        if self._ended:
            return
        self._ended = True
        self._engine.retire(self._channel)

    def abort(self) -> None:
        """End the group at once; operations in flight raise GroupEnded here and PeerLost on the other members."""
        self._ended = True
        failure = GroupEnded(f"group {self._known_desc!r} was aborted by rank {self._engine.rank}")
        self._engine.post(lambda: self._engine.break_channel(self._channel, failure))

    # collectives

    def allreduce(self, tensors: Any, opts: Any = None) -> MpiWork:
        opts = opts or c10d.AllreduceOptions()
        return self._allreduce("all_reduce", _listed(tensors), opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> MpiWork:
        return self._allreduce("all_reduce (coalesced)", tensors, opts or c10d.AllreduceCoalescedOptions())

    def _allreduce(self, what: str, tensors: Tensors, opts: Any) -> MpiWork:
        t.check(what, *tensors)
        how = [t.reduction(opts.reduceOp, each.dtype) for each in tensors]
        flats = [t.reduced(each, each_how, own=True) for each, each_how in zip(tensors, how, strict=True)]

        def start() -> list[MPI.Request]:
            return [
                self._comm.Iallreduce(MPI.IN_PLACE, t.spec(flat.memory, each.datatype), each.op)
                for flat, each in zip(flats, how, strict=True)
            ]

        return self._collective(what, tensors, opts, start, lambda: self._deliver_reduced(flats, how))

    def broadcast(self, tensors: Any, opts: Any = None) -> MpiWork:
        opts = opts or c10d.BroadcastOptions()
        tensors = _listed(tensors)
        t.check("broadcast", *tensors)
        root = opts.rootRank
        flats = [t.moved(each, read=root == self.rank()) for each in tensors]

        def start() -> list[MPI.Request]:
            return [self._comm.Ibcast(t.spec(flat.memory), root) for flat in flats]

        return self._collective("broadcast", tensors, opts, start, lambda: _deliver(flats if root != self.rank() else ()))

    def reduce(self, tensors: Any, opts: Any = None) -> MpiWork:
        opts = opts or c10d.ReduceOptions()
        tensors = _listed(tensors)
        t.check("reduce", *tensors)
        root, mine = opts.rootRank, opts.rootRank == self.rank()
        how = [t.reduction(opts.reduceOp, each.dtype) for each in tensors]
        flats = [t.reduced(each, each_how, own=mine) for each, each_how in zip(tensors, how, strict=True)]

        def start() -> list[MPI.Request]:
            found = []
            for flat, each in zip(flats, how, strict=True):
                buffer = t.spec(flat.memory, each.datatype)
                found.append(self._comm.Ireduce(MPI.IN_PLACE if mine else buffer, buffer if mine else None, each.op, root))
            return found

        return self._collective("reduce", tensors, opts, start, lambda: self._deliver_reduced(flats, how) if mine else None)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:
        inputs = _listed(inputs)
        outputs = [outputs] if outputs and isinstance(outputs[0], torch.Tensor) else outputs
        return self._allgather("all_gather", [_Parts(each) for each in outputs], inputs, opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> MpiWork:
        # outputs[rank][number] here, and not outputs[number][rank]
        turned = [_Parts([row[number] for row in outputs]) for number in range(len(inputs))]
        return self._allgather("all_gather (coalesced)", turned, inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> MpiWork:
        return self._allgather("all_gather_into_tensor", [_Whole(output)], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MpiWork:
        return self._allgather("all_gather_into_tensor (coalesced)", [_Whole(each) for each in outputs], inputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _allgather(self, what: str, outputs: Sequence[_Parts | _Whole], inputs: Tensors, opts: Any) -> MpiWork:
        for output, each in zip(outputs, inputs, strict=True):
            output.fit(what, each, self.size())
        sources = [t.moved(each) for each in inputs]
        sinks = [output.flat(read=False) for output in outputs]
        pairs = [(self._apart(source, sink, gathers=True), sink) for source, sink in zip(sources, sinks, strict=True)]

        def start() -> list[MPI.Request]:
            return [
                self._comm.Iallgather(
                    t.spec(source) if source is not None else MPI.IN_PLACE,
                    [t.memory(sink.memory), sink.memory.numel() // self.size(), t.moving(sink.memory)],
                )
                for source, sink in pairs
            ]

        written = [tensor for output in outputs for tensor in output.tensors]
        return self._collective(what, written, opts or c10d.AllgatherOptions(), start, lambda: _deliver_all(outputs, sinks))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:
        outputs = _listed(outputs)
        inputs = [inputs] if inputs and isinstance(inputs[0], torch.Tensor) else inputs
        return self._reduce_scatter("reduce_scatter", outputs, [_Parts(each) for each in inputs], opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> MpiWork:
        return self._reduce_scatter("reduce_scatter_tensor", [output], [_Whole(input)], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MpiWork:
        wholes = [_Whole(each) for each in inputs]
        return self._reduce_scatter("reduce_scatter_tensor (coalesced)", outputs, wholes, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, what: str, outputs: Tensors, inputs: Sequence[_Parts | _Whole], opts: Any) -> MpiWork:
        opts = opts or c10d.ReduceScatterOptions()
        for output, each in zip(outputs, inputs, strict=True):
            each.fit(what, output, self.size())
        how = [t.reduction(opts.reduceOp, each.dtype) for each in outputs]
        sinks = [t.reduced(each, one, own=True, read=False) for each, one in zip(outputs, how, strict=True)]
        sources = [
            self._apart(t.reduced(each.joined(), one, own=False), sink)
            for each, one, sink in zip(inputs, how, sinks, strict=True)
        ]

        def start() -> list[MPI.Request]:
            return [
                self._comm.Ireduce_scatter_block(t.spec(source, one.datatype), t.spec(sink.memory, one.datatype), one.op)
                for source, one, sink in zip(sources, how, sinks, strict=True)
            ]

        return self._collective(what, outputs, opts, start, lambda: self._deliver_reduced(sinks, how))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MpiWork:
        what = "all_to_all"
        for name, each in (("output", outputs), ("input", inputs)):
            if len(each) != self.size():
                raise Unsupported(f"{what}: {len(each)} {name} tensors for a group of {self.size()}", "give one a rank")
        return self._alltoall(
            what,
            _Parts(outputs),
            _Parts(inputs),
            [each.numel() for each in outputs],
            [each.numel() for each in inputs],
            opts,
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> MpiWork:
        what = "all_to_all_single"
        received = self._splits(what, "output", output, output_split_sizes)
        sent = self._splits(what, "input", input, input_split_sizes)
        return self._alltoall(what, _Whole(output), _Whole(input), received, sent, opts)

    alltoall_base = all_to_all_single

    def _alltoall(
        self, what: str, output: _Parts | _Whole, input: _Parts | _Whole, received: list[int], sent: list[int], opts: Any
    ) -> MpiWork:
        t.check(what, *output.tensors, *input.tensors)
        t.same_dtype(what, *output.tensors, *input.tensors)
        sink = output.flat(read=False)
        source = self._apart(t.moved(input.joined()), sink)

        def start() -> list[MPI.Request]:
            datatype = t.moving(sink.memory)
            return [
                self._comm.Ialltoallv(
                    [t.memory(source), (sent, _starts(sent)), datatype],
                    [t.memory(sink.memory), (received, _starts(received)), datatype],
                )
            ]

        opts = opts or c10d.AllToAllOptions()
        return self._collective(what, output.tensors, opts, start, lambda: _deliver_all([output], [sink]))

    def _splits(self, what: str, name: str, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
        rows = tensor.size(0) if tensor.dim() else 1
        row = tensor.numel() // rows if rows else 0
        if not splits:
            if rows % self.size():
                raise Unsupported(f"{what}: {rows} rows of {name} do not divide by {self.size()} ranks", "give split sizes")
            return [rows // self.size() * row] * self.size()
        if len(splits) != self.size() or sum(splits) != rows:
            raise Unsupported(
                f"{what}: {name} splits {list(splits)} do not cut {rows} rows for {self.size()} ranks", "let them add up"
            )
        return [split * row for split in splits]

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:
        opts = opts or c10d.GatherOptions()
        (tensor,) = _listed(inputs)
        t.check("gather", tensor)
        source = t.moved(tensor).memory
        sinks: list[Flat] = []
        parts: list[_Parts] = []
        if opts.rootRank == self.rank():
            parts = [_Parts(each) for each in outputs]
            parts[0].fit("gather", tensor, self.size())
            sinks = [parts[0].flat(read=False)]

        def start() -> list[MPI.Request]:
            into = [t.memory(sinks[0].memory), source.numel(), t.moving(source)] if sinks else None
            return [self._comm.Igather(t.spec(source), into, opts.rootRank)]

        written = list(parts[0].tensors) if parts else []
        return self._collective("gather", written, opts, start, lambda: _deliver_all(parts, sinks))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:
        opts = opts or c10d.ScatterOptions()
        (tensor,) = _listed(outputs)
        t.check("scatter", tensor)
        sink = t.moved(tensor, read=False)
        source: torch.Tensor | None = None
        if opts.rootRank == self.rank():
            parts = _Parts(inputs[0])
            parts.fit("scatter", tensor, self.size())
            source = parts.joined()

        def start() -> list[MPI.Request]:
            out = [t.memory(source), sink.memory.numel(), t.moving(sink.memory)] if source is not None else None
            return [self._comm.Iscatter(out, t.spec(sink.memory), opts.rootRank)]

        return self._collective("scatter", [tensor], opts, start, lambda: _deliver([sink]))

    def barrier(self, opts: Any = None) -> MpiWork:
        return self._collective("barrier", [], opts or c10d.BarrierOptions(), lambda: [self._comm.Ibarrier()], lambda: None)

    # point to point

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> MpiWork:
        (tensor,) = _listed(tensors)
        t.check("send", tensor)
        flat = t.moved(tensor)

        def start() -> list[MPI.Request]:
            return [self._comm.Isend(t.spec(flat.memory), dstRank, tag)]

        return self._issue(
            f"send to rank {self._world(dstRank)} with tag {tag}", [tensor], None, start, lambda _: None, dstRank
        )

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> MpiWork:
        return self._receive(f"recv from rank {self._world(srcRank)} with tag {tag}", tensors, srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> MpiWork:
        return self._receive(f"recv from any rank with tag {tag}", tensors, None, tag)

    def _receive(self, what: str, tensors: Any, source: int | None, tag: int) -> MpiWork:
        (tensor,) = _listed(tensors)
        t.check("recv", tensor)
        flat = t.moved(tensor, read=False)

        def start() -> list[MPI.Request]:
            return [self._comm.Irecv(t.spec(flat.memory), MPI.ANY_SOURCE if source is None else source, tag)]

        def finish(statuses: list[MPI.Status]) -> int:
            came = statuses[0].Get_count(t.moving(flat.memory))
            if came != flat.memory.numel():
                raise Unsupported(f"{what}: {came} elements came, {flat.memory.numel()} were expected", "send what is received")
            flat.deliver()
            return statuses[0].Get_source()

        return self._issue(what, [tensor], None, start, finish, source)

    def _world(self, rank: int) -> int:
        return self._channel.members[rank]

    # coalescing: operations start at once, the end joins their works

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> MpiWork:
        works, self._batch = self._batch or [], None
        return JoinedWork("coalesced operations", works)

    # how an operation is issued

    @property
    def _comm(self) -> MPI.Intracomm:
        return self._channel.comm

    def _apart(self, source: Flat | torch.Tensor, sink: Flat, *, gathers: bool = False) -> Any:
        """What to send from: memory apart from where MPI receives, or None (in place) for a gather's own part of its output."""
        memory = source.memory if isinstance(source, Flat) else source
        if not t.overlap(memory, sink.memory):
            return memory
        own = sink.memory.data_ptr() + self.rank() * memory.numel() * memory.element_size()
        return None if gathers and memory.data_ptr() == own else memory.clone()

    def _deliver_reduced(self, flats: Sequence[Flat], how: Sequence[t.Reduction]) -> None:
        for flat, each in zip(flats, how, strict=True):
            if each.mean:
                flat.memory.div_(self.size())
            flat.deliver()

    def _collective(
        self,
        what: str,
        outputs: Tensors,
        opts: Any,
        start: Callable[[], list[MPI.Request]],
        finish: Callable[[], None],
    ) -> MpiWork:
        return self._issue(what, outputs, opts, start, lambda _: finish(), None)

    def _issue(
        self,
        what: str,
        outputs: Tensors,
        opts: Any,
        start: Callable[[], list[MPI.Request]],
        finish: Callable[[list[MPI.Status]], int | None],
        peer: int | None,
    ) -> MpiWork:
        """`opts` is None for point-to-point, with `peer` as its other side, where there is one."""
        if self._ended:
            raise GroupEnded(f"{what}: group {self._known_desc!r} ({self._known_name}) has ended", "create it again")
        if self._channel.failure is not None:
            raise self._channel.failure
        asked = opts.timeout.total_seconds() if opts is not None else 0.0
        timeout_s = asked if asked > 0 else self._timeout_s  # torch writes "not set" as a negative time
        deadline = self._engine.clock() + timeout_s
        others = [rank for rank in self._channel.members if rank != self._engine.rank]
        shown = f"{what} on group {self._known_desc!r}" + (f" ({_sizes(outputs)})" if outputs else "")
        work = MpiWork(shown, list(outputs), lambda: deadline - self._engine.clock())
        with self._order:
            number = None
            if opts is not None:
                self._channel.issued += 1
                number = self._channel.issued
            self._channel.doing = what
            self._engine.issue(
                Operation(
                    what=shown,
                    channel=self._channel,
                    start=start,
                    work=work,
                    deadline=deadline,
                    timeout_s=timeout_s,
                    number=number,
                    needs=tuple(others if peer is None else [self._world(peer)]),
                    finish=finish,
                    can_cancel=what.startswith("recv"),
                )
            )
        if self._batch is not None:
            self._batch.append(work)
        return work


class _Whole:
    """One tensor that holds a part for each rank."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensors: Tensors = [tensor]

    def fit(self, what: str, part: torch.Tensor, size: int) -> None:
        whole = self.tensors[0]
        t.check(what, whole, part)
        t.same_dtype(what, whole, part)
        if whole.numel() != part.numel() * size:
            raise Unsupported(
                f"{what}: {whole.numel()} elements are not {size} parts of {part.numel()}", "give every rank an equal part"
            )

    def flat(self, *, read: bool) -> Flat:
        return t.moved(self.tensors[0], read=read)

    def joined(self) -> torch.Tensor:
        return self.tensors[0]

    def deliver(self, sink: Flat) -> None:
        sink.deliver()


class _Parts:
    """A tensor for each rank; MPI sees them joined."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def fit(self, what: str, part: torch.Tensor, size: int) -> None:
        t.check(what, part, *self.tensors)
        t.same_dtype(what, part, *self.tensors)
        if [each.numel() for each in self.tensors] != [part.numel()] * size:
            raise Unsupported(
                f"{what}: tensors of {[each.numel() for each in self.tensors]} elements are not {size} parts of {part.numel()}",
                "give every rank an equal part",
            )

    def flat(self, *, read: bool) -> Flat:
        first = self.tensors[0]
        memory = torch.empty(sum(each.numel() for each in self.tensors), dtype=first.dtype)
        return Flat(first, memory, copied=False)

    def joined(self) -> torch.Tensor:
        return torch.cat([each.detach().reshape(-1) for each in self.tensors])

    def deliver(self, sink: Flat) -> None:
        for tensor, part in zip(self.tensors, sink.memory.split([each.numel() for each in self.tensors]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))


def _deliver(flats: Sequence[Flat]) -> None:
    for flat in flats:
        flat.deliver()


def _deliver_all(outputs: Sequence[_Parts | _Whole], sinks: Sequence[Flat]) -> None:
    for output, sink in zip(outputs, sinks, strict=True):
        output.deliver(sink)


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _starts(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]


def _sizes(tensors: Tensors) -> str:
    return f"{len(tensors)} tensor{'s' * (len(tensors) > 1)}, {sum(each.numel() for each in tensors)} {tensors[0].dtype}"
