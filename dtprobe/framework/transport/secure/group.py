"""A process group whose every operation travels encrypted over the gloo group behind it; what it cannot do it refuses."""

# mypy: disable-error-code="override, assignment"
# torch's stub lists each overload with the options of one version; here one signature takes them all

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtprobe.framework.errors import FrameworkError
from dtprobe.framework.forwarding import COLLECTIVES, ForwardingGroup
from dtprobe.framework.transport.secure.collectives import Collectives, reduction
from dtprobe.framework.transport.secure.errors import NotCovered
from dtprobe.framework.transport.secure.records import Rotation
from dtprobe.framework.transport.secure.session import Session
from dtprobe.framework.transport.secure.wire import COLLECTIVES as COLLECTIVE_TAG
from dtprobe.framework.transport.secure.wire import Members, Wire, covered
from dtprobe.framework.transport.secure.works import CollectiveWork, MessageWork, Progress

Tensors = Sequence[torch.Tensor]


class SecureGroup(ForwardingGroup):
    """Stands in front of the gloo group `inner`; `members` are its global ranks in group order.

    Collectives of one group run in the order in which they were called, asynchronous ones on a thread of the group's own; those
    of several groups, and messages, do not wait for each other. A failed one raises from `wait`, and so do those after it.
    """

    def __init__(
        self, inner: dist.ProcessGroup, session: Session, members: tuple[int, ...], rotation: Rotation | None = None
    ) -> None:
        super().__init__(inner)
        self._known_backend = f"dtprobe:secure:{inner.name()}"
        self._wire = Wire(lambda: self.inner, session, Members(members, inner.rank()), rotation)
        self._progress = Progress(inner.group_desc)

    def rotate(self) -> None:
        """From the next record on, everything that this rank sends is under keys of the next epoch. Local; receivers follow."""
        self._wire.rotate()

    @property
    def busy(self) -> bool:
        return self._progress.busy

    def let_go(self) -> None:
        self._progress.end()
        super().let_go()

    def shutdown(self) -> None:
        self._progress.end()
        super().shutdown()
        self.let_go()  # what stands in front of this group may not know that there is something to let go

    # point-to-point

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> MessageWork:
        tensor = _one(tensors)
        sent = self._wire.send(tensor.detach().contiguous(), dstRank, "send", _tag(tag))
        return MessageWork.sent(sent, self.rank())

    def recv(self, tensors: Tensors, srcRank: int | None, tag: int = 0) -> MessageWork:
        tensor = _one(tensors).detach()
        target = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        expected = self._wire.expect(target, srcRank, "send", _tag(tag))
        return MessageWork.expected(self._wire, expected, lambda: _copy_back([(tensor, target)]))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> MessageWork:
        return self.recv(tensors, None, tag)

    # collectives

    def allreduce(self, tensors: Any, opts: Any = None, **options: Any) -> CollectiveWork:
        return self._reduced("all_reduce", [_one(tensors)], opts, options)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> CollectiveWork:
        return self._reduced("all_reduce_coalesced", list(tensors), opts, {})

    def _reduced(self, name: str, tensors: list[torch.Tensor], opts: Any, options: dict[str, Any]) -> CollectiveWork:
        op = _op(opts, options)
        with_rows = _rows(tensors)

        def job(run: Collectives) -> None:
            for _, tensor in with_rows:
                run.all_reduce(tensor, op)
            _copy_back(with_rows)

        return self._run(name, job, tensors, opts, options)

    def broadcast(self, tensors: Any, opts: Any = None, root: int = 0, **options: Any) -> CollectiveWork:
        with_rows = _rows([_one(tensors)])
        root = getattr(opts, "rootRank", root)

        def job(run: Collectives) -> None:
            run.broadcast(with_rows[0][1], root)
            _copy_back(with_rows)

        return self._run("broadcast", job, [with_rows[0][0]], opts, options)

    def reduce(self, tensors: Any, opts: Any = None, root: int = 0, **options: Any) -> CollectiveWork:
        with_rows = _rows([_one(tensors)])
        root, op = getattr(opts, "rootRank", root), _op(opts, options)

        def job(run: Collectives) -> None:
            run.reduce(with_rows[0][1], op, root)
            _copy_back(with_rows)

        return self._run("reduce", job, [with_rows[0][0]], opts, options)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, **options: Any) -> CollectiveWork:
        return self._gathered("all_gather", [(_list(output_tensors), _one(input_tensors))], opts, options)

    def allgather_coalesced(self, output_lists: Any, input_list: Tensors, opts: Any = None) -> CollectiveWork:
        pairs = [([each[at] for each in output_lists], mine) for at, mine in enumerate(input_list)]
        return self._gathered("all_gather_coalesced", pairs, opts, {})

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, **options: Any) -> CollectiveWork:
        return self.all_gather_single_coalesced([output], [input], opts, **options)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, **options: Any
    ) -> CollectiveWork:
        pairs = [(self._split(output), mine) for output, mine in zip(outputs, inputs, strict=True)]
        return self._gathered("all_gather_into_tensor", pairs, opts, options)

    def _gathered(
        self, name: str, pairs: list[tuple[list[torch.Tensor], torch.Tensor]], opts: Any, options: dict[str, Any]
    ) -> CollectiveWork:
        with_rows = [_rows(outputs) for outputs, _ in pairs]
        mine = [_row(tensor) for _, tensor in pairs]

        def job(run: Collectives) -> None:
            for rows, each in zip(with_rows, mine, strict=True):
                run.all_gather([row for _, row in rows], each)
                _copy_back(rows)

        return self._run(name, job, [tensor for outputs, _ in pairs for tensor in outputs], opts, options)

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, **options: Any) -> CollectiveWork:
        return self._scattered("reduce_scatter", [(_one(output_tensors), _list(input_tensors))], opts, options)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, **options: Any
    ) -> CollectiveWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts, **options)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, **options: Any
    ) -> CollectiveWork:
        pairs = [(output, self._split(_row(whole))) for output, whole in zip(outputs, inputs, strict=True)]
        return self._scattered("reduce_scatter_tensor", pairs, opts, options)

    def _scattered(
        self, name: str, pairs: list[tuple[torch.Tensor, list[torch.Tensor]]], opts: Any, options: dict[str, Any]
    ) -> CollectiveWork:
        op = _op(opts, options)
        with_rows = _rows([output for output, _ in pairs])
        inputs = [[_row(tensor) for tensor in each] for _, each in pairs]

        def job(run: Collectives) -> None:
            for (_, row), each in zip(with_rows, inputs, strict=True):
                run.reduce_scatter(row, each, op)
            _copy_back(with_rows)

        return self._run(name, job, [output for output, _ in pairs], opts, options)

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: int = 0, **options: Any
    ) -> CollectiveWork:
        root = getattr(opts, "rootRank", root)
        outputs = _list(output_tensors) if self.rank() == root else []
        with_rows, mine = _rows(outputs), _row(_one(input_tensors))

        def job(run: Collectives) -> None:
            run.gather([row for _, row in with_rows], mine, root)
            _copy_back(with_rows)

        return self._run("gather", job, outputs, opts, options)

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: int = 0, **options: Any
    ) -> CollectiveWork:
        root = getattr(opts, "rootRank", root)
        with_rows = _rows([_one(output_tensors)])
        inputs = [_row(tensor) for tensor in _list(input_tensors)] if self.rank() == root else []

        def job(run: Collectives) -> None:
            run.scatter(with_rows[0][1], inputs, root)
            _copy_back(with_rows)

        return self._run("scatter", job, [with_rows[0][0]], opts, options)

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> CollectiveWork:
        return self._exchanged("all_to_all", list(output_tensors), list(input_tensors), opts, {})

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        **options: Any,
    ) -> CollectiveWork:
        whole = _rows([output])
        outputs = self._split(whole[0][1], output_split_sizes)
        inputs = self._split(_row(input), input_split_sizes)
        return self._exchanged("all_to_all_single", outputs, inputs, opts, options, whole)

    def _exchanged(
        self,
        name: str,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any,
        options: dict[str, Any],
        whole: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> CollectiveWork:
        with_rows, sources = _rows(outputs), [_row(tensor) for tensor in inputs]

        def job(run: Collectives) -> None:
            run.all_to_all([row for _, row in with_rows], sources)
            _copy_back([*with_rows, *(whole or ())])

        return self._run(name, job, [pair[0] for pair in whole or with_rows], opts, options)

    def barrier(self, opts: Any = None, **options: Any) -> CollectiveWork:
        return self._run("barrier", lambda run: run.barrier(), [], opts, options)

    # what torch has renamed
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _split(self, whole: torch.Tensor, sizes: Sequence[int] = ()) -> list[torch.Tensor]:
        """`whole` by rows: in parts of `sizes`, or equal ones for every member."""
        if sizes:
            return list(whole.split(list(sizes)))
        return list(whole.view(self.size(), -1).unbind()) if whole.numel() else [whole.view(-1)] * self.size()

    def _run(
        self,
        name: str,
        job: Callable[[Collectives], None],
        outputs: list[torch.Tensor],
        opts: Any,
        options: dict[str, Any],
    ) -> CollectiveWork:
        timeout = options.pop("timeout", None) or getattr(opts, "timeout", None) or timedelta(0)
        if options:
            raise NotCovered(f"{name} with {', '.join(options)}", "use the calls of torch.distributed")
        run = Collectives(self._wire, name, max(timeout, timedelta(0)))
        work = CollectiveWork(f"{name} on group {self.group_desc!r}", outputs)
        return self._progress.run(work, lambda: job(run), waits=not getattr(opts, "asyncOp", True))


def _refused(name: str) -> Callable[..., Any]:
    def method(self: SecureGroup, *args: Any, **options: Any) -> Any:
        raise NotCovered(f"{name} is not among the operations of the encrypted transport", "it would travel in the clear")

    method.__name__ = name
    return method


for _name in (*COLLECTIVES, "_start_coalescing", "_end_coalescing", "split_group", "merge_remote_group"):
    if _name not in vars(SecureGroup) and hasattr(dist.ProcessGroup, _name):
        setattr(SecureGroup, _name, _refused(_name))


def _one(tensors: Any) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise FrameworkError(f"{len(tensors)} tensors in one call", "pass one tensor a rank")
    return tensors[0]


def _list(tensors: Any) -> list[torch.Tensor]:
    return list(tensors if not tensors or isinstance(tensors[0], torch.Tensor) else tensors[0])


def _row(tensor: torch.Tensor) -> torch.Tensor:
    covered(tensor)
    return tensor.detach().contiguous()


def _rows(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor, and a contiguous one with its contents: itself where it is contiguous."""
    return [(tensor, _row(tensor)) for tensor in tensors]


def _copy_back(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, row in pairs:
        if tensor.data_ptr() != row.data_ptr():
            tensor.detach().copy_(row)


def _op(opts: Any, options: dict[str, Any]) -> Any:
    given = options.pop("op", opts)
    return reduction(getattr(given, "reduceOp", given if given is not None else dist.ReduceOp.SUM))


def _tag(tag: int) -> int:
    if not 0 <= tag < COLLECTIVE_TAG:
        raise NotCovered(f"tag {tag}", f"use tags from 0 to {COLLECTIVE_TAG - 1}")
    return tag
