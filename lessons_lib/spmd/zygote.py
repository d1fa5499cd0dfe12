"""A process that has torch loaded and turns into ranks on request, in milliseconds.

It is started once per kernel. The launcher sends it the ends of some connections and the name of a
module; it forks one child for each, in which that module's ``serve(connection)`` runs, and tells how
each child ended. Where a system cannot fork, or not safely, children are started one by one instead:
``python -m lessons_lib.spmd.zygote alone PORT NUMBER MODULE``.
"""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection

from lessons_lib.spmd import process_rank

GRACE_S = 1.0  # how long ranks may take to notice that the launcher is gone
LONGEST_NAME = 200  # of a module
MOST_AT_ONCE = 200  # file descriptors that one message may carry: the system allows 253


def fork_on_request(control: socket.socket) -> None:
    """Serve the launcher until it closes its end."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    children: dict[int, int] = {}  # pidfd -> pid
    while True:
        for key, _ in selector.select():
            if key.fileobj is control:
                module, descriptors = _requested(control)
                if not descriptors:
                    _end(list(children.values()))
                if descriptors:
                    import_module(module)  # once, for all children
                pids = [_fork(module, descriptor, control, descriptors) for descriptor in descriptors]
                for descriptor in descriptors:
                    os.close(descriptor)
                _tell(control, ("started", pids))
                for pid in pids:
                    watched = os.pidfd_open(pid)
                    children[watched] = pid
                    selector.register(watched, selectors.EVENT_READ)
            else:
                watched = key.fd
                selector.unregister(watched)
                os.close(watched)
                pid, status = os.waitpid(children.pop(watched), 0)
                _tell(control, ("ended", pid, os.waitstatus_to_exitcode(status)))


def _requested(control: socket.socket) -> tuple[str, list[int]]:
    """What new children run, and the ends of their connections; none if the launcher is gone."""
    try:
        module, descriptors, *_ = socket.recv_fds(control, LONGEST_NAME, MOST_AT_ONCE)
    except OSError:
        return "", []
    return module.decode(), list(descriptors)


def _end(children: list[int]) -> None:
    """The launcher is gone: let its ranks notice that and end, end those that do not, and end."""
    until = time.perf_counter() + GRACE_S
    while children and time.perf_counter() < until:
        children = [pid for pid in children if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        time.sleep(0.01)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _fork(module: str, descriptor: int, control: socket.socket, descriptors: list[int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        control.close()
        for other in descriptors:
            if other != descriptor:
                os.close(other)
        import_module(module).serve(Connection(descriptor))
    finally:
        os._exit(1)


def _tell(control: socket.socket, message: object) -> None:
    data = pickle.dumps(message)
    with suppress(OSError):  # the launcher has gone, which the next look at the connection tells
        control.sendall(len(data).to_bytes(4, "little") + data)


def serve_alone(port: int, number: int, module: str, key: bytes) -> None:
    """Be one child, on a system that does not fork."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(key + number.to_bytes(4, "little"))
        descriptor = connection.detach()
    import_module(module).serve(Connection(descriptor))


def main(arguments: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if arguments[0] == "fork":
        process_rank.warm_up()
        fork_on_request(socket.socket(fileno=int(arguments[1])))
    else:
        serve_alone(int(arguments[1]), int(arguments[2]), arguments[3], sys.stdin.buffer.read())


if __name__ == "__main__":
    main(sys.argv[1:])
