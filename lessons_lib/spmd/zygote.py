"""A process that has torch loaded and turns into ranks on request, in milliseconds.

It is started once per kernel. The launcher sends it the ends of some connections; it forks one
child for each, which serves it, and tells how each child ended. Where a system cannot fork, or not
safely, ranks are started one by one instead: ``python -m lessons_lib.spmd.zygote ADDRESS``.
"""

from __future__ import annotations

import ast
import os
import pickle
import selectors
import signal
import socket
import sys
from multiprocessing.connection import Client, Connection

from lessons_lib.spmd import process_rank

MOST_AT_ONCE = 253  # file descriptors that one message may carry


def fork_on_request(control: socket.socket) -> None:
    """Serve the launcher until it closes its end."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    children: dict[int, int] = {}  # pidfd -> pid
    while True:
        for key, _ in selector.select():
            if key.fileobj is control:
                descriptors = _requested(control)
                pids = [_fork(descriptor, control, descriptors) for descriptor in descriptors]
                for descriptor in descriptors:
                    os.close(descriptor)
                for pid in pids:
                    watched = os.pidfd_open(pid)
                    children[watched] = pid
                    selector.register(watched, selectors.EVENT_READ)
                _tell(control, ("started", pids))
            else:
                watched = key.fd
                selector.unregister(watched)
                os.close(watched)
                pid, status = os.waitpid(children.pop(watched), 0)
                _tell(control, ("ended", pid, os.waitstatus_to_exitcode(status)))


def _requested(control: socket.socket) -> list[int]:
    """The ends of connections for new ranks; does not return if the launcher is gone."""
    try:
        _, descriptors, *_ = socket.recv_fds(control, 1, MOST_AT_ONCE)
    except OSError:
        descriptors = []
    if not descriptors:
        os._exit(0)
    return descriptors


def _fork(descriptor: int, control: socket.socket, descriptors: list[int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        control.close()
        for other in descriptors:
            if other != descriptor:
                os.close(other)
        process_rank.serve(Connection(descriptor))
    finally:
        os._exit(1)


def _tell(control: socket.socket, message: object) -> None:
    data = pickle.dumps(message)
    control.sendall(len(data).to_bytes(4, "little") + data)


def main(arguments: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if arguments[0] == "fork":
        fork_on_request(socket.socket(fileno=int(arguments[1])))
    else:  # one rank, on a system that does not fork
        address = ast.literal_eval(arguments[0])
        key = sys.stdin.buffer.read()
        process_rank.serve(Client(address, authkey=key))


if __name__ == "__main__":
    main(sys.argv[1:])
