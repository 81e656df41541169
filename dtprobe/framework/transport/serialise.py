"""What may travel in a remote procedure call (torch.distributed.rpc): classes that were registered, and nothing else.

    registry = Registry()
    registry.register(Box, flatten=lambda box: (box.weight, box.note), rebuild=Box, version=1)
    registry.register_tensor(Scaled, attributes=("scale",))
    registry.allow(train_step)  # what others may call here
    with registry.installed():  # on every rank, around init_rpc and shutdown
        rpc.init_rpc(...)

torch's own pickler (2.9 to 2.13) sends an exact `torch.Tensor` beside the pickle, where distributed autograd sees it. What it does
to the rest, measured: the gradient of a tensor subclass or of an `nn.Parameter` is silently missing after
`dist_autograd.backward`, because both are pickled with their values; attributes of a plain tensor are lost; a class that holds
a lock, file or handle raises TypeError; and the receiver runs whatever the pickle names, before any function of it is called.

Here all tensors travel beside the pickle, also those inside registered classes, so that distributed autograd goes on through
them. A Parameter arrives as the tensor it is, with the gradient flowing back to it. Names carry versions. The receiver
looks names up in its registry: it imports nothing and calls nothing that was not registered.

Not covered: ScriptModules. A peer that holds an RRef may call any method of what it refers to, as torch has it.
"""

from __future__ import annotations

import collections
import contextlib
import io
import json
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dtprobe.errors import Unavailable, UsageError
from dtprobe.framework.errors import RankError
from dtprobe.framework.part import torch_distributed

T = TypeVar("T")
_MAGIC, _CALL, _VALUE = b"dtprobe.serialise/1\n", b"call\n", b"value\n"
_REMEDY = (
    "register the same classes and functions on every rank before init_rpc (dtprobe.framework.transport.serialise.Registry)"
)
_PLAIN: dict[tuple[str, str], Any] = {
    (each.__module__, each.__qualname__): each
    for each in (complex, set, frozenset, range, slice, bytearray, collections.OrderedDict, torch.Size, torch.device)
}
_PLAIN |= {("torch", str(each)[6:]): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def probe() -> Unavailable | None:
    """None where torch was built with torch.distributed.rpc (TensorPipe)."""
    if missing := torch_distributed():
        return missing
    from torch.distributed import rpc

    return None if rpc.is_available() else Unavailable("this torch was built without torch.distributed.rpc", "install another")


class Refused(RankError):
    """A message names something that was not registered where it arrived; nothing of it was imported, made or called.

    Raised on the caller, in the words of the worker that refused; `ranks` holds that worker.
    """


class WrongVersion(Refused):
    """A registered class in another version than the receiver's."""


class Unregistered(RankError):
    """The sender has an object of a class, or a function, that was not registered; nothing was sent. `ranks` holds the sender."""


@dataclass(frozen=True)
class Wire:
    """How one class travels: `flatten` gives parts, `rebuild` makes the object of them again.

    Parts are tensors, plain data, containers of them and objects of registered classes.
    """

    cls: type
    name: str
    version: int
    flatten: Callable[[Any], Sequence[Any]]
    rebuild: Callable[..., Any]


class Registry:
    """The classes that may travel, and the functions that may be called. Equal on all ranks, filled before it is installed."""

    def __init__(self) -> None:
        self._by_class: dict[type, Wire] = {}
        self._by_name: dict[str, Wire] = {}
        self._allowed: dict[tuple[str, str], Any] = {}
        self.register(torch.nn.Parameter, _value_of, _itself, name="torch.nn.Parameter")

    def register(
        self,
        cls: type[T],
        flatten: Callable[[T], Sequence[Any]],
        rebuild: Callable[..., Any],
        *,
        name: str | None = None,
        version: int = 1,
    ) -> None:
        """Let objects of exactly `cls` travel as `flatten(object)`, and be made again by `rebuild(*parts)`.

        `name` (default: module and qualified name) is what the message says; raise `version` when the parts change.
        """
        known = name if name is not None else f"{cls.__module__}.{cls.__qualname__}"
        for taken in (self._by_class.get(cls), self._by_name.get(known)):
            if taken is not None:
                raise UsageError(
                    f"{cls.__qualname__} as {known!r}: {taken.cls.__qualname__} is registered as {taken.name!r}",
                    "register once",
                )
        self._by_class[cls] = self._by_name[known] = Wire(cls, known, version, flatten, rebuild)

    def register_tensor(
        self, cls: type[torch.Tensor], attributes: Sequence[str] = (), *, name: str | None = None, version: int = 1
    ) -> None:
        """Let a tensor subclass made by `as_subclass` travel, with `attributes` of its objects; its gradient flows through.

        A subclass that wraps other tensors (`_make_wrapper_subclass`) needs `register`, with functions that take it apart.
        """

        def flatten(tensor: torch.Tensor) -> Sequence[Any]:
            return (_value_of(tensor)[0], {each: getattr(tensor, each) for each in attributes if hasattr(tensor, each)})

        def rebuild(value: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            made = value.as_subclass(cls)
            for each, what in extra.items():
                setattr(made, each, what)
            return made

        self.register(cls, flatten, rebuild, name=name, version=version)

    def allow(self, *callables: Any) -> Any:
        """Let others call these functions or classes here; returns the first, so that it can stand above a function."""
        for each in callables:
            self._allowed[each.__module__, each.__qualname__] = each
        return callables[0]

    @contextlib.contextmanager
    def installed(self) -> Iterator[Registry]:
        """Use this registry for every remote procedure call of this process, on all ranks, until the block ends.

        The block must surround init_rpc and shutdown, which call each other remotely themselves.
        """
        from torch.distributed.rpc import api, internal

        before = internal._internal_rpc_pickler, api._default_pickler, api._invoke_rpc
        mine = _pickler(self)
        internal._internal_rpc_pickler = api._default_pickler = mine  # torch has no public place for any of the three
        api._invoke_rpc = _with_typed_refusals(api._invoke_rpc)
        try:
            yield self
        finally:
            internal._internal_rpc_pickler, api._default_pickler, api._invoke_rpc = before

    def wire_of(self, cls: type) -> Wire | None:
        return self._by_class.get(cls)

    def rebuilt(self, name: str, version: int, parts: Sequence[Any]) -> Any:
        """The object that a message calls `name`; raises Refused or WrongVersion."""
        wire = self._by_name.get(name)
        if wire is None:
            raise _refusal(Refused, f"class {name!r} is not registered here")
        if wire.version != version:
            raise _refusal(WrongVersion, f"class {name!r} came in version {version}, and is registered here in {wire.version}")
        return wire.rebuild(*parts)

    def named(self, module: str, name: str) -> Any | None:
        """What a message may mean by `module` and `name`: only what is known already, nothing is imported."""
        known = self._allowed.get((module, name)) or _PLAIN.get((module, name)) or _internals().get((module, name))
        if known is not None or "." in name:
            return known
        # what a call raised comes back as its type; one that this process never imported stays refused
        raised = vars(sys.modules.get(module, object)).get(name)
        is_exception = isinstance(raised, type) and issubclass(raised, Exception)
        return raised if is_exception and raised.__module__ == module else None


def _pickler(registry: Registry) -> Any:
    from torch.distributed.rpc import internal

    class RegistryPickler(internal._InternalRPCPickler):
        """What torch.distributed.rpc calls to write and read: the class it knows, with neither of its ways."""

        def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
            body = io.BytesIO()
            writer = _Writer(registry, body)
            writer.dump(obj)
            kind = _CALL if isinstance(obj, internal.PythonUDF) else _VALUE
            references = json.dumps(writer.references).encode() + b"\n"
            return _MAGIC + kind + references + body.getvalue(), writer.tensors

        def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
            if binary_data.startswith(_MAGIC + _VALUE):
                return _opened(binary_data).read(registry, tensor_table)
            # A call is read when it runs: distributed autograd knows its tensors only after this returned, so nothing may be derived
            # from them yet; and what it raises there goes to the caller. RRefs are counted here.
            try:
                message = _opened(binary_data)
            except Refused as error:
                return internal.PythonUDF(_raising(error.detached()), (), {})
            return internal.PythonUDF(lambda: _run(message.read(registry, tensor_table)), (), {})

    return RegistryPickler()


class _Writer(pickle.Pickler):
    def __init__(self, registry: Registry, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=4)
        self._registry = registry
        self._places: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []
        self.references: list[Any] = []

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        if type(obj) is torch.Tensor:
            if id(obj) not in self._places:
                self._places[id(obj)] = len(self.tensors)
                self.tensors.append(obj)
            return "tensor", self._places[id(obj)]
        if isinstance(obj, dist.rpc.PyRRef | dist.rpc.RRef):
            self.references.append(obj._serialize())
            return "rref", len(self.references) - 1
        return None

    def reducer_override(self, obj: Any) -> Any:
        if obj is _rebuilt:
            return NotImplemented
        wire = self._registry.wire_of(type(obj))
        if wire is not None:
            return _rebuilt, (wire.name, wire.version, tuple(wire.flatten(obj)))
        named = obj if isinstance(obj, type) or callable(obj) else type(obj)
        module, name = getattr(named, "__module__", ""), getattr(named, "__qualname__", type(named).__qualname__)
        if isinstance(obj, torch.dtype):
            module, name = "torch", str(obj)[6:]
        if self._registry.named(module, name) is None:
            raise _about_here(Unregistered, f"{module}.{name} is not registered, and was not sent")
        return NotImplemented


@dataclass(frozen=True)
class _Message:
    """A message that is ours, with its references counted and its body unread."""

    references: list[Any]
    body: bytes

    def read(self, registry: Registry, tensors: list[torch.Tensor]) -> Any:
        try:
            return _Reader(registry, self, tensors).load()
        except RankError:
            raise
        except Exception as error:  # noqa: BLE001  (a hostile pickle raises anything; so may a rebuild)
            raise _refusal(Refused, f"the message does not read: {type(error).__name__}: {error}") from None


def _opened(data: bytes) -> _Message:
    if not data.startswith(_MAGIC):
        raise _refusal(Refused, "a plain pickle came, from a peer on which no registry is installed")
    _, _, rest = data[len(_MAGIC) :].partition(b"\n")
    references, _, body = rest.partition(b"\n")
    try:
        return _Message([dist.rpc.PyRRef._deserialize(tuple(each)) for each in json.loads(references)], body)
    except (ValueError, TypeError, RuntimeError) as error:
        raise _refusal(Refused, f"the references do not read: {type(error).__name__}: {error}") from None


class _Reader(pickle.Unpickler):
    def __init__(self, registry: Registry, message: _Message, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(message.body))
        self._registry = registry
        self._tables = {"tensor": tensors, "rref": message.references}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (_rebuilt.__module__, _rebuilt.__qualname__):
            return self._registry.rebuilt
        found = self._registry.named(module, name)
        if found is None:
            raise _refusal(Refused, f"{module}.{name} is not registered here")
        return found

    def persistent_load(self, pid: Any) -> Any:
        table, place = pid
        return self._tables[table][place]


def _raising(error: Exception) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


def _run(call: Any) -> Any:
    if not isinstance(call, tuple) or len(call) != 3:
        raise _refusal(Refused, f"a call came as {type(call).__name__}")
    function, args, kwargs = call
    return function(*args, **kwargs)


def _rebuilt(name: str, version: int, parts: Sequence[Any]) -> Any:
    """Stands in a message for `Registry.rebuilt` of the receiver; never called."""
    raise AssertionError(f"{name} {version} read without a registry")


def _refusal(kind: type[Refused], what: str) -> RankError:
    return _about_here(kind, f"refused a message: {what}")


def _about_here(kind: type[RankError], what: str) -> RankError:
    me = dist.rpc.get_worker_info()
    return kind(f"worker {me.name!r} (rank {me.id}): {what}", _REMEDY, ranks=(me.id,))


_TOLD = re.compile(r"\b(Refused|WrongVersion|Unregistered): (worker '[^']*' \(rank (\d+)\): [^\n]*)")


def _with_typed_refusals(invoke: Callable[..., torch.futures.Future]) -> Callable[..., torch.futures.Future]:
    """torch turns every error from another worker into RuntimeError; a refusal is one again in whoever waits for the call."""

    def settle(done: torch.futures.Future) -> Any:
        try:
            return done.wait()
        except Exception as error:  # noqa: BLE001  (raised again, as it is, where the call is waited for)
            return _Failed(_typed(error))

    def unwrap(value: Any) -> Any:
        if isinstance(value, _Failed):
            raise value.error
        return value

    def invoked(*args: Any, **options: Any) -> torch.futures.Future:
        future = invoke(*args, **options).then(settle)
        future._set_unwrap_func(unwrap)
        return future

    return invoked


@dataclass(frozen=True)
class _Failed:
    error: Exception


def _typed(error: Exception) -> Exception:
    told = _TOLD.search(str(error))
    if told is None:
        return error
    kind = {"Refused": Refused, "WrongVersion": WrongVersion, "Unregistered": Unregistered}[told[1]]
    return kind(told[2], ranks=(int(told[3]),))


def _internals() -> dict[tuple[str, str], Any]:
    """What torch.distributed.rpc itself sends: its calls for starting, stopping and references, and its envelopes."""
    from torch.distributed.rpc import api, internal, rref_proxy

    own = (
        api._gather_to_leader,
        api._broadcast_to_followers,
        api._rref_typeof_on_owner,
        rref_proxy._local_invoke,
        rref_proxy._local_invoke_async_execution,
        internal.PythonUDF,
        internal.RemoteException,
    )
    return {(each.__module__, each.__qualname__): each for each in own}


def _value_of(tensor: torch.Tensor) -> tuple[torch.Tensor]:
    """The same values as an exact torch.Tensor; differentiable, so that a gradient finds its way back."""
    with torch._C.DisableTorchFunctionSubclass():
        return (tensor.as_subclass(torch.Tensor),)


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value
