"""The system calls that code in a sandbox may not make, as a seccomp filter.

Promises: `program()` is a classic BPF program for this machine's architecture which refuses, with an error and never
silently, calls that reach around the sandbox (sockets other than connected pairs, new namespaces, mounts, other
processes' memory, signals, limits and priorities for the sandbox's supervisor) or take memory that no limit counts.
All else is allowed: the filter stands behind the namespaces and limits, it does not replace them. Format: seccomp(2)
and linux/filter.h; numbers: the kernel's syscall tables.
"""

from __future__ import annotations

import errno
import platform
import struct
import sys
from functools import lru_cache

_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020000
_AF_UNIX = 1
_KIND_OF_SOCKET, _STREAM, _SEQUENCED = 0xF, 1, 5
_SOL_SOCKET = 1
_BUFFER_SIZES = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and the same by force
_SHARED_ANONYMOUS = 0x21
_EVERY_PROCESS = 0xFFFFFFFF
_SUPERVISOR = 1  # the first process of its namespace
_PRIO_USER, _IOPRIO_WHO_USER = 2, 3

# Where a number is the same on both architectures, it stands once.
_FORBIDDEN: dict[str, tuple[int, int]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bind": (49, 200),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "connect": (42, 203),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "listen": (50, 201),
    "lookup_dcookie": (212, 18),
    "mbind": (237, 235),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "set_mempolicy": (238, 237),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
    "vmsplice": (278, 75),
}
_FORBIDDEN_ON_X86 = {
    "_sysctl": 156,
    "ioperm": 173,
    "iopl": 172,
    "modify_ldt": 154,
    "sysfs": 139,
    "uselib": 134,
    "ustat": 136,
}
_CLONE, _CLONE3, _KILL_CALL, _MMAP = (56, 220), (435, 435), (62, 129), (9, 222)
_SOCKET, _SOCKETPAIR, _SETSOCKOPT = (41, 198), (53, 199), (54, 208)
_SETPRIORITY, _IOPRIO_SET = (141, 140), (251, 30)
# Calls whose first argument is a process: none of them is for the supervisor.
_ON_A_PROCESS = {
    "pidfd_open": (434, 434),
    "prlimit64": (302, 261),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "tgkill": (234, 131),
    "tkill": (200, 130),
}


def architecture() -> str | None:
    """The name of this machine's architecture where there is a filter for it, for a 64-bit process."""
    machine = platform.machine()
    return machine if machine in _ARCHITECTURES and sys.maxsize > 1 << 32 and sys.byteorder == "little" else None


@lru_cache(maxsize=2)
def program(machine: str) -> bytes:
    """The filter for `x86_64` or `aarch64`."""
    at = 0 if machine == "x86_64" else 1
    code = [_op(_LOAD, 4), _op(_EQUAL, _ARCHITECTURES[machine], 1, 0), _op(_RETURN, _KILL), _op(_LOAD, 0)]
    if machine == "x86_64":
        code += [_op(_AT_LEAST, _X32, 0, 1), _refuse(errno.ENOSYS)]
        code += [one for number in _FORBIDDEN_ON_X86.values() for one in _when(number, [_refuse(errno.EPERM)])]
    for numbers in _FORBIDDEN.values():
        code += _when(numbers[at], [_refuse(errno.EPERM)])
    # The C library asks for threads by clone3, whose flags a filter cannot read, and falls back to clone.
    code += _when(_CLONE3[at], [_refuse(errno.ENOSYS)])
    code += _when(_CLONE[at], [_argument(0), _op(_ANY_BIT, _NEW_NAMESPACES, 0, 1), _refuse(errno.EPERM)])
    code += _sockets(at)
    # Shared memory without a file may be let go of without being given back, and then no limit counts it.
    shared = [_op(_AND, _SHARED_ANONYMOUS), _op(_EQUAL, _SHARED_ANONYMOUS, 0, 1), _refuse(errno.EPERM)]
    code += _when(_MMAP[at], [_argument(3), *shared])
    everyone = [_op(_EQUAL, _EVERY_PROCESS, 0, 1), _refuse(errno.EPERM)]
    supervisor = [_op(_EQUAL, _SUPERVISOR, 0, 1), _refuse(errno.EPERM)]
    code += _when(_KILL_CALL[at], [_argument(0), *supervisor, *everyone])
    for numbers in _ON_A_PROCESS.values():
        code += _when(numbers[at], [_argument(0), *supervisor])
    for numbers, users in ((_SETPRIORITY, _PRIO_USER), (_IOPRIO_SET, _IOPRIO_WHO_USER)):
        all_of_a_user = [_argument(0), _op(_EQUAL, users, 0, 1), _refuse(errno.EPERM)]
        code += _when(numbers[at], [*all_of_a_user, _argument(1), *supervisor])
    return b"".join([*code, _op(_RETURN, _ALLOW)])


def _sockets(at: int) -> list[bytes]:
    """Pairs of connected ones are all there are: a lone one, or one for datagrams, reaches names in shown folders."""
    code = _when(_SOCKET[at], [_refuse(errno.EAFNOSUPPORT)])
    family = [_argument(0), _op(_EQUAL, _AF_UNIX, 1, 0), _refuse(errno.EAFNOSUPPORT)]
    kind = [_argument(1), _op(_AND, _KIND_OF_SOCKET), _op(_EQUAL, _STREAM, 2, 0), _op(_EQUAL, _SEQUENCED, 1, 0)]
    code += _when(_SOCKETPAIR[at], [*family, *kind, _refuse(errno.EPERM)])
    # The buffers are the kernel's memory; the supervisor counts sockets, each with buffers of the usual size.
    level = [_argument(1), _op(_EQUAL, _SOL_SOCKET, 1, 0), _op(_RETURN, _ALLOW), _argument(2)]
    sizes = [one for size in _BUFFER_SIZES for one in (_op(_EQUAL, size, 0, 1), _refuse(errno.EPERM))]
    return code + _when(_SETSOCKOPT[at], [*level, *sizes])


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _refuse(number: int) -> bytes:
    return _op(_RETURN, _ERRNO | number)


def _argument(index: int) -> bytes:
    """Load the low half of an argument."""
    return _op(_LOAD, 16 + 8 * index)


def _when(number: int, then: list[bytes]) -> list[bytes]:
    """`then` for one system call, which is allowed where that comes to no other end."""
    return [_op(_EQUAL, number, 0, len(then) + 1), *then, _op(_RETURN, _ALLOW)]
