"""How the processes of a torchrun launch, on one host or on several, are connected by gloo and nccl."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lessons_lib.spmd._torch_internals import native_group
from lessons_lib.spmd.library import by_device

WAIT = timedelta(minutes=30)  # torch's own: how long gloo waits for the other side
SEVERED = 2**31 - 1  # the tag of a message that nobody sends
ELSEWHERE = "192.0.2.1"  # an address set aside for documentation (RFC 5737): the way to it is the way out


def part_of(store: Any, name: str) -> Any:
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def connected(backend: str, store: Any, name: str, rank: int, size: int) -> dict[str, Any]:
    """A group of a library for tensors on each kind of device."""
    connect = {"gloo": _gloo_group, "nccl": _nccl_group}
    return {
        device: connect[library](store, f"{name}/{library}", rank, size)
        for device, library in by_device(backend).items()
    }


def _nccl_group(store: Any, name: str, rank: int, size: int) -> Any:
    return native_group("nccl", store, name, rank, size)


def _gloo_group(store: Any, name: str, rank: int, size: int) -> Any:
    """A group of gloo, on the interface that leads to the other hosts."""
    with _interface_named():
        return dist.ProcessGroupGloo(part_of(store, name), rank, size, WAIT)


@contextlib.contextmanager
def _interface_named() -> Iterator[None]:
    """Tell gloo its interface, as a user of torch does; left alone, it would look up this host's name."""
    variable = "GLOO_SOCKET_IFNAME"
    found = None if variable in os.environ else interface()
    if found is not None:
        os.environ[variable] = found
    try:
        yield
    finally:
        if found is not None:
            del os.environ[variable]


def interface() -> str | None:
    """The name of the interface that leads to the other ranks; ``None`` where it cannot be told."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        return interface_of("127.0.0.1")
    own = address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if own is None or own.startswith("127."):  # many a host knows its own name as 127.0.1.1
        own = address_towards(ELSEWHERE, 9)
    return None if own is None else interface_of(own)


def address_towards(host: str, port: int) -> str | None:
    """The address of this host from which it would speak to another. Nothing is sent.

    >>> address_towards("127.0.0.1", 9)
    '127.0.0.1'
    """
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """The interface with this IPv4 address, on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                asked = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(probe.fileno(), 0x8915, asked)  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def sever(group: Any) -> None:
    """Close the connections of a library's group, so that whoever waits in it, here or there, stops.

    gloo has no call for that, but closes them when a receive takes too long.
    """
    if group.name() == "gloo":
        if group.size() > 1:
            with contextlib.suppress(RuntimeError):
                peer = (group.rank() + 1) % group.size()
                group.recv([torch.empty(1)], peer, SEVERED).wait(timedelta(milliseconds=1))
    else:
        with contextlib.suppress(RuntimeError):
            group.abort()
