"""In a rank: what the faults of collectives do to the calls that they are due at.

Each action prepares first and touches nothing of the job until it is known to be possible; what is impossible is said as
refused, and the call is issued as it was.
"""

from __future__ import annotations

import math
import time

import _dtprobe_calls as calls
from _dtprobe_faults import parts, say


class Refused(Exception):
    """The fault cannot be applied to this call; the text says why."""


def install(hook) -> None:
    for part in parts(hook, "collective"):
        if part["action"] == "group_order":
            calls.watch_groups(hook, part, _exchanging(hook, part))
        else:
            calls.watch(hook, part, _acting(hook, part), ops=part["ops"])


class Fault:
    """A fault at one call: its parameters, and how to say that it fired."""

    def __init__(self, hook, part, call, nth: int) -> None:
        self.call = call
        self.text = part["text"]
        self._say = lambda kind, detail: say(hook, kind, part["index"], call=call.name, nth=nth, detail=detail)
        self._where = str(call)
        self.__dict__.update(part["config"])

    def fired(self, what: str) -> None:
        self._say("fired", f"{what}; {self._where}")

    def ended(self) -> None:
        self._say("ended", "")

    def refused(self, why: str) -> None:
        self._say("refused", f"not applied to {self.call.name}: {why}")


def _acting(hook, part):
    prepare = ACTIONS[part["action"]]

    def act(call, nth: int, go):
        fault = Fault(hook, part, call, nth)
        try:
            todo = prepare(fault, call)
        except Refused as why:
            fault.refused(str(why))
            return go(call)
        except Exception as error:  # noqa: BLE001  the rank's program must not notice that a fault could not be applied
            fault.refused(f"{type(error).__name__}: {error}")
            return go(call)
        return todo(go)

    return act


def _skip(fault, call):
    def todo(go):
        fault.fired("skipped")
        return call.returns(call.handle(None))

    return todo


def _delay(fault, call):
    def todo(go):
        fault.fired(f"{fault.seconds:g} s late")
        time.sleep(fault.seconds)
        fault.ended()
        return go(call)

    return todo


_unfinished: list = []


def _duplicate(fault, call):
    twin = call.rewritten(lambda tensor, _: tensor.detach().clone())

    def todo(go):
        fault.fired("issued twice")
        _unfinished.append((twin, twin.issue()))  # what is not waited for must live until it is done
        return go(call)

    return todo


def _other_op(fault, call):
    import torch
    import torch.distributed as dist

    group, tensor = call.group, call.tensors()[0].detach()
    size = group.size()
    root = dist.get_global_rank(group, 0)
    issue = {
        "all_reduce": lambda: dist.all_reduce(tensor, group=group, async_op=True),
        "broadcast": lambda: dist.broadcast(tensor, root, group=group, async_op=True),
        "reduce": lambda: dist.reduce(tensor, root, group=group, async_op=True),
        "all_gather": lambda: dist.all_gather(
            list(tensor.new_empty((size, *tensor.shape))), tensor, group=group, async_op=True
        ),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(
            tensor.new_empty(size * tensor.numel()), tensor.flatten(), group=group, async_op=True
        ),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(
            tensor.flatten().clone(), torch.cat([tensor.flatten()] * size), group=group, async_op=True
        ),
        "all_to_all_single": lambda: dist.all_to_all_single(
            tensor.new_empty(size * tensor.numel()), torch.cat([tensor.flatten()] * size), group=group, async_op=True
        ),
        "barrier": lambda: dist.barrier(group=group, async_op=True),
    }[fault.instead]

    def todo(go):
        fault.fired(f"{fault.instead} instead")
        return call.returns(call.handle(calls.unseen(issue)))

    return todo


def _copied(call, change):
    """The call with `change(tensor, argument)` for its tensors, and what carries results back to those that are no views."""
    pairs = []

    def one(tensor, argument):
        made = change(tensor.detach(), argument)
        if made.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            pairs.append((tensor.detach(), made))
        return made

    changed = call.rewritten(one)
    outputs = {id(tensor) for tensor in changed.tensors("output")}

    def back() -> None:
        for tensor, made in pairs:
            if id(made) in outputs:
                many = min(tensor.numel(), made.numel())
                whole = tensor.flatten()
                whole[:many] = made.flatten()[:many]
                tensor.copy_(whole.view_as(tensor))

    return changed, back


def _issued(call, changed, go, after):
    """Issue `changed` in place of `call`, and do `after` when the caller has waited for it."""
    real = call.work_of(go(changed))
    if real is None:  # the backend has put it on the current stream already
        after()
        return call.returns(call.handle(None))
    return call.returns(call.handle(real, after))


def _size(fault, call):
    if any(call.values.get(name) for name in ("output_split_sizes", "input_split_sizes")):
        raise Refused("its parts are of different sizes")
    ranks = call.group.size()
    whole = {"all_gather_into_tensor": "output_tensor", "reduce_scatter_tensor": "input_tensor"}
    parted = {whole.get(call.name)} if call.name != "all_to_all_single" else {"output", "input"}
    parted |= {"outputs" if "gather" in call.name else "inputs"} if call.name.endswith("tensor_coalesced") else set()
    sizes = []

    def other(tensor, argument):
        parts = ranks if argument in parted else 1
        each = tensor.numel() // parts
        wanted = (fault.elements or each // 2 or each + 1) * parts
        sizes.append((tensor.numel(), wanted))
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor.flatten()
        if wanted <= tensor.numel():
            return flat[:wanted]
        made = tensor.new_zeros(wanted)
        made[: tensor.numel()] = flat
        return made

    changed, back = _copied(call, other)
    if not sizes or all(old == new for old, new in sizes):
        raise Refused(f"it has {sizes[0][0] if sizes else 'no'} elements already")

    def todo(go):
        fault.fired(f"{sizes[0][1]} elements instead of {sizes[0][0]}")
        return _issued(call, changed, go, back)

    return todo


def _dtype(fault, call):
    import torch

    wanted = getattr(torch, fault.to)
    found = {str(tensor.dtype).removeprefix("torch.") for tensor in call.tensors()}
    if not found or found == {fault.to}:
        raise Refused(f"it is {fault.to} already" if found else "it has no tensor on this rank")
    changed, back = _copied(
        call, lambda tensor, _: tensor.view(wanted) if tensor.element_size() == wanted.itemsize else tensor.to(wanted)
    )

    def todo(go):
        fault.fired(f"{fault.to} instead of {'+'.join(sorted(found))}")
        return _issued(call, changed, go, back)

    return todo


def _root(fault, call):
    name = next(name for name in ("root_rank", "dst", "src") if name in call.values)
    group, old = call.group, call.values[name]
    others = [(old + step) % group.size() for step in range(1, group.size())]
    if name != "root_rank":
        others = [one for one in others if one != group.rank()]
    new = fault.root if fault.root is not None else others[0] if others else old
    if new == old or new >= group.size():
        raise Refused(f"{name} is {old} in a group of {group.size()}, which leaves no other {fault.root or ''}".rstrip())
    changed = call.changed(**{name: new})
    if call.name in ("gather", "scatter"):
        # Only the root has tensors for all: who takes itself for the root must have them, and nobody else may.
        one = call.tensors("input" if call.name == "gather" else "output")[0]
        own = [[one.detach().clone() for _ in range(group.size())]] if new == group.rank() else []
        changed = changed.changed(**{"output_tensors" if call.name == "gather" else "input_tensors": own})

    def todo(go):
        fault.fired(f"{name} {new} instead of {old}")
        return go(changed)

    return todo


def _reduce_op(fault, call):
    import torch.distributed as dist

    old = dist.ReduceOp.RedOpType(call.values["reduce_op"].op()).name.lower()
    new = fault.to or ("sum" if old != "sum" else "max")
    if new == old:
        raise Refused(f"it reduces by {old} already")
    changed = call.changed(reduce_op=calls.reduction(call.group, new))

    def todo(go):
        fault.fired(f"{new} instead of {old}")
        return go(changed)

    return todo


def _drop_handle(fault, call):
    def todo(go):
        fault.fired("handle dropped")
        go(call)
        return call.returns(call.handle(None))

    return todo


def _raise(fault, call):
    import builtins

    import torch.distributed as dist

    kind = getattr(dist, fault.type, None) or getattr(builtins, fault.type)

    def todo(go):
        fault.fired(f"{fault.type} raised")
        raise kind(fault.text)

    return todo


def _altering(alter):
    """An action that changes one element, of what goes in or of what comes out."""

    def prepare(fault, call):
        sides = [fault.where] if fault.where else ["output", "input"]
        found = [(side, one) for side in sides for one in call.tensors(side) if one.numel()]
        if not found:
            raise Refused(f"it has no {fault.where or 'tensor'} on this rank")
        side, tensor = found[0]
        if fault.element >= tensor.numel():
            raise Refused(f"it has {tensor.numel()} elements, none is number {fault.element}")
        place = tensor.detach().view(-1)[fault.element :][:1] if tensor.is_contiguous() else None
        if place is None:
            raise Refused("its tensor is not contiguous")
        change = alter(fault, place)

        def now() -> None:
            before = place.item()
            change()
            fault.fired(f"{side} element {fault.element}: {before} became {place.item()}")

        def todo(go):
            if side == "output":
                return _issued(call, call, go, now)
            now()
            return go(call)

        return todo

    return prepare


def _corrupt(fault, place):
    import torch

    bits = place.element_size() * 8
    bit = bits - 3 if fault.bit is None else fault.bit
    if bit >= bits:
        raise Refused(f"an element has {bits} bits, none is number {bit}")

    def change() -> None:
        octets = place.view(torch.uint8)
        octets[bit // 8] ^= 1 << bit % 8

    return change


def _nan(fault, place):
    if not (place.is_floating_point() or place.is_complex()):
        raise Refused(f"{place.dtype} has no NaN")
    return lambda: place.fill_(math.nan)


def _exchanging(hook, part):
    """From now on each of two groups stands for the other on this rank."""

    def act(nth: int, first, second) -> None:
        def told(kind: str, detail: str) -> None:
            say(hook, kind, part["index"], call="new_group", nth=nth, detail=detail)

        (one, members), (other, others) = first, second
        if members != others or not hasattr(one, "group_name"):
            told("refused", f"groups {nth} and {nth + 1} are of other ranks: {list(members)} and {list(others)}")
            return
        stands_for = {one.group_name: other, other.group_name: one}

        def change(call):
            new = stands_for.get(call.group.group_name)
            return call if new is None else call.changed(process_group=new.boxed())

        calls.rewrite(change)
        told("fired", f"groups {one.group_name} and {other.group_name} of ranks {list(members)} exchanged")

    return act


ACTIONS = {
    "skip": _skip,
    "delay": _delay,
    "duplicate": _duplicate,
    "other_op": _other_op,
    "size": _size,
    "dtype": _dtype,
    "root": _root,
    "reduce_op": _reduce_op,
    "drop_handle": _drop_handle,
    "corrupt": _altering(_corrupt),
    "nan": _altering(_nan),
    "raise": _raise,
}
