"""Run a command as if this Linux machine had no AMX: ``python tools/without_amx.py COMMAND …``.

Programs ask the kernel for the registers of AMX before they use them. A seccomp filter refuses, for the command and all
its children, so that they take the next best instructions: onnxruntime's kernels do as ours do. INTAGLIO_CPU_ISA holds
back ours alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

# linux/prctl.h, linux/seccomp.h, linux/filter.h and linux/audit.h
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_X86_64, _ARCH_PRCTL, _REQUEST_PERMISSION = 0xC000003E, 158, 0x1023
# Offsets in struct seccomp_data: the call's number, the architecture, the low half of the first argument.
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16

_FILTER = (
    (_LOAD_WORD, 0, 0, _ARCHITECTURE),
    (_JUMP_IF_EQUAL, 0, 5, _X86_64),
    (_LOAD_WORD, 0, 0, _NUMBER),
    (_JUMP_IF_EQUAL, 0, 3, _ARCH_PRCTL),
    (_LOAD_WORD, 0, 0, _ARGUMENT),
    (_JUMP_IF_EQUAL, 0, 1, _REQUEST_PERMISSION),
    (_RETURN, 0, 0, _FAIL | errno.EPERM),
    (_RETURN, 0, 0, _ALLOW),
)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def refuse_amx() -> None:
    """This process and those that it starts get no AMX from now on. Raises OSError where the kernel has no filters."""
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in _FILTER)
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(_FILTER), code)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program)),
    ):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "the kernel takes no seccomp filter")


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} COMMAND [ARGUMENT …]")
    refuse_amx()
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
