"""What a hostile Runner tries. Each function returns when it got what it should not have, else it raises.

They run inside a forked child after ``enter`` (see cage.py); ``ctx`` names the targets outside. Attacks that measure
return a figure for the test to judge.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
LIBC.ptrace.restype = ctypes.c_long


class Blocked(OSError):
    """The attack found nothing."""


def checked(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def syscall(nr, *args):
    return checked(LIBC.syscall(ctypes.c_long(nr), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args]))


def contains_secret(data, ctx):
    if ctx["secret"].encode() not in data:
        raise Blocked(0, "no secret there")
    return "secret"


# --- files


def read_secret(ctx):
    return contains_secret(Path(ctx["outside"], "secret.txt").read_bytes(), ctx)


def list_outside(ctx):
    return os.listdir(ctx["outside"])


def read_shadow(ctx):
    return len(Path("/etc/shadow").read_bytes())


def write_outside(ctx):
    Path(ctx["outside"], "written").write_text("x")


def symlink_read(ctx):
    os.symlink(ctx["outside"], "link")
    return contains_secret(Path("link/secret.txt").read_bytes(), ctx)


def symlink_write(ctx):
    os.symlink(os.path.join(ctx["outside"], "through-link"), "link-file")
    Path("link-file").write_text("x")


def hardlink_read(ctx):
    os.link(os.path.join(ctx["outside"], "secret.txt"), "hard")
    return contains_secret(Path("hard").read_bytes(), ctx)


def rename_in(ctx):
    os.rename(os.path.join(ctx["outside"], "movable"), "moved")


def truncate_outside(ctx):
    os.truncate(os.path.join(ctx["outside"], "movable"), 0)


def write_shm(ctx):
    """Visible to others only when /dev/shm is the host's; the cage looks for it afterwards."""
    Path("/dev/shm", ctx["token"]).write_text("x")
    return "wrote"


def read_block_device(ctx):
    node = next(p for p in Path("/dev").iterdir() if p.is_block_device() and p.name.startswith(("vd", "sd", "nvme")))
    with node.open("rb") as handle:
        return len(handle.read(16))


def make_device(ctx):
    os.mknod("disk", 0o600 | 0o060000, os.makedev(254, 0))


def write_sysctl(ctx):
    path = Path("/proc/sys/kernel/core_pattern")
    path.write_text(path.read_text())


# --- other processes


def parent_environ(ctx):
    return contains_secret(Path(f"/proc/{ctx['parent']}/environ").read_bytes(), ctx)


def sibling_environ(ctx):
    return contains_secret(Path(f"/proc/{ctx['sibling']}/environ").read_bytes(), ctx)


def sibling_cmdline(ctx):
    return Path(f"/proc/{ctx['sibling']}/cmdline").read_bytes().decode() or Blocked


def own_environ(ctx):
    return contains_secret(Path("/proc/self/environ").read_bytes(), ctx)


def own_getenv(ctx):
    LIBC.getenv.restype = ctypes.c_char_p
    return contains_secret(LIBC.getenv(b"DRK_TEST_TOKEN") or b"", ctx)


def sibling_mem(ctx):
    with open(f"/proc/{ctx['sibling']}/mem", "rb"):
        return "opened"


def sibling_fds(ctx):
    return os.listdir(f"/proc/{ctx['sibling']}/fd")


def sibling_ptrace(ctx):
    checked(LIBC.ptrace(0x4206, ctypes.c_long(ctx["sibling"]), None, None))  # PTRACE_SEIZE
    return "seized"


def sibling_vm_read(ctx):
    buffer = ctypes.create_string_buffer(8)
    local = ctypes.create_string_buffer(struct.pack("PN", ctypes.addressof(buffer), 8))
    maps = Path(f"/proc/{ctx['sibling']}/maps").read_text() if ctx["basic"] else "1000-2000"
    remote = ctypes.create_string_buffer(struct.pack("PN", int(maps.split("-")[0], 16), 8))
    return checked(LIBC.process_vm_readv(ctx["sibling"], local, 1, remote, 1, 0))


def signal_parent(ctx):
    os.kill(ctx["parent"], signal.SIGURG)


def signal_sibling(ctx):
    os.kill(ctx["sibling"], signal.SIGURG)


def pin_sibling(ctx):
    os.sched_setaffinity(ctx["sibling"], os.sched_getaffinity(0))


def nice_sibling(ctx):
    os.setpriority(os.PRIO_PROCESS, ctx["sibling"], os.getpriority(os.PRIO_PROCESS, 0))


def limit_sibling(ctx):
    resource.prlimit(ctx["sibling"], resource.RLIMIT_CORE, (0, 0))


def inherited_fd(ctx):
    return contains_secret(os.pread(ctx["leaked_fd"], 200, 0), ctx)


# --- network


def tcp_connect(ctx):
    with socket.create_connection(("127.0.0.1", ctx["tcp"]), timeout=2):
        return "connected"


def tcp_bind(ctx):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))


def udp_send(ctx):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        return client.sendto(b"x", ("127.0.0.1", ctx["udp"]))


def unix_connect(ctx):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.path.join(ctx["outside"], "unix.sock"))


def unix_datagram_pair(ctx):
    left, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return left.sendto(b"x", os.path.join(ctx["outside"], "datagram.sock"))


def abstract_connect(ctx):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("\0" + ctx["token"])


def netlink(ctx):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as client:
        client.bind((0, 0))


# --- kernel surface


def chroot(ctx):
    os.mkdir("jail")
    os.chroot("jail")


def mount(ctx):
    os.mkdir("mnt")
    checked(LIBC.mount(b"tmpfs", b"mnt", b"tmpfs", ctypes.c_ulong(0), None))
    LIBC.umount2(b"mnt", 0)


def unshare_user(ctx):
    checked(LIBC.unshare(0x10000000))


def clone_user_namespace(ctx):
    child = syscall(56 if os.uname().machine == "x86_64" else 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def perf_event(ctx):
    attribute = ctypes.create_string_buffer(struct.pack("=IIQ", 1, 112, 0) + bytes(96), 112)
    syscall(298 if os.uname().machine == "x86_64" else 241, attribute, 0, -1, -1, 0)


def io_uring(ctx):
    syscall(425, 4, ctypes.create_string_buffer(120))


def add_key(ctx):
    syscall(248 if os.uname().machine == "x86_64" else 217, b"user", b"drk", b"x", 1, -2)


def userfaultfd(ctx):
    syscall(323 if os.uname().machine == "x86_64" else 282, 1)


def system_v_shm(ctx):
    segment = checked(LIBC.shmget(0, 4096, 0o1600))
    LIBC.shmctl(segment, 0, None)


def x32_syscall(ctx):
    return syscall(0x40000000 + 39)


def foreign_architecture(ctx):
    """getpid through the 32-bit gate; a filter that only knows x86-64 numbers would let it pass."""
    code = bytes.fromhex("b814000000cd80c3")
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()


def clear_pdeathsig(ctx):
    LIBC.prctl(1, 0, 0, 0, 0)
    value = ctypes.c_int(-1)
    checked(LIBC.prctl(2, ctypes.byref(value), 0, 0, 0))
    if value.value == signal.SIGKILL:
        raise Blocked(0, "still set")


def clear_subreaper(ctx):
    checked(LIBC.prctl(36, 0, 0, 0, 0))


def keep_capabilities(ctx):
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    masks = [int(fields[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")]
    if os.geteuid() == 0:
        masks.append(int(fields["CapBnd"], 16))
    if not any(masks):
        raise Blocked(0, "no capabilities")
    return masks


def new_privileges(ctx):
    if "NoNewPrivs:\t1" in Path("/proc/self/status").read_text():
        raise Blocked(0, "no_new_privs")


# --- floods


def fd_flood(ctx):
    held = []
    with contextlib.suppress(OSError):
        while len(held) < 20_000:
            held.append(os.open("/dev/null", os.O_RDONLY))
    return len(held)


def disk_flood(ctx):
    chunk = bytes(1 << 20)
    with open("flood", "wb", buffering=0) as handle:
        for _ in range(64):
            handle.write(chunk)
    return "unbounded"


def fork_storm(ctx):
    """How many processes exist at once before fork is refused (at most 500 tried)."""
    gate, _keep = os.pipe()
    pids = []
    try:
        while len(pids) < 500:
            pid = os.fork()
            if pid == 0:
                os.close(_keep)
                os.read(gate, 1)
                os._exit(0)
            pids.append(pid)
    except OSError:
        pass
    os.close(_keep)
    for pid in pids:
        os.waitpid(pid, 0)
    return len(pids)


def core_dump(ctx):
    child = os.fork()
    if child == 0:
        os.abort()
    status = os.waitpid(child, 0)[1]
    return {"dumped": os.WCOREDUMP(status), "signal": os.WTERMSIG(status), "limit": resource.getrlimit(4)[1]}


def identity(ctx):
    return {
        "uid": os.getuid(),
        "groups": os.getgroups(),
        "pid": os.getpid(),
        "cwd": os.getcwd(),
        "home": os.environ["HOME"],
        "names": sorted(os.environ),
        "stdin": os.readlink("/proc/self/fd/0"),
        "fds": sorted(int(n) for n in os.listdir("/proc/self/fd")),
        "proc_self": os.readlink("/proc/self"),
    }


def crash_abort(ctx):
    os.abort()


def exit_seven(ctx):
    os._exit(7)


# --- honest work


def run_python(source, **env):
    import sys

    done = subprocess.run(
        [sys.executable, "-c", source], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"exit {done.returncode}: {done.stderr[-1500:]}")
    return done.stdout.strip()


def work_tempfile(ctx):
    import tempfile

    with tempfile.NamedTemporaryFile("w") as handle:
        handle.write("x")
        return handle.name


def work_subprocess(ctx):
    return subprocess.run(["echo", "hello"], capture_output=True, text=True, check=True).stdout.strip()


def work_threads(ctx):
    import threading

    found = []
    threads = [threading.Thread(target=lambda: found.append(1)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(found)


def work_gcc(ctx):
    Path("f.c").write_text("#include <math.h>\nint twice(int x) { return 2 * x + (int)floor(0.5); }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "f.so", "f.c", "-lm"], check=True, capture_output=True)
    return ctypes.CDLL(os.path.abspath("f.so")).twice(21)


def work_torch(ctx):
    return run_python(
        "import torch; torch.set_num_threads(4); a = torch.ones(600, 600); print(int((a @ a).sum().item()))"
    )


TRITON = """
import torch, triton, triton.language as tl
@triton.jit
def add(x, y, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    tl.store(o + i, tl.load(x + i, mask=m) + tl.load(y + i, mask=m), mask=m)
"""


def work_interpreter(ctx):
    Path("k.py").write_text(
        TRITON + "x = torch.ones(1000); o = torch.empty(1000); add[(4,)](x, x, o, 1000, B=256); print(int(o.sum()))"
    )
    return run_python("import runpy; runpy.run_path('k.py')", TRITON_INTERPRET="1")


def work_ptxas(ctx):
    Path("k.py").write_text(
        TRITON
        + "from triton.compiler import ASTSource\nfrom triton.backends.compiler import GPUTarget\n"
        + "s = ASTSource(add, signature={'x': '*fp32', 'y': '*fp32', 'o': '*fp32', 'n': 'i32', 'B': 'constexpr'},"
        + " constexprs={'B': 256})\n"
        + "k = triton.compile(s, target=GPUTarget('cuda', 90, 32))\n"
        + "import os\nprint(len(k.asm['cubin']) > 1000 and len(os.listdir(os.environ['TRITON_CACHE_DIR'])) > 0)"
    )
    return run_python("import runpy; runpy.run_path('k.py')")


def work_inductor(ctx):
    Path("c.py").write_text(
        "import torch\nf = torch.compile(lambda x: torch.relu(x * 2 + 1).sum(-1))\n"
        "x = torch.ones(64, 64)\nprint(int(f(x).sum()))\n"
    )
    return run_python("import runpy; runpy.run_path('c.py')")


def work_cuda(ctx):
    """In this process, as a Runner does: a child's /proc is closed, and cuInit needs it."""
    import runpy

    Path("k.py").write_text(
        TRITON
        + "x = torch.randn(5000, device='cuda'); o = torch.empty_like(x)\n"
        + "add[(5,)](x, x, o, 5000, B=1024)\n"
        + "same = torch.equal(o, x + x)\n"
        + "f = torch.compile(lambda v: torch.relu(v * 2 + 1).sum(-1))\n"
        + "close = torch.allclose(f(x.view(50, 100)), torch.relu(x.view(50, 100) * 2 + 1).sum(-1), rtol=1e-4)\n"
        + "product = float((torch.ones(64, 64, device='cuda') @ torch.ones(64, 64, device='cuda')).sum())\n"
    )
    found = runpy.run_path("k.py")
    return [found["same"], found["close"], found["product"]]
