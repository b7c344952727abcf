"""A seccomp filter, assembled here: system calls that a kernel candidate never needs are refused.

A deny-list in classic BPF, installed by ``seccomp(2)`` without any library. Refused calls fail with EPERM, so that
honest code gets an ordinary error; a foreign architecture (``int 0x80``) kills the process; the x32 table is refused.
``clone3`` says ENOSYS since its flags lie behind a pointer (glibc then uses ``clone``, whose flags are checked).
``socket`` and ``connect`` are refused, because Landlock does not see UDP, netlink and pathname Unix sockets; connected
pairs (``socketpair(AF_UNIX)``, no datagrams, which could be addressed elsewhere) stay. With a GPU, Unix packet
sockets may listen: ``cuInit`` binds one (``cuda-uvmfd-...``, seen on an H200) and fails with error 304 where it cannot.
Setting PDEATHSIG pretends success: multiprocessing does it, and ours must stay.

Not covered: what is behind pointers, and bugs of the kernel in the calls that stay. Sources: ``uapi/linux/seccomp.h``,
``uapi/linux/filter.h``, the syscall tables of x86-64 and of the generic (aarch64) ABI.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from collections.abc import Iterator

from drk.gym.sandbox import syscalls

_LOAD, _AND, _JEQ, _JGE, _JSET, _RET = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NR_OFFSET, _ARCH_OFFSET, _ARGS_OFFSET = 0, 4, 16
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_TYPE_MASK = 0xF  # the rest of the type word is SOCK_CLOEXEC and SOCK_NONBLOCK
_SET_MODE_FILTER, _FLAG_TSYNC = 1, 1
_NAMESPACES = (
    syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWCGROUP
    | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
)
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

# name: (x86-64, aarch64); None where the machine has no such call
DENIED: dict[str, tuple[int | None, int | None]] = {
    "connect": (42, 203), "ptrace": (101, 117), "kcmp": (312, 272),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "process_mrelease": (448, 448),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "open_tree_attr": (467, 467),
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "create_module": (174, None), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "sethostname": (170, 161), "setdomainname": (171, 162),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "vhangup": (153, 58), "acct": (163, 89),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "lookup_dcookie": (212, 18), "syslog": (103, 116), "fanotify_init": (300, 262),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}  # fmt: skip
# refused without a GPU; with one they can only see the Unix packet sockets that the rule for "socket" lets through
LISTENING: dict[str, tuple[int, int]] = {
    "bind": (49, 200), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242),
}  # fmt: skip
_SOCKET = (41, 198)
_CLONE, _CLONE3, _PRCTL, _IOCTL, _SOCKETPAIR = (56, 220), (435, 435), (157, 167), (16, 29), (53, 199)
# refused unless their first argument is 0, the caller itself: else one could slow or starve the Judge's timing
OWN_PROCESS_ONLY: dict[str, tuple[int, int]] = {
    "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274),
}  # fmt: skip
# the same, where the second argument is the id and the first has to say "process"
OWN_PRIORITY_ONLY: dict[str, tuple[int, int, int]] = {"setpriority": (141, 140, 0), "ioprio_set": (251, 30, 1)}

Instruction = tuple[int, int, int, int]


def _load_argument(index: int) -> Instruction:
    return (_LOAD, 0, 0, _ARGS_OFFSET + 8 * index)  # the low word; both machines are little-endian


def _fail(code: int) -> Instruction:
    return (_RET, 0, 0, _ERRNO | code)


def _when(nr: int, body: list[Instruction]) -> list[Instruction]:
    """``body`` (which always returns) for one system call; anything else goes on behind it."""
    return [(_JEQ, 0, len(body), nr), *body]


def _unix_only(kinds: tuple[int, ...]) -> list[Instruction]:
    """Body for ``socket``/``socketpair``: allow AF_UNIX of these types, refuse the rest."""
    allow, deny = (_RET, 0, 0, _ALLOW), _fail(errno.EPERM)
    body = [_load_argument(0), (_JEQ, 1, 0, int(socket.AF_UNIX)), deny, _load_argument(1), (_AND, 0, 0, _TYPE_MASK)]
    for kind in kinds:
        body += [(_JEQ, 0, 1, kind), allow]
    return [*body, deny]


def _socket_rules(column: int, *, gpu: bool) -> Iterator[list[Instruction]]:
    stream, packets = int(socket.SOCK_STREAM), int(socket.SOCK_SEQPACKET)
    yield _when(_SOCKET[column], _unix_only((packets,) if gpu else ()))
    yield _when(_SOCKETPAIR[column], _unix_only((stream, packets)))
    if not gpu:
        for numbers in LISTENING.values():
            yield _when(numbers[column], [_fail(errno.EPERM)])


def _rules(column: int) -> Iterator[list[Instruction]]:
    allow, deny = (_RET, 0, 0, _ALLOW), _fail(errno.EPERM)
    for numbers in DENIED.values():
        nr = numbers[column]
        if nr is not None:
            yield _when(nr, [deny])
    for entry in OWN_PROCESS_ONLY.values():
        yield _when(entry[column], [_load_argument(0), (_JEQ, 0, 1, 0), allow, deny])
    for which in OWN_PRIORITY_ONLY.values():
        body = [_load_argument(0), (_JEQ, 0, 3, which[2]), _load_argument(1), (_JEQ, 0, 1, 0), allow, deny]
        yield _when(which[column], body)
    yield _when(_CLONE[column], [_load_argument(0), (_JSET, 0, 1, _NAMESPACES), deny, allow])
    yield _when(_CLONE3[column], [_fail(errno.ENOSYS)])
    yield _when(_IOCTL[column], [_load_argument(1), (_JEQ, 1, 0, _TIOCSTI), (_JEQ, 0, 1, _TIOCLINUX), deny, allow])
    prctl_body = [
        _load_argument(0),
        (_JEQ, 0, 1, syscalls.PR_SET_PDEATHSIG),
        _fail(0),
        (_JEQ, 1, 0, syscalls.PR_SET_CHILD_SUBREAPER),
        (_JEQ, 0, 1, syscalls.PR_SET_MM),
        deny,
        allow,
    ]
    yield _when(_PRCTL[column], prctl_body)


def program(machine: str, *, gpu: bool = False) -> list[Instruction]:
    """The filter for a machine as (code, jt, jf, k). Raises ``OSError(ENOSYS)`` where its tables are not known."""
    if machine not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no seccomp table for {machine}")
    listing: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH_OFFSET),
        (_JEQ, 1, 0, _AUDIT_ARCH[machine]),
        (_RET, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR_OFFSET),
    ]
    if machine == "x86_64":
        listing += [(_JGE, 0, 1, _X32_BIT), _fail(errno.EPERM)]
    column = 0 if machine == "x86_64" else 1
    for rule in (*_rules(column), *_socket_rules(column, gpu=gpu)):
        listing += rule
    return [*listing, (_RET, 0, 0, _ALLOW)]


def install(*, gpu: bool = False) -> None:
    """Filter this process and all that it starts, for good. Needs no_new_privs. Raises ``OSError``."""
    listing = program(syscalls.machine(), gpu=gpu)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in listing))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(listing), ctypes.addressof(code)))
    syscalls.syscall(syscalls.number("seccomp"), _SET_MODE_FILTER, _FLAG_TSYNC, header, what="seccomp")
