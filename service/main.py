"""The composition root: settings to parts to doors; signals; the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import math
import os
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import grpc
import torch
import uvicorn
import uvloop
from uvicorn.server import ServerState

from attn_core.engine import Engine
from attn_core.prepared import KnownForms, prepare
from service import host as machine
from service.admission import UNASKED_BYTES, Admission
from service.attend import Attend
from service.authentication import Authentication
from service.batcher import Batcher
from service.calibration import measure_rates
from service.deliveries import Deliveries
from service.doors import tls
from service.doors.acceptor import Acceptor
from service.doors.asgi_protocol import AsgiProtocol
from service.doors.binary import BinaryDoor
from service.doors.exchange import ExchangeLayer
from service.doors.http_protocol import HttpProtocol
from service.doors.inference import Inference
from service.doors.receive_buffers import LANDING_BYTES, ReceiveBuffer, ReceiveBuffers
from service.doors.rest import Parts, RestLimits, build_app
from service.doors.rpc import RpcDoor, RpcLimits
from service.doors.rpc_server import RpcServer
from service.layer_directory import LayerDirectory, UnusableDirectory
from service.layer_store import LayerStore
from service.lifecycle import Lifecycle
from service.pace import Pace
from service.request_queue import RequestQueue
from service.settings import Settings
from service.shared_memory import SharedMemory
from service.statistics import Statistics
from service.telemetry import Metrics, set_up_logging
from service.text_workers import TextWorkers
from service.wire.arrays import Limits
from service.wire.inference_models import Models
from service.wire.plain_recipes import PlainRecipes
from service.wire.proto_recipes import ProtoRecipes
from service.wire.requests import ReadLimits

log = logging.getLogger("attn.main")

BUDGET_SHARE = 0.8
"""The share of free memory that one problem may need where no budget is set."""
ENGINE_STOP_S = 2.0
LAYERS_STOP_S = 2.0
BACKLOG = 2048
MORE_CALLS = 256
"""Calls of gRPC besides those that are work: somebody asks how the service is."""
MAX_FREE_BUFFER_BYTES = 64 * 2**20
SWITCH_INTERVAL_S = 1e-3
"""How long a thread may keep the interpreter while another waits; an engine's thread needs it after each kernel."""
LAST_REQUESTS_S = 0.1
"""Between the port's end and that of idle connections: one just accepted still gets its answer."""


class StartError(Exception):
    """The service cannot start; the message says why."""


def service_version() -> str:
    try:
        return version("attn")
    except PackageNotFoundError:
        return "0.0.0+source"


def serve(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT; 0 when nothing accepted was lost. Raises: StartError."""
    set_up_logging(level=settings.log_level, as_json=settings.log_format == "json")
    machine.keep_freed_memory()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    device = choose_device(settings.device)
    listener = listen(settings.host, settings.port)
    code, has_ended = uvloop.run(_serve(settings, device, listener))
    if code or not has_ended:
        # A kernel, a parse or a write that is still running cannot be interrupted, would be waited for without a
        # limit, and torch must not be torn down under it.
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)
    return code


def choose_device(name: str) -> torch.device:
    """The device that a setting means. Raises: StartError when it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise StartError(f"ATTN_DEVICE: {name} is not there; torch sees {torch.cuda.device_count()} GPUs")
    return device


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises: StartError naming the address that cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port}: {error}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        # Two that start at once may both bind; only one may listen.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


def rpc_address(host: str, port: int) -> str:
    """An address as gRPC takes it. Raises: StartError naming one that cannot be had, as gRPC would not say why."""
    with listen(host, port) as listener:
        own_host = listener.getsockname()[0]
    return f"[{own_host}]:{port}" if ":" in own_host else f"{own_host}:{port}"


def read_tls(settings: Settings) -> tuple[ssl.SSLContext | None, grpc.ServerCredentials | None]:
    """What the HTTP door and the gRPC door greet their callers with; nothing where no certificate is set.

    Raises: StartError naming the file that is none.
    """
    certificate, key = settings.tls_certificate_file, settings.tls_key_file
    if certificate is None or key is None:
        return None, None
    client_ca = settings.tls_client_ca_file
    try:
        return (
            tls.http_context(certificate=certificate, key=key, client_ca=client_ca),
            tls.grpc_credentials(certificate=certificate, key=key, client_ca=client_ca),
        )
    except tls.UnusableCertificate as error:
        raise StartError(f"cannot speak TLS: {error}") from None


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: they would close the port first and raise the signal again at the end."""

    def __init__(
        self, config: uvicorn.Config, *, tls: ssl.SSLContext | None = None, handshake_timeout_s: float | None = None
    ) -> None:
        super().__init__(config)
        # uvicorn would make one of its own, with ciphers of its own.
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections in by ``Acceptor`` instead of the loop's own server."""
        make_protocol: Any = self.config.http_protocol_class
        await self.lifespan.startup()
        make = functools.partial(
            make_protocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=asyncio.get_running_loop(),
        )
        servers: Any = [
            Acceptor(listener, make, tls=self._tls, handshake_timeout_s=self._handshake_timeout_s)
            for listener in sockets or []
        ]
        self.servers = servers
        self.started = True


@dataclass(frozen=True, slots=True)
class Composition:
    """The parts of one service, joined and not yet started."""

    app: ExchangeLayer
    door: BinaryDoor
    lifecycle: Lifecycle
    queue: RequestQueue
    batcher: Batcher
    admission: Admission
    metrics: Metrics
    text_workers: TextWorkers
    inference: Inference
    rpc: RpcDoor
    layers: LayerStore


def compose(
    settings: Settings,
    device: torch.device,
    *,
    make_engine: Callable[[], Engine],
    make_loop_engine: Callable[[], Engine] | None = None,
    num_small_workers: int = 1,
    has_large_worker: bool = False,
    measure: Callable[[Engine], tuple[float, dict[str, float]]] | None = measure_rates,
) -> Composition:
    """Join the parts as the settings say. To be called in the event loop that will serve.

    ``make_engine`` is called in each thread of the engine; ``make_loop_engine`` makes the one for what the loop itself
    computes, none of which it does without. ``num_small_workers`` share the small problems; the large ones have a
    worker of their own, or wait for the one there is.
    """
    loop = asyncio.get_running_loop()
    lifecycle, metrics, pace = (
        Lifecycle(),
        Metrics(),
        Pace(num_threads=settings.torch_threads or machine.usable_cores()),
    )
    queue = RequestQueue(
        max_requests=settings.max_queue_requests,
        num_small_workers=num_small_workers,
        has_large_worker=has_large_worker,
        loop_helps=make_loop_engine is not None,
    )
    allowed_bytes = _allowed_bytes(settings, device)
    admission = Admission(
        max_requests=settings.max_requests_inside,
        max_body_bytes_inside=settings.max_body_bytes_inside,
        allowed_bytes=allowed_bytes,
        max_wait_s=settings.max_wait_s,
        unasked_bytes=UNASKED_BYTES if settings.memory_budget_bytes is None else 0,
    )
    metrics.queue_depth.set_function(lambda: len(queue))
    text_workers = TextWorkers(num_workers=_num_text_workers(settings))
    metrics.watch_memory(functools.partial(_memory_by_kind, device, text_workers))

    def on_lost(error: BaseException) -> None:
        lifecycle.mark_lost(error)
        with contextlib.suppress(RuntimeError):
            # A device that is lost stays lost for this process: another one may find it again.
            loop.call_soon_threadsafe(lifecycle.ask_to_stop)

    batcher = Batcher(
        make_engine=make_engine,
        queue=queue,
        deliveries=Deliveries(loop),
        pace=pace,
        allowed_bytes=allowed_bytes,
        on_ready=lifecycle.mark_ready,
        on_lost=on_lost,
        num_small_workers=num_small_workers,
        has_large_worker=has_large_worker,
        measure=measure if settings.calibrate else None,
    )
    attend = Attend(
        admission=admission,
        queue=queue,
        pace=pace,
        prepare=functools.partial(prepare, device_type=device.type, known=KnownForms()),
        engine=None if make_loop_engine is None else make_loop_engine(),
    )
    limits = RestLimits(
        read=ReadLimits(
            tensors=Limits(
                max_tensor_elements=settings.max_tensor_elements,
                max_axis=settings.max_axis,
                max_json_lists=settings.max_json_lists,
            ),
            max_timeout_s=settings.max_timeout_s,
        ),
        max_body_bytes=settings.max_body_bytes,
        max_json_bytes=settings.max_json_bytes,
        write_timeout_s=settings.write_timeout_s,
        default_timeout_s=settings.request_timeout_s,
        max_queue_requests=settings.max_queue_requests,
        memory_bytes=allowed_bytes,
    )
    statistics = Statistics()
    layers = _read_layers(settings, limits.read, on_deleted=statistics.forget)
    metrics.layers.set_function(lambda: layers.num_layers)
    metrics.layer_bytes.set_function(lambda: layers.num_bytes)
    inference = Inference(
        attend=attend,
        lifecycle=lifecycle,
        metrics=metrics,
        models=Models(layers),
        statistics=statistics,
        shared_memory=SharedMemory(is_enabled=settings.shared_memory),
        read_limits=limits.read,
        default_timeout_s=settings.request_timeout_s,
        version=service_version(),
    )
    authentication = Authentication(settings.keys())
    recipes = PlainRecipes(device=str(device))
    app = build_app(
        Parts(
            attend=attend,
            admission=admission,
            lifecycle=lifecycle,
            authentication=authentication,
            metrics=metrics,
            limits=limits,
            version=service_version(),
            device=str(device),
            text_workers=text_workers,
            inference=inference,
            recipes=recipes,
            layers=layers,
        )
    )
    buffers = ReceiveBuffers(max_free_bytes=MAX_FREE_BUFFER_BYTES)
    door = BinaryDoor(
        attend=attend,
        admission=admission,
        lifecycle=lifecycle,
        authentication=authentication,
        metrics=metrics,
        limits=limits,
        buffers=buffers,
        recipes=recipes,
        statistics=statistics,
    )
    rpc = RpcDoor(
        inference=inference,
        attend=attend,
        admission=admission,
        authentication=authentication,
        buffers=buffers,
        recipes=ProtoRecipes(device=str(device)),
        limits=RpcLimits(
            max_answer_bytes=settings.max_grpc_answer_bytes,
            default_timeout_s=settings.request_timeout_s,
            write_timeout_s=settings.write_timeout_s,
        ),
    )
    return Composition(
        app=app,
        door=door,
        lifecycle=lifecycle,
        queue=queue,
        batcher=batcher,
        admission=admission,
        metrics=metrics,
        text_workers=text_workers,
        inference=inference,
        rpc=rpc,
        layers=layers,
    )


def make_rpc_server(parts: Composition, settings: Settings) -> RpcServer:
    """grpc.aio around the door for it."""
    return RpcServer(
        parts.rpc,
        max_message_bytes=settings.max_body_bytes,
        max_answer_bytes=settings.max_grpc_answer_bytes,
        max_calls=settings.max_requests_inside + MORE_CALLS,
    )


def make_server(parts: Composition, settings: Settings, context: ssl.SSLContext | None = None) -> uvicorn.Server:
    """uvicorn around the app, under TLS with ``context``; the caller hands it a listener, and says when to stop by
    ``should_exit``."""
    landing = ReceiveBuffer(LANDING_BYTES)

    def make_protocol(
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> HttpProtocol | AsgiProtocol:
        def make_asgi(binary: HttpProtocol | None = None) -> AsgiProtocol:
            return AsgiProtocol(
                config=config,
                server_state=server_state,
                app_state=app_state,
                _loop=_loop,
                head_timeout_s=settings.head_timeout_s,
                count_unreadable=parts.app.count_unreadable,
                give_back=None if binary is None else binary.take_back,
            )

        if context is not None:
            # Under TLS the loop does not say how much of an answer is still to be sent, by which the road for binary
            # bodies knows who does not read.
            return make_asgi()
        return HttpProtocol(
            parts.door,
            landing=landing,
            make_asgi=make_asgi,
            server_state=server_state,
            loop=_loop or asyncio.get_running_loop(),
            head_timeout_s=settings.head_timeout_s,
            keep_alive_s=settings.keep_alive_s,
        )

    return _Server(
        uvicorn.Config(
            parts.app,
            http=make_protocol,  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=max(1, round(settings.keep_alive_s)),
            timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
            backlog=BACKLOG,
        ),
        tls=context,
        handshake_timeout_s=settings.head_timeout_s,
    )


async def _serve(settings: Settings, device: torch.device, listener: socket.socket) -> tuple[int, bool]:
    cores = machine.usable_cores()
    threads = settings.torch_threads or cores
    on_cpu = device.type == "cpu"
    parts = compose(
        settings,
        device,
        make_engine=lambda: Engine(device=device, max_threads=threads),
        # As many threads as the others: their number may tell in the last bit of few rows.
        make_loop_engine=(lambda: Engine(device=device, max_threads=threads)) if on_cpu else None,
        # The loop, which computes when it has nothing to read, is the one that is missing to the number of cores.
        num_small_workers=max(1, cores - 1) if on_cpu else 1,
        has_large_worker=on_cpu,
    )
    context, credentials = read_tls(settings)
    lifecycle, server = parts.lifecycle, make_server(parts, settings, context)
    rpc = make_rpc_server(parts, settings)
    lifecycle.listen_for_signals()
    try:
        grpc_port = await rpc.start(rpc_address(settings.host, settings.grpc_port), credentials)
    except RuntimeError as error:
        raise StartError(f"cannot listen on {settings.host}:{settings.grpc_port}: {error}") from None
    # What is there now stays: a collection of garbage need not look at it, which would take a tenth of a second.
    gc.collect()
    gc.freeze()
    parts.batcher.start()
    parts.text_workers.start()
    host, port = listener.getsockname()[:2]
    fields = {"host": host, "port": port, "grpc_port": grpc_port, "device": str(device), "threads": threads}
    log.info("listening", extra={"fields": fields})
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stop = asyncio.create_task(lifecycle.wait_until_asked_to_stop())
    await asyncio.wait([serving, stop], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    loop = asyncio.get_running_loop()
    end = loop.time() + settings.drain_timeout_s
    given_up = await lifecycle.drain(notice_s=settings.drain_notice_s, timeout_s=settings.drain_timeout_s)
    stopping = asyncio.create_task(rpc.stop(max(1.0, end - loop.time())))
    if server.started:
        for accepting in server.servers:
            accepting.close()
        await asyncio.sleep(LAST_REQUESTS_S)
    # What is left of the drain's limit is for answers that are still being written.
    server.config.timeout_graceful_shutdown = max(1, math.ceil(end - loop.time()))
    server.should_exit = True
    await serving
    unsent = len(server.server_state.connections) + await stopping
    is_lost = parts.batcher.is_lost
    lifecycle.mark_stopped()
    lifecycle.ignore_signals()
    engine_ended = await asyncio.to_thread(parts.batcher.stop, ENGINE_STOP_S)
    await asyncio.to_thread(parts.text_workers.stop)
    parts.inference.shared_memory.close()
    layers_ended = await parts.layers.close(LAYERS_STOP_S)
    log.info("stopped", extra={"fields": {"given_up_requests": given_up, "unsent_answers": unsent}})
    return (1 if given_up or unsent or is_lost else 0), engine_ended and layers_ended


def _read_layers(settings: Settings, limits: ReadLimits, *, on_deleted: Callable[[str], None]) -> LayerStore:
    """The layers that are kept, with those of the directory. Raises: StartError naming a directory that is none."""
    directory = None if settings.layer_directory is None else LayerDirectory(settings.layer_directory)
    layers = LayerStore(max_bytes=settings.layer_budget_bytes, directory=directory, on_deleted=on_deleted)
    try:
        layers.load(limits)
    except UnusableDirectory as error:
        raise StartError(f"ATTN_LAYER_DIRECTORY: {error}") from None
    return layers


def _allowed_bytes(settings: Settings, device: torch.device) -> Callable[[], int]:
    budget = settings.memory_budget_bytes
    if budget is not None:
        return lambda: budget
    return lambda: int(BUDGET_SHARE * machine.free_bytes(device))


def _num_text_workers(settings: Settings) -> int:
    if settings.text_workers is not None:
        return settings.text_workers
    return 1 if machine.usable_cores() <= 2 else 2


def _memory_by_kind(device: torch.device, text_workers: TextWorkers) -> dict[str, float]:
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "peak": torch.cuda.max_memory_allocated(device),
            "limit": machine.total_bytes(device),
        }
    return {
        "resident": machine.resident_bytes() + sum(map(machine.private_bytes, text_workers.pids())),
        "peak": machine.peak_resident_bytes(),
        "limit": machine.total_bytes(device),
    }
