"""``vllm:CHECKPOINT``: a vLLM server that drk starts on loopback, asks by chat completions, and ends with the run.

The server is a process of its own, in a session of its own, with a key that only this process knows. Its output goes to
a temporary file, of which the last lines are shown when it does not come up. Nothing else listens on that port from
outside, since it is bound to 127.0.0.1.

Left out: vLLM inside this process (the engine would share memory and crashes with the command), several GPUs (start
``vllm serve`` yourself and use ``openai:NAME --base-url``).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import secrets
import signal
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import IO

from drk.assistant.llm.messages import ModelFault, Reply, Request, estimate_tokens
from drk.assistant.llm.model_settings import ModelSettings
from drk.assistant.llm.openai_backend import OpenAIBackend

START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.25


class VllmBackend:
    """A server for ``checkpoint`` (a folder), made by :meth:`start` and ended by :meth:`close`."""

    local = True

    def __init__(self, checkpoint: str, settings: ModelSettings) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ModelFault(
                "vllm models need the package vllm",
                cause="it is not installed",
                help="pip install vllm (needs a CUDA build of torch); or a server: --model openai:NAME --base-url URL",
            )
        if not (Path(checkpoint) / "config.json").is_file():
            raise ModelFault(f"no checkpoint at {checkpoint!r}", help="--model vllm:FOLDER, with config.json in it")
        self.name = f"vllm:{checkpoint}"
        self.endpoint = "vllm"
        self._checkpoint = str(Path(checkpoint).resolve())
        self._settings = settings
        self._server: asyncio.subprocess.Process | None = None
        self._log: IO[bytes] | None = None
        self._inner: OpenAIBackend | None = None

    async def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            ModelFault: it ended, or did not answer in time; shows the end of its output.
        """
        if self._inner is not None:
            return
        port, key = _free_port(), secrets.token_hex(16)
        self._log = tempfile.TemporaryFile(prefix="drk-vllm-")  # noqa: SIM115 - lives as long as the server
        words = ["--model", self._checkpoint, "--served-model-name", "model", "--host", "127.0.0.1"]
        words += ["--port", str(port), "--max-model-len", str(self._settings.context_tokens)]
        self._server = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=_environment(key),
            start_new_session=True,
        )
        settings = replace(self._settings, base_url=f"http://127.0.0.1:{port}/v1")
        self._inner = OpenAIBackend("model", settings, key=key)
        try:
            await asyncio.wait_for(self._until_ready(self._inner, self._server), START_TIMEOUT_S)
        except TimeoutError:
            cause = self._last_output()
            await self.close()
            raise ModelFault(f"vLLM did not answer within {START_TIMEOUT_S:.0f} s", cause=cause) from None
        except BaseException:
            await self.close()
            raise

    async def complete(self, request: Request) -> Reply:
        """Answer one conversation; see :class:`drk.assistant.llm.messages.Backend`."""
        if self._inner is None:
            raise ModelFault("the vLLM server was not started")
        reply = await self._inner.complete(request)
        return replace(reply, model=self.name)

    def count_tokens(self, text: str) -> int:
        """Return an estimate."""
        return estimate_tokens(text)

    async def close(self) -> None:
        """End the server and everything it started."""
        inner, self._inner = self._inner, None
        if inner is not None:
            await inner.close()
        server, self._server = self._server, None
        if server is not None:
            await _end(server)
        if self._log is not None:
            self._log.close()
            self._log = None

    async def _until_ready(self, inner: OpenAIBackend, server: asyncio.subprocess.Process) -> None:
        while True:
            if server.returncode is not None:
                raise ModelFault(
                    f"vLLM ended with exit code {server.returncode} before it answered", cause=self._last_output()
                )
            try:
                await inner.start()
                return
            except ModelFault:
                await asyncio.sleep(POLL_S)

    def _last_output(self, count: int = 12) -> str:
        if self._log is None:
            return ""
        self._log.seek(0)
        lines = self._log.read()[-8000:].decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-count:])


def _environment(key: str) -> dict[str, str]:
    """Return ours without the keys of other endpoints, and with the server's own."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    return {**kept, "VLLM_API_KEY": key, "VLLM_NO_USAGE_STATS": "1"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _end(server: asyncio.subprocess.Process) -> None:
    """Ask the server's whole session to end, then make it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.wait(), STOP_TIMEOUT_S)
            break
    with contextlib.suppress(ProcessLookupError):  # children that outlived their parent
        os.killpg(server.pid, signal.SIGKILL)
