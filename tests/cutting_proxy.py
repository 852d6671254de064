"""Cutting proxy: passes bytes between clients and a server, and breaks connections between two bytes of a request or an answer."""

from __future__ import annotations

import contextlib
import itertools
import random
import select
import socket
import struct
import threading
import urllib.parse
from collections.abc import Iterable
from typing import Literal

Direction = Literal['requests', 'answers']
_RESET = struct.pack('ii', 1, 0)  # a socket that is closed like this sends a reset, no end of data


class CuttingProxy:
  """A proxy on loopback, for the time of a with-block.

  Args:
    server: URL of the server.
    seed: seed of the choice between the two ways to break a connection: an end of data, or a reset.

  Attributes:
    url: where it listens.
    passed: bytes passed in each direction since `cut` or `calm`.
    cuts: connections broken since then.
  """

  def __init__(self, server: str, seed: int = 0):
    url = urllib.parse.urlsplit(server)
    self._server = (url.hostname or '', url.port or 80)
    self._random, self._lock = random.Random(seed), threading.Lock()
    self._listening = socket.create_server(('127.0.0.1', 0), backlog=128)
    self.url = f'http://127.0.0.1:{self._listening.getsockname()[1]}'
    self.calm()
    self._accepting = threading.Thread(target=self._accept, daemon=True)
    self._accepting.start()

  def cut(self, direction: Direction, places: Iterable[int]) -> None:
    """Breaks the connection that passes the byte with one of these increasing numbers, counted from now."""
    with self._lock:
      self.passed: dict[Direction, int] = {'requests': 0, 'answers': 0}
      self.cuts = 0
      self._direction, self._places = direction, iter(places)
      self._next = next(self._places, None)

  def calm(self) -> None:
    """Breaks no more connections."""
    self.cut('answers', ())

  def __enter__(self) -> CuttingProxy:
    return self

  def __exit__(self, *exc: object) -> None:
    # A thread that waits in `accept` goes on waiting when the socket is closed. Linux repeats the call after a signal, such
    # as that of `seteuid`, with the number of the socket, which may be another one's by then.
    with contextlib.suppress(OSError):  # of systems on which closing is enough
      self._listening.shutdown(socket.SHUT_RDWR)
    self._listening.close()
    self._accepting.join()

  def _accept(self) -> None:
    while True:
      try:
        client, _ = self._listening.accept()
      except OSError:  # it is closed
        return
      threading.Thread(target=self._serve, args=(client,), daemon=True).start()

  def _serve(self, client: socket.socket) -> None:
    try:
      with client, socket.create_connection(self._server) as server:
        for each in (client, server):
          each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while self._passes(client, server):
          pass
    except OSError:  # one side has left
      pass

  def _passes(self, client: socket.socket, server: socket.socket) -> bool:
    """Passes the bytes that have arrived; returns False at the end of the connection."""
    for source in select.select([client, server], [], [])[0]:
      data = source.recv(1 << 16)
      direction, sink = ('requests', server) if source is client else ('answers', client)
      kept = self._counted(direction, len(data))
      sink.sendall(data[:kept])
      if kept < len(data):
        self._break(client, server)
      if not data or kept < len(data):
        return False
    return True

  def _counted(self, direction: Direction, size: int) -> int:
    """The number of bytes to pass on, of those that have arrived."""
    with self._lock:
      start = self.passed[direction]
      self.passed[direction] += size
      if direction != self._direction or self._next is None or start + size < self._next:
        return size
      kept = max(self._next - 1 - start, 0)
      self.passed[direction] = max(self._next, start)
      self._next = next(self._places, None)
      self.cuts += 1
      return min(kept, size - 1)

  def _break(self, *sides: socket.socket) -> None:
    if self._random.random() < 0.5:
      for side in sides:
        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def places_of(first: int, count: int | None, gap: int) -> Iterable[int]:
  """The bytes to cut at: a first one, and further ones at a distance.

  Args:
    first: number of the first one.
    count: how many; None: without end.
    gap: bytes from one to the next.
  """
  return itertools.islice(itertools.count(first, gap), count)
