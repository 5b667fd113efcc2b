"""The limits that a process sets itself before it runs code that it does not trust: network, files, processes, memory.

Linux only, by what an unprivileged process may do: an empty network namespace, Landlock for files and signals, seccomp
for system calls, resource limits. Each of the first three may be missing on a kernel; `confine` and `forbid_calls` say
which hold. Nothing but the standard library is imported here, since a namespace can be entered only while a process has
one thread. The limits cannot be lifted, and hold for all that the process starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

_NEWUSER, _NEWNET = 0x10000000, 0x40000000
_PDEATHSIG, _NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 1, 38, 22, 2
_LANDLOCK = (444, 445, 446)
_READ, _READ_DIR, _WRITE, _TRUNCATE, _EXECUTE = 1 << 2, 1 << 3, 1 << 1, 1 << 14, 1 << 0
_MAKE_AND_REMOVE = 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8
_BIND, _CONNECT = 1 << 0, 1 << 1
_FILE_RIGHTS = (13, 14, 15, 15, 16)
"""Bits of rights to files that Landlock knows, by its version from 1 on; the last for all after it."""
SYSTEM = (
    *("/usr", "/lib", "/lib64", "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system"),
    *("/dev/null", "/dev/zero", "/dev/urandom", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/os-release"),
    *("/opt/conda", "/sys/fs/cgroup"),
)
"""The paths that Python and its libraries read of a system. None of them is a place for secrets."""
_CALLS = {
    "x86_64": {
        "architecture": 0xC000003E, "socket": 41, "clone": 56, "clone3": 435, "prlimit64": 302,
        "socketpair": 53, "sendto": 44, "sendmsg": 46, "sendmmsg": 307,
        "denied": (
            *(53, 57, 58, 59, 322, 62, 200, 234, 129, 297, 424, 434),
        ),
        "foreign": (
            *(101, 310, 311, 425, 438, 272, 308, 165, 166, 155, 248, 249, 250, 321, 298, 323, 304),
            *(29, 30, 31, 64, 65, 66, 220, 68, 69, 70, 71, 240),
            *(188, 189, 190, 197, 198, 199, 463, 466),
        ),
        "modes": (90, 91, 268, 452, 92, 93, 94, 260),
    },
    "aarch64": {
        "architecture": 0xC00000B7, "socket": 198, "clone": 220, "clone3": 435, "prlimit64": 261,
        "socketpair": 199, "sendto": 206, "sendmsg": 211, "sendmmsg": 269,
        "denied": (
            *(199, 221, 281, 129, 130, 131, 138, 240, 424, 434),
        ),
        "foreign": (
            *(117, 270, 271, 425, 438, 97, 268, 40, 39, 41, 217, 218, 219, 280, 241, 282, 265),
            *(194, 195, 196, 190, 191, 192, 193, 186, 187, 188, 189, 180),
            *(5, 6, 7, 14, 15, 16, 463, 466),
        ),
        "modes": (52, 53, 452, 54, 55),
    },
}  # fmt: skip
"""Numbers of system calls. ``denied``: pairs of sockets, new processes and programs, signals. ``foreign``, which no
server needs either: to trace and read other processes, io_uring, namespaces and mounts, keys, bpf; shared memory,
semaphores and queues; attributes of files. ``modes``: owners and modes of files; these two Landlock leaves alone."""
_WHOLE = 0xFFFFFFFF
_SERVED = {
    "socket": ((16, _WHOLE, (2, 10)), (24, 0xF, (1,)), (32, _WHOLE, (0, 6))),
    "socketpair": ((16, _WHOLE, (1,)), (24, 0xF, (1,))),
    "sendto": ((40, 1 << 29, (0,)),),
    "sendmsg": ((32, 1 << 29, (0,)),),
    "sendmmsg": ((40, 1 << 29, (0,)),),
}
"""The arguments with which a server may make a call: where in ``struct seccomp_data`` one is, which bits of it count,
and their values. Only TCP sockets over IPv4 and IPv6 are allowed, whose ``connect`` Landlock checks. It does not check
others, nor data that are sent while a connection is made (MSG_FASTOPEN). A Unix socket reaches every listener on this
machine, such as an ssh-agent or a container engine, from within any namespace; so does one of a pair that sends single
messages."""
_THREAD = 0x00010000


def limit(memory_bytes: int, cpu_seconds: int, file_bytes: int) -> None:
    """Bound memory (beyond what is mapped from files), processor time and the size of written files; allow no core
    dumps; and let the kernel end this process first if memory runs out."""
    for what, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_DATA, memory_bytes),
        (resource.RLIMIT_AS, memory_bytes + (16 << 30)),
        (resource.RLIMIT_NOFILE, 1024),
    ):
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (value, value))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def end_with_parent(by: int = signal.SIGKILL) -> None:
    """Get this signal when the parent ends. It does not last through a change of credentials, as into a namespace."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, by, 0, 0, 0)


def confine(
    readable: Iterable[str],
    writable: Iterable[str],
    serves: bool = False,
    before_files: Callable[[], object] = lambda: None,
) -> list[str]:
    """Leave the network, and all files but these (folders with what is in them) and those of the system; which of
    ``network`` and ``files`` it could do. ``writable``: files that exist, and folders in which others may be made.
    ``serves``: it may listen and connect in the network that it is left with; ``before_files`` is called there, where
    there is one."""
    if sys.platform != "linux":
        return []
    done, ends_by = [], signal.SIGTERM if serves else signal.SIGKILL  # a server ends its own children first
    end_with_parent(ends_by)
    if _leave_network():
        done.append("network")
        end_with_parent(ends_by)
        before_files()
    ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    installed = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    # A server without a network of its own listens in that of this machine; it need not connect to anybody there.
    tcp = _BIND | _CONNECT if not serves else 0 if "network" in done else _CONNECT
    if _keep_to_files([*SYSTEM, sys.prefix, sys.base_prefix, *installed, *readable], list(writable), tcp):
        done.append("files")
    return done


def _leave_network() -> bool:
    """Into a network namespace without anything in it."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(_NEWUSER | _NEWNET) != 0:
        return False
    with contextlib.suppress(OSError):  # who it is may not be known there: files do not mind
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def _keep_to_files(readable: list[str], writable: list[str], tcp: int) -> bool:
    """``tcp``: what is forbidden of it as well, where Landlock can."""
    libc = ctypes.CDLL(None, use_errno=True)
    create, add, restrict = _LANDLOCK
    version = libc.syscall(create, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    handled = (1 << _FILE_RIGHTS[min(version, len(_FILE_RIGHTS)) - 1]) - 1
    attributes = struct.pack("Q", handled)
    if version >= 4:
        attributes += struct.pack("Q", tcp)
    if version >= 6:
        attributes += struct.pack("Q", 0b11)  # abstract sockets, and signals to processes outside
    rules = libc.syscall(create, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    try:
        wanted = [(path, _READ | _READ_DIR | _EXECUTE) for path in readable]
        wanted += [
            (path, _READ | _WRITE | _TRUNCATE | (_READ_DIR | _MAKE_AND_REMOVE if os.path.isdir(path) else 0))
            for path in [*writable, "/dev/null"]
        ]
        for path, rights in wanted:
            try:
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                rights &= handled if os.path.isdir(path) else handled & ~_READ_DIR
                rule = struct.pack("=Qi", rights, place)
                if libc.syscall(add, rules, 1, rule, 0) != 0:
                    return False
            finally:
                os.close(place)
        return libc.syscall(restrict, rules, 0) == 0
    finally:
        os.close(rules)


def forbid_calls(serves: bool = False) -> bool:
    """Forbid, on all threads, sockets, new processes and programs, and all that reaches other processes; return whether
    that could be done. Called when everything trusted is loaded: nothing can be started after it.

    ``serves``: TCP, and processes and programs of its own, stay allowed. A change of a mode does nothing and reports
    success: MLflow copies a model with all that its files have.
    """
    calls = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if calls is None:
        return False
    program = _filter(calls, serves)
    code = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    number = {"x86_64": 317, "aarch64": 277}[platform.machine()]
    return libc.syscall(number, 1, 1, head) == 0  # SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC


def _filter(calls: dict, serves: bool) -> bytes:
    """A classic BPF program over ``struct seccomp_data``: number at 0, architecture at 4, first argument at 16."""

    def statement(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    load, equal, at_least, any_bit, mask, give = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    allow, end, refuse = 0x7FFF0000, 0x80000000, 0x00050000
    denied, allowed = statement(give, refuse | errno.EPERM), statement(give, allow)
    lines = [
        statement(load, 4),
        statement(equal, calls["architecture"], yes=1),
        statement(give, end),
        statement(load, 0),
        statement(at_least, 0x40000000, no=1),  # the x32 calls of x86-64
        denied,
    ]
    numbers = calls["foreign"] if serves else (*calls["foreign"], *calls["denied"], calls["socket"])
    for number in numbers:
        lines += [statement(equal, number, no=1), denied]
    for number in calls["modes"]:
        lines += [statement(equal, number, no=1), statement(give, refuse) if serves else denied]
    if serves:
        for name, arguments in _SERVED.items():
            checks = []
            for where, bits, values in arguments:
                checks += [statement(load, where), statement(mask, bits)]
                checks += [statement(equal, value, yes=len(values) - at) for at, value in enumerate(values)]
                checks += [denied]
            lines += [statement(equal, calls[name], no=len(checks) + 1), *checks, allowed]
        return b"".join([*lines, allowed])
    lines += [
        statement(equal, calls["clone3"], no=1),  # its flags cannot be seen; libraries then take clone
        statement(give, refuse | errno.ENOSYS),
        statement(equal, calls["clone"], no=3),
        statement(load, 16),
        statement(any_bit, _THREAD, yes=4),  # to `allow`
        denied,
        statement(equal, calls["prlimit64"], no=2),
        statement(load, 16),
        statement(equal, 0, no=1),  # its own
        allowed,
        denied,
    ]
    return b"".join(lines)
