"""Stands between the server and a job's command, so that the command is told to stop once, whatever ends the server.

Run as a program: ``python -I -S job_launcher.py SERVER_PID COMMAND...``; standard library only. It passes the first
terminate signal on and no other. The kernel sends one when the server dies, but one for every thread that a dying
server still has, and a second signal ends ``drk optimize`` at once, without its best so far. Between this process and
the command it is exactly one, also when this process is killed.

The command's end is this process's own: the same exit code, the same signal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
WATCHED = {signal.SIGTERM, signal.SIGCHLD}


def end_with(parent: int) -> None:
    """Have the kernel send a terminate signal when the parent dies; end here if it is dead already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)


def start(words: list[str]) -> int:
    """Start the command and return its process id."""
    launcher = os.getpid()
    child = os.fork()
    if child:
        return child
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    end_with(launcher)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        os.write(2, f"error: cannot start {words[0]}: {error.strerror}\n".encode())
    os._exit(127)


def watch(child: int) -> int:
    """Pass the first terminate signal on; return how the command ended: its exit code, or a signal's number below 0."""
    told = False
    while True:
        if signal.sigwait(WATCHED) == signal.SIGTERM and not told:
            told = True
            os.kill(child, signal.SIGTERM)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)


def main() -> None:
    """Run one command to its end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    end_with(int(sys.argv[1]))
    code = watch(start(sys.argv[2:]))
    if code < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
