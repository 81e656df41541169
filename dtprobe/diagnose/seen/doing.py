"""What a rank is doing, by the stack of its main thread: waiting in which call, or at work in its own code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from dtprobe.diagnose.case import Quote, Role
from dtprobe.diagnose.seen.stacks import Stack
from dtprobe.readers.threads import Thread, function_of, place_of


class Doing(StrEnum):
    """What the innermost telling frame says."""

    DESTROY = "ends its process group"
    BARRIER = "waits in a barrier"
    MAKING = "makes a communicator"
    STORE = "waits for the store"
    COLLECTIVE = "waits in a collective"
    DEVICE = "waits for the GPU"
    LOADER = "waits for its data loader"
    CHECKPOINT = "reads or writes a checkpoint"
    IMPORT = "imports a module"
    LOCK = "waits for a lock"
    SLEEP = "sleeps"
    CODE = "is in its own code"


WAITING = frozenset({Doing.COLLECTIVE, Doing.DEVICE, Doing.BARRIER, Doing.MAKING, Doing.STORE})
"""Waits for other ranks; of the GPU, too: a collective on it ends when all have come."""

_DISTRIBUTED = re.compile(r"torch/distributed/(?:distributed_c10d|_functional_collectives|c10d_logger|nn/functional)\.py")
_FRAMES: tuple[tuple[Doing, re.Pattern[str]], ...] = (
    (Doing.DESTROY, re.compile(r"^destroy_process_group |^ncclComm(?:Destroy|Finalize) |^ray::.*destroy_process_group")),
    (
        Doing.STORE,
        re.compile(
            r"^c10d::(?:TCPStore|PrefixStore|FileStore|HashStore)::(?:doWait|wait|get)|^_store_based_barrier |^(?:_tcp_)?rendezvous_handler |^_create_c10d_store "
        ),
    ),
    (
        Doing.MAKING,
        re.compile(
            r"^ncclCommInitRank|^ncclCommSplit|^ncclCommInitRankFunc|^bootstrapInit|^c10d::NCCLComm::create|^init_process_group |^_new_process_group_helper |connectFullMesh"
        ),
    ),
    (
        Doing.BARRIER,
        re.compile(r"^(?:monitored_)?barrier \(.*distributed_c10d\.py|^c10d::ProcessGroup\w*::(?:monitoredB|b)arrier"),
    ),
    (
        Doing.COLLECTIVE,
        re.compile(
            r"^c10d::(?:ops::|ProcessGroup|Work|\(anonymous namespace\)::)|^gloo::|^ncclGroupEnd|^ncclAllReduce |^c10d::Reducer|^\w+ \(.*torch/distributed/(?:distributed_c10d|_functional_collectives)\.py"
        ),
    ),
    (
        Doing.LOADER,
        re.compile(r"\(.*torch/utils/data/dataloader\.py"),
    ),
    (
        Doing.CHECKPOINT,
        re.compile(
            r"\(.*torch/(?:serialization|distributed/checkpoint/\w+)\.py|^save_checkpoint |^load_checkpoint |\(.*safetensors/|^fsync |^fdatasync |^(?:_save|save_state_dict|save_pretrained) "
        ),
    ),
    (
        Doing.DEVICE,
        re.compile(
            r"^cu(?:da)?(?:Stream|Device|Ctx|Event)Synchronize|^synchronize \(.*torch/cuda/|^at::native::_local_scalar_dense_cuda|^cudaMemcpy |^cuMemcpy"
        ),
    ),
    (Doing.IMPORT, re.compile(r"\(<frozen importlib\._bootstrap")),
)
_STORING = re.compile(r"^(?:\w+\.)*_?(?:save|write|dump|store|upload)(?:_\w+)? \(|^(?:\w+\.)*\w*(?:checkpoint|ckpt)\w* \(")
"""Functions of programs are called after what they do, too."""
_LOCK = re.compile(
    r"^__lll_lock_wait|^pthread_mutex_lock|^futex_wait|^(?:\w+\.)*_?acquire |^(?:\w+\.)*wait \(.*threading\.py|^__futex"
)
_SLEEP = re.compile(r"^(?:clock_)?nanosleep ")
_NATIVE = re.compile(r"\.so[.\d]*\)$|\(\[vdso\]\)$|^0x[0-9a-f]+ |\((?:\?|[\w.-]+\.(?:cc|c|cpp|h|S|cu):\d+)\)$")
_LIBRARY = re.compile(
    r"(?:^|/)(?:torch|torchvision|torchaudio|numpy|concurrent|multiprocessing|asyncio|importlib)/|^<frozen|(?:site|dist)-packages/|(?:^|/)(?:threading|runpy|queue|selectors|contextlib|functools|socket|subprocess)\.py"
)
FOREIGN = re.compile(r"^ffi_call |_ctypes\.|\(libffi\.so")


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What a rank does, and the frame that says so. `place` is the innermost frame of the program's own code."""

    rank: int
    doing: Doing
    stack: Stack
    thread: Thread
    frame: str
    place: str | None
    operation: str | None = None
    """The call into torch.distributed, where it is in one."""

    def quote(self, role: Role) -> Quote:
        return self.stack.quote(self.thread, self.frame, role)

    @property
    def foreign(self) -> str | None:
        """A frame that shows that the main thread is in a foreign function called from Python, which may hold the interpreter's lock."""
        return next((frame for frame in self.thread.frames if FOREIGN.search(frame)), None)

    @property
    def holds_gil(self) -> bool:
        """Whether the main thread has the interpreter's lock and does not run: it waits in native code with the lock held."""
        return self.thread.owns_gil is True and self.thread.active is False

    @property
    def wide(self) -> bool:
        """Whether native frames are there: without them, what Python's innermost line calls is not seen."""
        return self.stack.snapshot.native


def activity(stack: Stack) -> Activity | None:
    """What the main thread of a rank does; None without a main thread with frames, a rank, or for a child of the rank."""
    thread = stack.main
    if thread is None or stack.rank is None or stack.child or not thread.frames:
        return None
    frames = thread.frames
    at = next((number for number, one in enumerate(frames) if own(one)), len(frames))
    place = frames[at] if at < len(frames) else None
    inner = frames[:at]  # what the program's own code called, and is in now
    operation = next(
        (function_of(one) for one in reversed(inner) if _DISTRIBUTED.search(place_of(one)) and "wrapper" not in one), None
    )
    doing, frame = Doing.CODE, place or frames[0]
    for kind, pattern in _FRAMES:
        hit = next((one for one in inner if pattern.search(one)), None)
        if hit is not None:
            doing, frame = kind, hit
            break
    if doing is Doing.CODE:
        if _LOCK.search(frames[0]):
            doing = Doing.LOCK
        elif _SLEEP.search(frames[0]):
            doing = Doing.SLEEP
        elif place is not None and _STORING.search(place):
            doing = Doing.CHECKPOINT
    return Activity(rank=stack.rank, doing=doing, stack=stack, thread=thread, frame=frame, place=place, operation=operation)


def own(frame: str) -> bool:
    """Whether a frame is of the program itself: Python code that is no library."""
    place = place_of(frame)
    return not _NATIVE.search(frame) and place.endswith(".py") and not _LIBRARY.search(place)


def activities(stacks: Iterable[Stack]) -> Mapping[int, Activity]:
    """One activity a rank: of several stacks the one with native frames and Python ones, else the later."""
    found: dict[int, Activity] = {}
    for stack in stacks:
        one = activity(stack)
        if one is None:
            continue
        known = found.get(one.rank)
        if known is None or _worth(one) >= _worth(known):
            found[one.rank] = one
    return dict(sorted(found.items()))


def _worth(one: Activity) -> tuple[bool, bool, bool]:
    """The import is often the dump's own: the first with stacks of a rank imports what symbolizes them."""
    return one.doing is not Doing.IMPORT, one.place is not None, one.wide


def alike(one: Activity) -> tuple[str, ...]:
    """Equal for ranks whose main threads are in the same functions of Python code."""
    return tuple(f"{function_of(frame)} {place_of(frame)}" for frame in one.thread.frames if not _NATIVE.search(frame))
