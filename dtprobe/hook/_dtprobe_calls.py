"""Sees every collective of a rank, whoever issues it, counts those that a fault aims at, and lets the fault act on them.

Python's torch.distributed, functional collectives and C++ (DDP's reducer) all end in the operators of the dispatcher's
library `c10d`. A kernel under the key BackendSelect stands before every backend's own, whatever the device and the grad
mode, and hands on to them; process groups and what the backends do stay as they are. Only operators that a fault of this rank aims
at get one: everywhere else nothing is in the way.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque

from _dtprobe_faults import rank_of, said, say
from _dtprobe_ops import OPERATORS

KEPT = 10_000
"""Finished handles of ours that are kept: C++ may hold a handle longer than Python, and would then wait for ever."""

UNSEEN = "unseen"
GROUP_NAMES = {"default": "default_pg"}


class Turns:
    """Which of the matching calls a fault acts on, counted from 1 in this process, as `counted` of its part says.

    A number at which it has acted in an earlier attempt of this rank is not acted on again. The generator is seeded with seed,
    fault and rank, and drawn from once a matching call.
    """

    def __init__(self, hook, part) -> None:
        counted = part["counted"]
        self.op, self.group = counted["op"], counted["group"]
        self.count = 0
        self._nth = counted["nth"] and frozenset(counted["nth"])
        self._every, self._chance = counted["every"], counted["probability"]
        self._begin = time.monotonic() + (part["after_s"] or 0.0)
        self._lock = threading.Lock()
        before = {line["nth"] for line in said(hook, "fired", part["index"])}
        self._before = before
        self._left = float("inf") if counted["times"] is None else counted["times"] - len(before)
        if self._chance is not None:
            import random

            self._random = random.Random(f"{part['seed']} {part['index']} {rank_of(hook)}")

    def take(self, group) -> int | None:
        """Count a call on `group()`; its number if the fault acts on it."""
        if self.group is not None and not _named(group(), self.group):
            return None
        with self._lock:
            self.count += 1
            wanted = (
                self.count in self._nth
                if self._nth
                else self.count % self._every == 0
                if self._every
                else self._random.random() < self._chance
                if self._chance is not None
                else True
            )
            if not wanted or self._left < 1 or self.count in self._before or time.monotonic() < self._begin:
                return None
            self._left -= 1
            return self.count


def _named(group, name: str) -> bool:
    return GROUP_NAMES.get(name, name) in (getattr(group, "group_name", None), getattr(group, "group_desc", None))


class Call:
    """A collective that is about to be issued: its name, its operator and the values of the operator's arguments."""

    def __init__(self, name: str, operator, keys, values: dict) -> None:
        self.name = name
        self.operator = operator
        self.values = values
        self._keys = keys

    def changed(self, **values) -> Call:
        """The same call with other arguments."""
        return Call(self.name, self.operator, self._keys, {**self.values, **values})

    def issue(self):
        """Let the backend do it; what the operator returns."""
        return self.operator.redispatch(self._keys, *self.values.values())

    @property
    def group(self):
        """The process group, as Python knows it."""
        return _c10d().ProcessGroup.unbox(self.values["process_group"])

    def tensors(self, *sides: str) -> list:
        """Tensors that are read (`input`), written (`output`) or both."""
        found = []
        for name, value in self.values.items():
            side = self._side(name)
            if side and (not sides or side in sides or side == "both"):
                found += _flat(value)
        return found

    def rewritten(self, change) -> Call:
        """The same call with `change(tensor, argument)` in place of each of its tensors."""
        return self.changed(
            **{
                name: _mapped(value, lambda one, name=name: change(one, name))
                for name, value in self.values.items()
                if self._side(name)
            }
        )

    def _side(self, name: str) -> str | None:
        if name.startswith(("output", "input")):
            return None if "split" in name else name[: 5 if name[0] == "i" else 6]
        if name == "tensors":
            return {"send": "input", "recv": "output"}.get(self.name, "both")
        return None

    def returns(self, work):
        """What the operator would return, with that handle."""
        if not self.operator._schema.returns:
            return None
        boxed = work.boxed()
        return (next(iter(self.values.values())), boxed) if len(self.operator._schema.returns) == 2 else boxed

    def work_of(self, returned):
        """The handle in what the operator returned; None where there is none."""
        boxed = returned[-1] if isinstance(returned, tuple) else returned
        return None if boxed is None else _c10d().Work.unbox(boxed)

    def handle(self, real, after=None):
        """A handle for the caller: done when `real` is (None: at once), and `after` has then been called."""
        return _handle_class()(real, _flat(next(iter(self.values.values()))), after)

    def __str__(self) -> str:
        group = self.group
        desc = f" ({group.group_desc})" if group.group_desc not in ("", "undefined", group.group_name) else ""
        told = ", ".join(f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in self.tensors()[:2])
        return f"group {group.group_name}{desc}" + (f", {told}" if told else "")


def _flat(value) -> list:
    if isinstance(value, (list, tuple)):
        return [one for part in value for one in _flat(part)]
    return [value] if hasattr(value, "data_ptr") else []


def _mapped(value, change):
    return [_mapped(one, change) for one in value] if isinstance(value, (list, tuple)) else change(value)


def _c10d():
    import torch._C._distributed_c10d as c10d

    return c10d


def watch(hook, part, act, *, ops=None) -> None:
    """Let a fault act on the collectives that its part counts, or on those of `ops`.

    `act(call, nth, go)` is called instead of the collective, in the thread that issues it; `go(call)` issues it and returns
    what act has to return.
    """
    turns = Turns(hook, part)
    say(hook, "loaded", part["index"])
    names = (turns.op,) if turns.op else ops
    hook.after_import("torch", lambda torch: _begin(hook, part, torch, names, turns, act))
    atexit.register(_told, hook, part["index"], turns, os.getpid())


def _told(hook, index: int, turns: Turns, pid: int) -> None:
    if os.getpid() == pid:
        say(hook, "counted", index, call=turns.op, nth=turns.count)


def _begin(hook, part, torch, names, turns: Turns, act) -> None:
    if not torch.distributed.is_available():
        say(hook, "refused", part["index"], detail="this torch is built without torch.distributed")
        return
    say(hook, "torch", part["index"], detail=torch.__version__)
    try:
        _sight(torch).cover(names)
    except Exception as error:  # noqa: BLE001  another torch; the rank's program must not notice
        say(hook, "refused", part["index"], detail=f"collectives of torch {torch.__version__} cannot be seen: {error}")
        return
    _sight(torch).watched.append((names, turns, act))


class _Sight:
    """The kernels in front of the backends' own, and who watches through them."""

    def __init__(self, torch) -> None:
        self.watched: list = []
        self.rewrites: list = []
        self._torch = torch
        self._library = torch.library.Library("c10d", "IMPL")
        self._after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        self._covered: set[str] = set()
        self._thread = threading.local()

    def cover(self, names) -> None:
        """Stand in front of the operators with these names (None: of all)."""
        for operator, name in OPERATORS.items():
            packet = getattr(self._torch.ops.c10d, operator, None)
            if packet is None or operator in self._covered or (names is not None and name not in names):
                continue
            self._covered.add(operator)
            self._library.impl(operator, self._kernel(name, packet.default), "BackendSelect", with_keyset=True)

    def unseen(self, action):
        """Do something whose collectives are neither counted nor acted on."""
        return self._in_mode(UNSEEN, action)

    def arguments(self, action) -> list[dict]:
        """The operators' arguments of the collectives in `action`, none of which is issued."""
        found: list[dict] = []
        self._in_mode(found, action)
        return found

    def _in_mode(self, mode, action):
        self._thread.mode = mode
        try:
            return action()
        finally:
            self._thread.mode = None

    def _kernel(self, name: str, operator):
        arguments = operator._schema.arguments

        def kernel(keys, *args, **kwargs):
            keys = keys & self._after
            mode = getattr(self._thread, "mode", None)
            due = self._due(name, lambda: _argument(arguments, args, kwargs, "process_group")) if mode is None else ()
            if mode is UNSEEN or (mode is None and not due and not self.rewrites):
                return operator.redispatch(keys, *args, **kwargs)
            values = {one.name: _argument(arguments, args, kwargs, one.name) for one in arguments}
            call = Call(name, operator, keys, values)
            if mode is not None:
                mode.append(values)
                return call.returns(call.handle(None))
            for rewrite in self.rewrites:
                call = rewrite(call)
            return _step(due, 0, call)

        return kernel

    def _due(self, name: str, boxed) -> list:
        """Who acts on this call, with its number; `boxed()` is its group as the operator takes it."""
        found: list = []

        def group():
            if not known:
                known.append(_c10d().ProcessGroup.unbox(boxed()))
            return known[0]

        known: list = []
        for names, turns, act in self.watched:
            if (names is None or name in names) and (nth := turns.take(group)) is not None:
                found.append((act, nth))
        return found


def _argument(arguments, args, kwargs, name: str):
    for place, one in enumerate(arguments):
        if one.name == name:
            return args[place] if place < len(args) else kwargs.get(name, one.default_value)
    raise KeyError(name)


def _step(due, place: int, call: Call):
    if place == len(due):
        return call.issue()
    act, nth = due[place]
    return act(call, nth, lambda changed: _step(due, place + 1, changed))


_made: dict = {}


def _sight(torch) -> _Sight:
    if "sight" not in _made:
        _made["sight"] = _Sight(torch)
    return _made["sight"]


def _handle_class():
    if "handle" not in _made:
        _made["handle"] = _define_handle()
    return _made["handle"]


def _define_handle():
    import torch

    waiting: set = set()
    finished: deque = deque(maxlen=KEPT)

    class Handle(torch.distributed.Work):
        """A handle that Python made, for callers in Python and in C++."""

        def __init__(self, real, tensors: list, after) -> None:
            super().__init__()
            self._real = real
            self._tensors = tensors
            self._after = after
            self._lock = threading.Lock()
            (waiting.add if after else finished.append)(self)

        def wait(self, timeout=None) -> bool:
            if self._real is not None:
                self._real.wait(*([timeout] if timeout else []))
            self._finish()
            return True

        def get_future(self):
            if self._real is None:
                devices = {one.device for one in self._tensors if one.device.type != "cpu"}
                future: torch.futures.Future = torch.futures.Future(devices=sorted(devices, key=str))
                self._finish()
                future.set_result(self._tensors)
                return future

            def done(future):
                future.value()
                self._finish()
                return self._tensors

            return self._real.get_future().then(done)

        def _finish(self) -> None:
            with self._lock:
                after, self._after = self._after, None
                if after is not None:
                    after()
                    finished.append(self)
                    waiting.discard(self)

    without = {"is_completed": True, "is_success": True, "_source_rank": 0, "source_rank": 0}
    own = {"wait", "get_future", "boxed", "unbox"}
    for name in dir(torch.distributed.Work):
        if name not in own and (not name.startswith("_") or name == "_source_rank"):
            setattr(Handle, name, _forwarded(name, without.get(name)))
    return Handle


def _forwarded(name: str, otherwise):
    return lambda self, *args: otherwise if self._real is None else getattr(self._real, name)(*args)


def unseen(action):
    """Do something whose collectives are neither counted nor acted on."""
    import torch

    return _sight(torch).unseen(action)


def reduction(group, name: str):
    """A reduce op as the operators take it: torch makes one of any kind only on the way to a collective."""
    import torch
    import torch.distributed as dist

    sight = _sight(torch)
    sight.cover(("all_reduce",))
    op = getattr(dist.ReduceOp, name.upper())
    (values,) = sight.arguments(lambda: dist.all_reduce(torch.empty(0), op, group=group))
    return values["reduce_op"]


def rewrite(change) -> None:
    """From now on every collective of this process is `change(call)` instead."""
    import torch

    _sight(torch).rewrites.append(change)
    _sight(torch).cover(None)


def watch_groups(hook, part, act) -> None:
    """Let a fault act on groups as they are created: `act(nth, group, following group)`, once there are both.

    Each comes with its members: `(group, ranks)`; where this rank is none of them, the group is no process group.
    """
    turns = Turns(hook, part)
    say(hook, "loaded", part["index"])
    hook.after_import("torch", lambda torch: _begin_groups(hook, part, torch, turns, act))
    atexit.register(_told, hook, part["index"], turns, os.getpid())


def _begin_groups(hook, part, torch, turns: Turns, act) -> None:
    import inspect

    c10d = torch.distributed.distributed_c10d if torch.distributed.is_available() else None
    create = getattr(c10d, "_new_process_group_helper", None)
    if c10d is None or create is None or "global_ranks_in_group" not in inspect.signature(create).parameters:
        say(hook, "refused", part["index"], detail=f"torch {torch.__version__} does not show how it creates groups")
        return
    say(hook, "torch", part["index"], detail=torch.__version__)
    parameters = inspect.signature(create)
    due: list[tuple] = []

    def created(group, ranks: tuple) -> None:
        for nth, first in due:
            act(nth, first, (group, ranks))
        due.clear()
        if (nth := turns.take(lambda: group)) is not None:
            due.append((nth, (group, ranks)))

    def creating(*args, **kwargs):
        default = not torch.distributed.is_initialized()
        made = create(*args, **kwargs)
        if not default:
            ranks = parameters.bind(*args, **kwargs).arguments["global_ranks_in_group"]
            hook.run(created, made[0] if isinstance(made, tuple) else made, tuple(ranks))
        return made

    c10d._new_process_group_helper = creating
