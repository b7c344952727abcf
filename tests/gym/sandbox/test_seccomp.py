"""The filter as a program: a small interpreter of classic BPF checks every rule on both machines."""

from __future__ import annotations

import errno
import socket

import pytest

from drk.gym.sandbox import seccomp, syscalls

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050000 | errno.ENOSYS, 0x80000000
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINES = ("x86_64", "aarch64")


def run(listing, arch, nr, *args):
    """Execute the filter on one system call; returns the action word."""
    words = {0: nr, 4: arch}
    for index, value in enumerate((*args, 0, 0, 0, 0, 0, 0)[:6]):
        words[16 + 8 * index] = value & 0xFFFFFFFF
    accumulator, counter = 0, 0
    while True:
        code, on_true, on_false, constant = listing[counter]
        counter += 1
        if code == 0x06:
            return constant
        if code == 0x20:
            accumulator = words[constant]
        elif code == 0x54:
            accumulator &= constant
        else:
            test = {
                0x15: accumulator == constant,
                0x35: accumulator >= constant,
                0x45: bool(accumulator & constant),
            }[code]
            counter += on_true if test else on_false


@pytest.fixture(params=[(m, gpu) for m in MACHINES for gpu in (False, True)], ids=str)
def filtered(request):
    machine, gpu = request.param
    listing = seccomp.program(machine, gpu=gpu)
    column = MACHINES.index(machine)
    return lambda entry, *args: run(listing, ARCH[machine], entry[column], *args), column, gpu


def test_denied_calls(filtered):
    act, column, _ = filtered
    for name, numbers in seccomp.DENIED.items():
        if numbers[column] is not None:
            assert act(numbers) == EPERM, name


def test_everyday_calls_pass(filtered):
    act, _, _ = filtered
    everyday = {
        "read": (0, 63), "write": (1, 64), "openat": (257, 56), "mmap": (9, 222), "futex": (202, 98),
        "execve": (59, 221), "kill": (62, 129), "memfd_create": (319, 279), "sendmsg": (46, 211), "getpid": (39, 172),
        "mbind": (237, 235), "pidfd_open": (434, 434), "landlock_restrict_self": (446, 446),
    }  # fmt: skip
    for name, numbers in everyday.items():
        assert act(numbers) == ALLOW, name


def test_clone_may_make_threads_but_no_namespaces(filtered):
    act, _, _ = filtered
    assert act((56, 220), 0x003D0F00) == ALLOW  # what glibc passes for a thread
    for flag in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert act((56, 220), flag | 17) == EPERM
    assert act((435, 435)) == ENOSYS


def test_sockets(filtered):
    act, _, gpu = filtered
    own, pair = (41, 198), (53, 199)
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, 17, 38, 40):
        assert act(own, family, socket.SOCK_SEQPACKET) == EPERM
        assert act(pair, family, socket.SOCK_STREAM) == EPERM
    flags = socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    assert act(own, socket.AF_UNIX, socket.SOCK_SEQPACKET | flags) == (ALLOW if gpu else EPERM)
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        assert act(own, socket.AF_UNIX, kind) == EPERM
    assert act(pair, socket.AF_UNIX, socket.SOCK_STREAM | flags) == ALLOW
    assert act(pair, socket.AF_UNIX, socket.SOCK_DGRAM) == EPERM
    for numbers in seccomp.LISTENING.values():
        assert act(numbers) == (ALLOW if gpu else EPERM)
    assert act((42, 203)) == EPERM  # connect


def test_calls_on_other_processes(filtered):
    act, _, _ = filtered
    for name, numbers in seccomp.OWN_PROCESS_ONLY.items():
        assert act(numbers, 0) == ALLOW, name
        assert act(numbers, 1234) == EPERM, name
    nice, io = (141, 140), (251, 30)
    assert act(nice, 0, 0) == ALLOW
    assert act(nice, 0, 7) == EPERM
    assert act(nice, 2, 0) == EPERM, "every process of the user"
    assert act(io, 1, 0) == ALLOW
    assert act(io, 3, 0) == EPERM


def test_prctl_and_ioctl(filtered):
    act, _, _ = filtered
    assert act((157, 167), syscalls.PR_SET_PDEATHSIG) == 0x00050000, "pretends success"
    assert act((157, 167), syscalls.PR_SET_CHILD_SUBREAPER) == EPERM
    assert act((157, 167), syscalls.PR_SET_MM) == EPERM
    assert act((157, 167), 15) == ALLOW  # PR_SET_NAME
    for request in (0x5412, 0x541C):
        assert act((16, 29), 0, request) == EPERM
    assert act((16, 29), 0, 0xC0204600) == ALLOW


def test_foreign_tables():
    listing = seccomp.program("x86_64")
    assert run(listing, 0x40000003, 20) == KILL
    assert run(listing, ARCH["x86_64"], 0x40000000 + 39) == EPERM
    with pytest.raises(OSError, match="no seccomp table"):
        seccomp.program("riscv64")


def test_jumps_stay_inside():
    for machine in MACHINES:
        listing = seccomp.program(machine, gpu=True)
        assert len(listing) < 4096
        for place, (code, on_true, on_false, _) in enumerate(listing):
            if code & 0x07 == 0x05:
                assert place + 1 + max(on_true, on_false) < len(listing)
                assert max(on_true, on_false) < 256
        assert listing[-1][0] == 0x06
