"""In a rank: the faults that a process does to itself, by time or at a counted collective."""

from __future__ import annotations

import os
import signal
import time

from _dtprobe_faults import parts, said, say


def install(hook) -> None:
    for part in parts(hook, "process"):
        if part["counted"] is not None:
            _at_calls(hook, part)
        elif not said(hook, "fired", part["index"]):
            _by_time(hook, part)


def _at_calls(hook, part) -> None:
    """In the thread that calls the collective, before it is issued."""
    from _dtprobe_calls import watch

    def act(call, nth, go):
        say(hook, "fired", part["index"], call=call.name, nth=nth, detail=part["detail"])
        ACTIONS[part["action"]](hook, part)
        return go(call)

    watch(hook, part, act)


def _by_time(hook, part) -> None:
    import threading

    def wait_and_act() -> None:
        time.sleep(part["after_s"])
        say(hook, "fired", part["index"], detail=part["detail"])
        hook.run(ACTIONS[part["action"]], hook, part)

    threading.Thread(target=wait_and_act, name="dtprobe-fault", daemon=True).start()


def _signal(number: int):
    return lambda hook, part: os.kill(os.getpid(), number)


def _exit(hook, part) -> None:
    """At once, or by SystemExit in the main thread: then `finally`, atexit and other threads have their say."""
    if part["clean"]:
        code = part["code"]

        class Left(SystemExit):
            def __init__(self) -> None:
                super().__init__(code)

        _raise_in_main_thread(Left)
        return
    import sys

    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(part["code"])


def _no_core() -> None:
    """A core file of a training job takes minutes and gigabytes, and would stay behind."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _abort(hook, part) -> None:
    _no_core()
    os.abort()


def _segfault(hook, part) -> None:
    import ctypes

    _no_core()
    ctypes.string_at(0)


def _gil(hook, part) -> None:
    """Sleep in C without giving the GIL back, as an extension that forgot to would. No signal can cut it short."""
    import ctypes

    class Timespec(ctypes.Structure):
        _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    nanosleep = ctypes.PyDLL(None).nanosleep
    nanosleep.argtypes = (ctypes.POINTER(Timespec), ctypes.c_void_p)
    whole = int(part["seconds"])
    wanted = Timespec(whole, int((part["seconds"] - whole) * 1e9))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    nanosleep(ctypes.byref(wanted), None)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    say(hook, "ended", part["index"])


def _exception(hook, part) -> None:
    import builtins

    base = getattr(builtins, part["type"])
    text = part["text"]
    # Raised from elsewhere, an exception's class is called without arguments: the text has to come from the class.
    kind = type(part["type"], (base,), {"__init__": lambda self: base.__init__(self, text), "__module__": "builtins"})
    _raise_in_main_thread(kind)


def _raise_in_main_thread(kind) -> None:
    import ctypes
    import threading

    main = threading.main_thread().ident
    while _starting(main):  # site.py would catch it
        time.sleep(0.01)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(kind))


def _starting(main) -> bool:
    """Whether the main thread still runs what comes before the program: this hook, and what it hides."""
    import sys

    frame = sys._current_frames().get(main)
    while frame is not None:
        if frame.f_code.co_name == "execsitecustomize":
            return True
        frame = frame.f_back
    return False


def _fork(hook, part) -> None:
    """A child that does nothing and keeps what the rank has open: pipes, sockets, the process group."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # since 3.12: that this process has threads is the point
        child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(part["seconds"])
        os._exit(0)


ACTIONS = {
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "term": _signal(signal.SIGTERM),
    "int": _signal(signal.SIGINT),
    "exit": _exit,
    "exit0": _exit,
    "abort": _abort,
    "segfault": _segfault,
    "gil": _gil,
    "exception": _exception,
    "fork": _fork,
}
