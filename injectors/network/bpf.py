"""A packet classifier in eBPF that drops by chance, loaded without a compiler: six instructions."""

from __future__ import annotations

import ctypes
import os
import struct

SYSCALLS = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "s390x": 351, "ppc64le": 361}
"""bpf(2) by machine."""

BPF_PROG_LOAD = 5
BPF_PROG_TYPE_SCHED_CLS = 3
GET_PRANDOM_U32 = 7
TC_ACT_OK, TC_ACT_SHOT = 0, 2


def dropper(probability: float) -> int:
    """Load a classifier (direct action) that drops with that probability; its descriptor. Raises OSError."""
    threshold = min(0xFFFFFFFF, round(probability * 2**32))
    program = b"".join(
        (
            _instruction(0x85, imm=GET_PRANDOM_U32),  # call
            _instruction(0x36, offset=2, imm=threshold),  # if r0 >= threshold (32 bits, unsigned) skip two
            _instruction(0xB7, imm=TC_ACT_SHOT),
            _instruction(0x95),  # exit
            _instruction(0xB7, imm=TC_ACT_OK),
            _instruction(0x95),
        )
    )
    number = SYSCALLS.get(os.uname().machine)
    if number is None:
        raise OSError(f"the number of bpf(2) on {os.uname().machine} is not known here")
    instructions = ctypes.create_string_buffer(program, len(program))
    license_ = ctypes.create_string_buffer(b"Apache-2.0")
    # union bpf_attr (linux/bpf.h): prog_type, insn_cnt, insns, license, and the rest as zeros.
    fields = struct.pack(
        "IIQQ", BPF_PROG_TYPE_SCHED_CLS, len(program) // 8, ctypes.addressof(instructions), ctypes.addressof(license_)
    )
    attributes = ctypes.create_string_buffer(fields, 128)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(ctypes.c_long(number), BPF_PROG_LOAD, attributes, 128)
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"bpf(BPF_PROG_LOAD): {os.strerror(code)}")
    return int(descriptor)


def _instruction(code: int, *, offset: int = 0, imm: int = 0) -> bytes:
    return struct.pack("<BBhI", code, 0, offset, imm)
