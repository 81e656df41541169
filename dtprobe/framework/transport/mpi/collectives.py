"""The collectives of DDP, DTensor and FSDP2 in terms of MPI's non-blocking ones.

Every method checks its arguments in the caller's thread, makes a copy of what is not plain memory (a transposed tensor, say),
and hands closures to the engine: one starts MPI's requests, one brings the results where they belong. Names that torch 2.13
introduced (`all_gather_single`) stand beside those of 2.9 (`_allgather_base`); torch calls either.
"""

# torch's stub gives most of these a second form, for C++'s convenience, which nobody uses with a Python group
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C import _distributed_c10d as c10d

from dtprobe.framework.transport.mpi import tensors as t
from dtprobe.framework.transport.mpi.errors import Unsupported
from dtprobe.framework.transport.mpi.exchange import Exchange, pays
from dtprobe.framework.transport.mpi.parts import Parts, Tensors, Whole
from dtprobe.framework.transport.mpi.tensors import Flat
from dtprobe.framework.transport.mpi.work import MpiWork


class Collectives(dist.ProcessGroup):
    """What `MpiGroup` does with tensors; how it gets an operation to the engine is `_collective`'s matter.

    Tensors are dense and on the host; all raise Unsupported for others, for unequal parts, and for a reduce operation that the
    dtype does not have. Each returns the work in flight, `opts` being torch's own option objects.
    """

    @property
    @abstractmethod
    def _comm(self) -> MPI.Intracomm: ...

    @abstractmethod
    def _sum(self, memory: torch.Tensor, how: t.Reduction) -> Exchange: ...

    @abstractmethod
    def _collective(
        self,
        what: str,
        outputs: Tensors,
        opts: Any,
        start: Callable[[], list[MPI.Request]],
        finish: Callable[[], None],
        then: Callable[[], list[MPI.Request]] | None = None,
    ) -> MpiWork: ...

    def allreduce(self, tensors: Any, opts: Any = None) -> MpiWork:
        opts = opts or c10d.AllreduceOptions()
        return self._allreduce("all_reduce", listed(tensors), opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> MpiWork:
        return self._allreduce("all_reduce (coalesced)", tensors, opts or c10d.AllreduceCoalescedOptions())

    def _allreduce(self, what: str, tensors: Tensors, opts: Any) -> MpiWork:
        t.check(what, *tensors)
        how = [t.reduction(opts.reduceOp, each.dtype) for each in tensors]
        if all(pays(each, one, self.size()) for each, one in zip(tensors, how, strict=True)):
            return self._exchange(what, tensors, how, opts)
        flats = [t.reduced(each, one, own=True) for each, one in zip(tensors, how, strict=True)]

        def start() -> list[MPI.Request]:
            return [
                self._comm.Iallreduce(MPI.IN_PLACE, t.spec(flat.memory, each.datatype), each.op)
                for flat, each in zip(flats, how, strict=True)
            ]

        return self._collective(what, tensors, opts, start, lambda: self._deliver_reduced(flats, how))

    def _exchange(self, what: str, tensors: Tensors, how: Sequence[t.Reduction], opts: Any) -> MpiWork:
        flats = [t.exchanged(each) for each in tensors]
        sums = [self._sum(flat.memory, one) for flat, one in zip(flats, how, strict=True)]
        return self._collective(
            what,
            tensors,
            opts,
            start=lambda: [request for each in sums for request in each.send_parts()],
            then=lambda: [request for each in sums for request in each.hand_round()],
            finish=lambda: _deliver(flats),
        )

    def broadcast(self, tensors: Any, opts: Any = None) -> MpiWork:
        opts = opts or c10d.BroadcastOptions()
        tensors = listed(tensors)
        t.check("broadcast", *tensors)
        root = opts.rootRank
        flats = [t.moved(each, read=root == self.rank()) for each in tensors]

        def start() -> list[MPI.Request]:
            return [self._comm.Ibcast(t.spec(flat.memory), root) for flat in flats]

        return self._collective("broadcast", tensors, opts, start, lambda: _deliver(flats if root != self.rank() else ()))

    def reduce(self, tensors: Any, opts: Any = None) -> MpiWork:
        opts = opts or c10d.ReduceOptions()
        tensors = listed(tensors)
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
        inputs = listed(inputs)
        outputs = [outputs] if outputs and isinstance(outputs[0], torch.Tensor) else outputs
        return self._allgather("all_gather", [Parts(each) for each in outputs], inputs, opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> MpiWork:
        # outputs[rank][number] here, and not outputs[number][rank]
        turned = [Parts([row[number] for row in outputs]) for number in range(len(inputs))]
        return self._allgather("all_gather (coalesced)", turned, inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> MpiWork:
        return self._allgather("all_gather_into_tensor", [Whole(output)], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MpiWork:
        return self._allgather("all_gather_into_tensor (coalesced)", [Whole(each) for each in outputs], inputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _allgather(self, what: str, outputs: Sequence[Parts | Whole], inputs: Tensors, opts: Any) -> MpiWork:
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
        outputs = listed(outputs)
        inputs = [inputs] if inputs and isinstance(inputs[0], torch.Tensor) else inputs
        return self._reduce_scatter("reduce_scatter", outputs, [Parts(each) for each in inputs], opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> MpiWork:
        return self._reduce_scatter("reduce_scatter_tensor", [output], [Whole(input)], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MpiWork:
        wholes = [Whole(each) for each in inputs]
        return self._reduce_scatter("reduce_scatter_tensor (coalesced)", outputs, wholes, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, what: str, outputs: Tensors, inputs: Sequence[Parts | Whole], opts: Any) -> MpiWork:
        opts = opts or c10d.ReduceScatterOptions()
        for output, each in zip(outputs, inputs, strict=True):
            each.fit(what, output, self.size())
        how = [t.reduction(opts.reduceOp, each.dtype) for each in outputs]
        joined = [each.joined() for each in inputs]
        if all(pays(each, one, self.size()) for each, one in zip(joined, how, strict=True)):
            return self._scatter_sums(what, outputs, joined, how, opts)
        sinks = [t.reduced(each, one, own=True, read=False) for each, one in zip(outputs, how, strict=True)]
        sources = [
            self._apart(t.reduced(each, one, own=False), sink) for each, one, sink in zip(joined, how, sinks, strict=True)
        ]

        def start() -> list[MPI.Request]:
            return [
                self._comm.Ireduce_scatter_block(
                    [t.memory(source), sink.memory.numel(), one.datatype], t.spec(sink.memory, one.datatype), one.op
                )
                for source, one, sink in zip(sources, how, sinks, strict=True)
            ]

        return self._collective(what, outputs, opts, start, lambda: self._deliver_reduced(sinks, how))

    def _scatter_sums(self, what: str, outputs: Tensors, inputs: Tensors, how: Sequence[t.Reduction], opts: Any) -> MpiWork:
        sinks = [t.exchanged(each, read=False) for each in outputs]
        sources = [t.exchanged(each) for each in inputs]
        sums = [self._sum(flat.memory, one) for flat, one in zip(sources, how, strict=True)]

        def finish() -> None:
            for each, sink in zip(sums, sinks, strict=True):
                each.add(sink.memory)
                sink.deliver()

        start = lambda: [request for each in sums for request in each.send_parts()]  # noqa: E731
        return self._collective(what, outputs, opts, start, finish)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MpiWork:
        what = "all_to_all"
        for name, each in (("output", outputs), ("input", inputs)):
            if len(each) != self.size():
                raise Unsupported(f"{what}: {len(each)} {name} tensors for a group of {self.size()}", "give one a rank")
        return self._alltoall(
            what,
            Parts(outputs),
            Parts(inputs),
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
        return self._alltoall(what, Whole(output), Whole(input), received, sent, opts)

    alltoall_base = all_to_all_single

    def _alltoall(
        self, what: str, output: Parts | Whole, input: Parts | Whole, received: list[int], sent: list[int], opts: Any
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
        (tensor,) = listed(inputs)
        t.check("gather", tensor)
        source = t.moved(tensor).memory
        sinks: list[Flat] = []
        parts: list[Parts] = []
        if opts.rootRank == self.rank():
            parts = [Parts(each) for each in outputs]
            parts[0].fit("gather", tensor, self.size())
            sinks = [parts[0].flat(read=False)]

        def start() -> list[MPI.Request]:
            into = [t.memory(sinks[0].memory), source.numel(), t.moving(source)] if sinks else None
            return [self._comm.Igather(t.spec(source), into, opts.rootRank)]

        written = list(parts[0].tensors) if parts else []
        return self._collective("gather", written, opts, start, lambda: _deliver_all(parts, sinks))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:
        opts = opts or c10d.ScatterOptions()
        (tensor,) = listed(outputs)
        t.check("scatter", tensor)
        sink = t.moved(tensor, read=False)
        source: torch.Tensor | None = None
        if opts.rootRank == self.rank():
            parts = Parts(inputs[0])
            parts.fit("scatter", tensor, self.size())
            source = parts.joined()

        def start() -> list[MPI.Request]:
            out = [t.memory(source), sink.memory.numel(), t.moving(sink.memory)] if source is not None else None
            return [self._comm.Iscatter(out, t.spec(sink.memory), opts.rootRank)]

        return self._collective("scatter", [tensor], opts, start, lambda: _deliver([sink]))

    def barrier(self, opts: Any = None) -> MpiWork:
        return self._collective("barrier", [], opts or c10d.BarrierOptions(), lambda: [self._comm.Ibarrier()], lambda: None)

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


def _deliver(flats: Sequence[Flat]) -> None:
    for flat in flats:
        flat.deliver()


def _deliver_all(outputs: Sequence[Parts | Whole], sinks: Sequence[Flat]) -> None:
    for output, sink in zip(outputs, sinks, strict=True):
        output.deliver(sink)


def listed(tensors: Any) -> list[torch.Tensor]:
    """The tensors of an argument that may be one tensor."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _starts(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]
