"""The escape suite: every attack in attacks.py, for each identity and set of layers that this machine grants.

Each attack runs in a freshly forked child after ``enter``. The same attacks also run without the layers: there they
have to succeed, which shows that they are real and that the layer is what stops them.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FILES = [
    "read_secret", "list_outside", "write_outside", "symlink_read", "symlink_write", "hardlink_read",
    "truncate_outside", "rename_in",
]  # fmt: skip
ROOT_FILES = ["read_shadow", "read_block_device", "make_device", "write_sysctl"]
PROCESSES = [
    "parent_environ", "sibling_environ", "sibling_cmdline", "own_environ", "own_getenv", "sibling_mem", "sibling_fds",
    "sibling_ptrace", "sibling_vm_read", "signal_parent", "signal_sibling", "pin_sibling", "nice_sibling",
    "limit_sibling", "inherited_fd",
]  # fmt: skip
NETWORK = [
    "tcp_connect", "tcp_bind", "udp_send", "unix_connect", "unix_datagram_pair", "abstract_connect", "netlink",
]  # fmt: skip
KERNEL = [
    "chroot", "mount", "unshare_user", "clone_user_namespace", "perf_event", "io_uring", "add_key", "userfaultfd",
    "system_v_shm", "x32_syscall", "clear_pdeathsig", "clear_subreaper", "keep_capabilities", "new_privileges",
]  # fmt: skip
ATTACKS = [*FILES, *ROOT_FILES, *PROCESSES, *NETWORK, *KERNEL]
MEASURES = ["fd_flood", "disk_flood", "fork_storm", "core_dump", "identity", "write_shm", "crash_abort", "exit_seven"]
# not by design of the basic level: limits, environment and descriptors are its layers
STOPPED_BY_BASIC = {"own_environ", "own_getenv", "inherited_fd", "new_privileges"}
NEEDS_ROOT = {*ROOT_FILES, "chroot", "mount", "keep_capabilities", "perf_event", "userfaultfd", "clear_subreaper"}
NAMESPACES = ["pidns", "netns", "ipcns"]
PROCESSES_LIMIT = 50
POLICY = {"processes": PROCESSES_LIMIT, "open_files": 256, "file_bytes": 8 << 20}

IDENTITIES = ["as-is", "open-root", "user"] if os.geteuid() == 0 else ["as-is"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux only")


@functools.cache
def cage(identity, level, without, attacks, policy=None):
    """Outcomes of ``attacks``; one process for each combination, kept for the session."""
    spec = {
        "identity": identity,
        "level": level,
        "without": list(without),
        "attacks": list(attacks),
        "policy": POLICY if policy is None else json.loads(policy),
    }
    environment = {**os.environ, "DRK_TEST_TOKEN": "s3cret-value"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "cage.py"), json.dumps(spec)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def confined(identity, without=()):
    return cage(identity, "standard", tuple(without), (*ATTACKS, *MEASURES))


def bare(identity):
    return cage(identity, "basic", (), (*ATTACKS, *MEASURES))


SETS = [(identity, ()) for identity in IDENTITIES] + [(identity, tuple(NAMESPACES)) for identity in IDENTITIES]
each_set = pytest.mark.parametrize(("identity", "without"), SETS, ids=lambda v: v if isinstance(v, str) else len(v))


@each_set
@pytest.mark.parametrize("attack", ATTACKS)
def test_every_attack_is_stopped(identity, without, attack):
    outcome = confined(identity, without)["outcomes"][attack]
    assert outcome.get("escaped") is False, outcome


@each_set
def test_nothing_outside_was_changed(identity, without):
    outside = confined(identity, without)["outside"]
    assert outside == {
        "shm_leaked": False,
        "files": ["datagram.sock", "movable", "secret.txt", "unix.sock"],
        "secret_intact": True,
    }


@pytest.mark.parametrize("attack", sorted(set(ATTACKS) - STOPPED_BY_BASIC))
def test_every_attack_is_real(attack):
    """Without the layers it succeeds, for root where it needs root; else the suite would prove nothing."""
    identity = "as-is" if os.geteuid() == 0 and attack in NEEDS_ROOT else IDENTITIES[-1]
    if os.geteuid() != 0 and attack in NEEDS_ROOT:
        pytest.skip("needs root")
    outcome = bare(identity)["outcomes"][attack]
    if outcome.get("errno") == 38 or (attack == "read_block_device" and outcome.get("errno") == 1):
        pytest.skip(f"this machine itself has no such thing: {outcome['text']}")
    assert outcome.get("escaped") is True, outcome


@pytest.mark.parametrize(
    ("layer", "attack"),
    [("landlock", "read_secret"), ("landlock", "write_outside"), ("landlock", "symlink_write")],
)
def test_landlock_is_what_protects_files(layer, attack):
    assert cage("as-is", "basic", (layer,), (attack,))["outcomes"][attack]["escaped"] is True
    assert cage("as-is", "standard", ("seccomp", "pidns", "ipcns"), (attack,))["outcomes"][attack]["escaped"] is False


@pytest.mark.parametrize("attack", ["udp_send", "unix_connect", "netlink", "io_uring", "add_key", "system_v_shm"])
def test_seccomp_is_what_stops(attack):
    """With Landlock and a network namespace but without seccomp these go through, or reach only an empty namespace."""
    without = cage("as-is", "standard", ("seccomp", "pidns", "ipcns"), (attack,))["outcomes"][attack]
    assert confined("as-is", tuple(NAMESPACES))["outcomes"][attack]["errno"] == 1
    if attack == "udp_send":
        assert without["errno"] == 101, "the empty namespace has no route"
    else:
        assert without["escaped"] is True, without


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="32-bit gate of x86-64")
def test_the_32_bit_gate_kills():
    outcome = cage("as-is", "standard", (), ("foreign_architecture",))["outcomes"]["foreign_architecture"]
    assert outcome == {"signal": int(signal.SIGSYS)}


@each_set
def test_floods_are_bounded(identity, without):
    outcomes = confined(identity, without)["outcomes"]
    assert outcomes["fd_flood"]["value"] < POLICY["open_files"]
    assert outcomes["disk_flood"]["errno"] == 27  # EFBIG
    assert bare(identity)["outcomes"]["fd_flood"]["value"] < POLICY["open_files"]


@pytest.mark.parametrize("identity", IDENTITIES)
def test_a_fork_storm_is_bounded(identity):
    result = confined(identity)
    if not result["layers"]["process_limit"]["ok"]:
        pytest.skip(result["layers"]["process_limit"]["detail"])
    reserve = 300  # what pid_max of a namespace cannot go below
    assert result["outcomes"]["fork_storm"]["value"] <= PROCESSES_LIMIT + reserve
    assert bare("as-is")["outcomes"]["fork_storm"]["value"] > PROCESSES_LIMIT + reserve


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_uid_drop_bounds_a_fork_storm_without_namespaces():
    value = confined("open-root", tuple(NAMESPACES))["outcomes"]["fork_storm"]["value"]
    assert value < PROCESSES_LIMIT


@each_set
def test_no_core_is_dumped(identity, without):
    core = confined(identity, without)["outcomes"]["core_dump"]["value"]
    assert core == {"dumped": False, "signal": int(signal.SIGABRT), "limit": 1}


@each_set
def test_the_end_of_a_runner_is_reported_as_it_was(identity, without):
    outcomes = confined(identity, without)["outcomes"]
    assert outcomes["crash_abort"] == {"signal": int(signal.SIGABRT)}
    assert outcomes["exit_seven"] == {"code": 7}


@each_set
def test_who_a_runner_is(identity, without):
    result = confined(identity, without)
    who = result["outcomes"]["identity"]["value"]
    if result["layers"]["uid_drop"]["ok"]:
        assert who["uid"] >= 0x70000000 or who["uid"] == 65534
    else:
        assert who["uid"] == result["uid"]
    assert who["groups"] == []
    assert who["proc_self"] == str(who["pid"])
    assert who["stdin"] == "/dev/null"
    assert len(who["fds"]) == 5  # 0, 1, 2, the kept pipe, and the one that lists
    assert who["home"].startswith(who["cwd"])
    assert "DRK_TEST_TOKEN" not in who["names"]
    assert not [name for name in who["names"] if "TOKEN" in name or "KEY" in name or "proxy" in name.lower()]


@pytest.mark.skipif(os.geteuid() != 0, reason="the uid drop needs root")
def test_root_drops_its_uid_where_python_can_still_be_read():
    assert confined("open-root")["outcomes"]["identity"]["value"]["uid"] >= 65534


@pytest.mark.parametrize("identity", [IDENTITIES[0], IDENTITIES[-1]])
@pytest.mark.parametrize(
    ("work", "value"),
    [("work_subprocess", "hello"), ("work_threads", 8), ("work_gcc", 42), ("work_torch", "216000000")],
)
def test_honest_work_goes_on(identity, work, value):
    attacks = ("work_subprocess", "work_threads", "work_gcc", "work_torch", "work_tempfile")
    outcomes = cage(identity, "standard", (), attacks)["outcomes"]
    assert outcomes[work].get("value") == value, outcomes[work]
    assert "/tmp/" in outcomes["work_tempfile"]["value"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "value", "without"),
    [
        ("work_interpreter", "2000", ()),
        pytest.param("work_interpreter", "2000", tuple(NAMESPACES), marks=pytest.mark.long),
        ("work_ptxas", "True", ()),
        pytest.param("work_ptxas", "True", tuple(NAMESPACES), marks=pytest.mark.long),
        pytest.param("work_inductor", "12288", (), marks=pytest.mark.long),
    ],
)
def test_compilers_work_inside(work, value, without):
    outcome = cage(IDENTITIES[-1], "standard", without, (work,), json.dumps({}))["outcomes"][work]
    assert outcome.get("value") == value, outcome


def test_strict_adds_nothing_that_breaks_entering():
    result = cage("as-is", "strict", (), ("read_secret", "work_subprocess"))
    missing = [name for name in ("landlock", "seccomp", "pidns", "netns") if not result["layers"][name]["ok"]]
    if missing:
        assert "refused" in result["outcomes"]["read_secret"]
    else:
        assert result["outcomes"]["read_secret"]["escaped"] is False
        assert result["outcomes"]["work_subprocess"]["value"] == "hello"


def test_a_level_that_cannot_be_had_is_refused_inside_too():
    outcome = cage("as-is", "strict", ("pidns",), ("work_subprocess",))["outcomes"]["work_subprocess"]
    assert "pidns" in outcome["refused"]


GPU_POLICY = json.dumps({**POLICY, "gpu": True})


@pytest.mark.parametrize("attack", [*FILES, *ROOT_FILES, *PROCESSES, *NETWORK, *KERNEL])
def test_what_a_gpu_needs_opens_nothing_else(attack):
    """The policy of a GPU opens device nodes, /sys, own thread names and listening packet sockets; no more."""
    outcome = cage(IDENTITIES[0], "standard", tuple(NAMESPACES), tuple(ATTACKS), GPU_POLICY)["outcomes"][attack]
    assert outcome.get("escaped") is False, outcome


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["basic", "standard", "strict"])
@pytest.mark.parametrize("identity", IDENTITIES)
def test_cuda_triton_and_inductor_work_inside(identity, level):
    policy = json.dumps({"gpu": True})
    outcome = cage(identity, level, (), ("work_cuda",), policy)["outcomes"]["work_cuda"]
    assert outcome.get("value") == [True, True, 262144.0], outcome


@pytest.mark.gpu
def test_cuda_works_without_namespaces():
    policy = json.dumps({"gpu": True})
    outcome = cage("as-is", "standard", tuple(NAMESPACES), ("work_cuda",), policy)["outcomes"]["work_cuda"]
    assert outcome.get("value") == [True, True, 262144.0], outcome
