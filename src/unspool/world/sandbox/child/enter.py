# ruff: noqa: PTH102, PTH103, PTH112, PTH120, PTH123, PTH211
# (pathlib would cost every start some milliseconds)
"""Into a sandbox by the kernel's own means: namespaces, a root of its own, no privileges.

Promises: `enter` returns only in a process that is the init of new process, mount, network, IPC and host-name
namespaces, whose root holds what the configuration lists and nothing else; `drop` leaves it without any
capability. What fails raises OSError, with the step that failed. With the rights of root no user namespace is made:
the mounts are made as root, and then root is given up for a user id that nobody has, because the limit on
processes does not bind root. Facts: unshare(2), user_namespaces(7), pivot_root(2), mount_setattr(2), capabilities(7).
"""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False  # typing's own would cost the import of typing
if TYPE_CHECKING:
    from typing import Any

_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_DETACH = 2
_MOUNT_SETATTR = 442  # the same number on every architecture
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_READ_ONLY = 1
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 22, 38, 47
_SECCOMP_MODE_FILTER, _CAP_AMBIENT_CLEAR_ALL = 2, 4
_CAPABILITY_VERSION_3 = 0x20080522
_SIGKILL = 9

_libc = ctypes.CDLL(None, use_errno=True)
_DEVICES = ("null", "zero", "full", "random", "urandom")


def _check(result: int, step: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{step}: {os.strerror(code)}")


def _prctl(step: str, option: int, *arguments: Any) -> None:
    rest = [*arguments, *[0] * (4 - len(arguments))]
    wide = [one if isinstance(one, ctypes.Structure) else ctypes.c_ulong(one) for one in rest]
    _check(_libc.prctl(option, *wide), f"prctl {step}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if one is None else os.fsencode(one) for one in (source, target, kind)]
    text = None if data is None else data.encode()
    _check(_libc.mount(*encoded, ctypes.c_ulong(flags), text), f"mount {kind or 'of'} {source} at {target}")


def _unmount(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), _DETACH), f"umount {target}")


def _pivot(new: str, old: str) -> None:
    pivot_root = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
    _check(_libc.syscall(ctypes.c_long(pivot_root), os.fsencode(new), os.fsencode(old)), "pivot_root")


def enter(config: dict[str, Any]) -> int | None:
    """Become the init of a sandbox; the process that called stays outside, waits and ends with it.

    Returns:
        A directory descriptor of the sandbox's own /proc, which is mounted nowhere.

    Raises:
        OSError: a step that the kernel refused.
    """
    spaces = _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS | _NEWCGROUP
    if config["root"]:
        _check(_libc.unshare(spaces), "unshare")
    else:
        uid, gid = os.getuid(), os.getgid()
        _check(_libc.unshare(spaces | _NEWUSER), "unshare of a user namespace")
        for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    init = os.fork()
    if init:
        die_with_parent()
        for standard in (0, 1, 2):  # its ends of the pipes would outlive the init's
            os.close(standard)
        os.waitpid(init, 0)
        os._exit(0)
    die_with_parent()
    hostname = b"sandbox"
    _check(_libc.sethostname(hostname, len(hostname)), "sethostname")
    return _build(config)


def _build(config: dict[str, Any]) -> int:
    """A root of its own: read-only but for /tmp, and no way to the old one."""
    os.umask(0o022)
    _mount("none", "/", None, _REC | _PRIVATE)
    _mount("tmpfs", config["base"], "tmpfs", _NOSUID | _NODEV, "mode=755,size=1m")
    os.mkdir(config["base"] + "/old")
    os.mkdir(config["base"] + "/new")
    _pivot(config["base"], config["base"] + "/old")
    os.chdir("/")
    _mount("tmpfs", "/new", "tmpfs", _NOSUID, "mode=755,size=1m")
    for folder in ("/new/dev", "/new/tmp", "/new/proc"):
        os.mkdir(folder)
    owner = f",uid={config['uid']},gid={config['uid']}" if config["root"] else ""
    size = f"mode=700,size={config['files_mb']}m,nr_inodes={config['inodes']}"
    _mount("tmpfs", "/new/tmp", "tmpfs", _NOSUID | _NODEV, size + owner)
    for path in [*config["readable"], *(f"/dev/{device}" for device in _DEVICES)]:
        _bind(path)
    for target, link in [*config["links"], ("/tmp", "/dev/shm")]:
        os.makedirs(os.path.dirname("/new" + link), exist_ok=True)
        os.symlink(target, "/new" + link)
    _attributes("/new", _READ_ONLY, 0, _AT_RECURSIVE)
    _attributes("/new/tmp", 0, _READ_ONLY, 0)
    _mount("proc", "/new/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    proc = os.open("/new/proc", os.O_RDONLY | os.O_DIRECTORY)
    _unmount("/new/proc")
    os.chdir("/new")
    _pivot(".", ".")  # the old root now lies over the new one, and is taken off
    _unmount(".")
    os.chdir("/")
    return proc


def _bind(path: str) -> None:
    """Show a file or folder of the host at its own place."""
    source, target = "/old" + path, "/new" + path
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, None, _BIND | _REC)


def _attributes(path: str, add: int, take: int, flags: int) -> None:
    """Change the attributes of a mount, and with `_AT_RECURSIVE` of all that lies mounted in it."""
    attributes = (ctypes.c_uint64 * 4)(add, take, 0, 0)
    call = _libc.syscall(
        ctypes.c_long(_MOUNT_SETATTR),
        ctypes.c_long(_AT_FDCWD),
        os.fsencode(path),
        ctypes.c_long(flags),
        ctypes.byref(attributes),
        ctypes.c_long(32),
    )
    _check(call, f"mount_setattr of {path}")


def drop(config: dict[str, Any]) -> None:
    """Give up root, every capability and the way back, and be closed to others of the same user id.

    Raises:
        OSError: a step that the kernel refused.
    """
    if config["root"]:
        os.setgroups([])
        os.setresgid(config["uid"], config["uid"], config["uid"])
        os.setresuid(config["uid"], config["uid"], config["uid"])
    _prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)
    _prctl("cap_ambient", _PR_CAP_AMBIENT, _CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(nothing)), "capset")
    die_with_parent()  # a change of user forgets it
    _prctl("dumpable", _PR_SET_DUMPABLE, 0)


def die_with_parent() -> None:
    """Be killed when the parent ends."""
    _prctl("pdeathsig", _PR_SET_PDEATHSIG, _SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents end."""
    _prctl("child_subreaper", 36, 1)


def confine(program: bytes) -> None:
    """Load a seccomp filter for this process and its descendants; needs no_new_privs.

    Raises:
        OSError: the kernel has no seccomp filters.
    """
    _prctl("dumpable", _PR_SET_DUMPABLE, 1)  # its own supervisor reads how much memory it uses
    code = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    filled = Program(len(program) // 8, ctypes.cast(code, ctypes.c_void_p))
    call = _libc.prctl(
        _PR_SET_SECCOMP,
        ctypes.c_ulong(_SECCOMP_MODE_FILTER),
        ctypes.byref(filled),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
    )
    _check(call, "prctl seccomp")
