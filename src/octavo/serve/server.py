"""`octavo serve`: the port first, so that a taken one is known at once, then the processes of the layout."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from octavo.core.errors import InvalidInput
from octavo.engine.config import EngineConfig
from octavo.serve.config import ServeConfig
from octavo.serve.keys import read_keys
from octavo.serve.logs import set_up_logging
from octavo.serve.operator_socket import operator_socket
from octavo.serve.tracing import tracing_to

__all__ = ["as_bound", "serve"]

_BACKLOG = 1024  # connections that wait to be accepted


def serve(engine_config: EngineConfig, config: ServeConfig, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. Raises ``InvalidInput`` for a port in use or a model that cannot run."""
    set_up_logging(config)
    if config.key_file:
        read_keys(config.key_file)  # what is wrong with it is said before a model is loaded
    tracing = tracing_to(config.otlp_endpoint, "")
    if tracing is not None:
        tracing.close()  # it can be had
    if config.admin_socket:
        with operator_socket(Path(config.admin_socket)):
            pass  # the same
    if config.batch_dir:
        from octavo.serve.batches.folder import Folder

        Folder(config.batch_dir).close()
    listener = _listen(config)
    config = as_bound(config, listener)
    try:
        _served_by(config.resolved_layout)(engine_config, config, listener, _url(listener), say)
    finally:
        listener.close()


def _served_by(layout: str) -> Callable[..., None]:
    """What runs a layout; each imports no more than it needs."""
    if layout in ("compact", "full"):
        from octavo.serve.roles.supervisor import serve_apart

        return serve_apart
    from octavo.serve.single import serve_single

    return serve_single


def _listen(config: ServeConfig) -> socket.socket:
    """The listening socket, bound before anything is loaded, so that a taken port is known at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            remedy = f"is no address of this machine ({error.strerror}); 127.0.0.1 is this machine alone, 0.0.0.0 all"
            raise InvalidInput("host", config.host, remedy) from error
        remedy = f"cannot be listened on at {config.host} ({error.strerror}); choose another, or stop what uses it"
        raise InvalidInput("port", config.port, remedy) from error
    return listener


def as_bound(config: ServeConfig, listener: socket.socket) -> ServeConfig:
    """The configuration with the address itself, where the host is a name for loopback: hosts are checked there."""
    address = ipaddress.ip_address(listener.getsockname()[0])
    address = getattr(address, "ipv4_mapped", None) or address
    if not address.is_loopback or str(address) == config.host:
        return config
    return replace(config, host=str(address), allowed_hosts=f"{config.allowed_hosts},{config.host}")


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
