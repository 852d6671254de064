"""Workers, seen from the campaign: processes that receive commands, and are killed or stopped at some moment."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults.tally import Harm

SOURCE = Path(__file__).with_name('worker.py')
ENVIRONMENT = {
  'PYTHONPATH': os.pathsep.join(map(str, (SOURCE.parents[1], SOURCE.parents[2]))),
  'JAX_PLATFORMS': 'cpu',
  'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
}
UNSHARE = ('unshare', '--pid', '--fork', '--kill-child', '--mount-proc')
LIMIT = 180.0  # seconds until a call is taken to hang


class Worker:
  """A process that runs one command after the other.

  Args:
    environment: further variables of its environment.
    elsewhere: whether it runs as on another machine: in a PID namespace of its own, which needs root.
  """

  def __init__(self, environment: dict[str, str] | None = None, elsewhere: bool = False):
    self._process = subprocess.Popen(
      [*(UNSHARE if elsewhere else ()), sys.executable, str(SOURCE)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      env=os.environ | ENVIRONMENT | (environment or {}),
    )
    self._elsewhere = elsewhere
    self._answers: collections.deque[dict[str, Any]] = collections.deque()
    self._arrived = threading.Condition()
    self._ended = False
    self._ready: dict[str, Any] | None = None
    threading.Thread(target=self._listen, daemon=True).start()

  def _listen(self) -> None:
    for line in self._process.stdout:
      with self._arrived:
        self._answers.append(json.loads(line))
        self._arrived.notify_all()
    with self._arrived:
      self._ended = True
      self._arrived.notify_all()

  def ask(self, do: str, **arguments: Any) -> None:
    """Sends a command; the first one waits until the process has started."""
    if self._ready is None:
      self._ready = self.answer()
    self._process.stdin.write((json.dumps({'do': do} | arguments) + '\n').encode())
    self._process.stdin.flush()

  def answer(self, limit: float = LIMIT) -> dict[str, Any]:
    """The next message.

    Raises:
      Harm: there is none within the limit, or the process has ended.
    """
    with self._arrived:
      if not self._arrived.wait_for(lambda: self._answers or self._ended, limit):
        raise Harm(f'a worker does not answer within {limit:.0f} s')
      if not self._answers:
        raise Harm(f'a worker has ended with {self._process.poll()}')
      return self._answers.popleft()

  def answers(self) -> list[dict[str, Any]]:
    """The messages that have arrived."""
    with self._arrived:
      arrived = list(self._answers)
      self._answers.clear()
      return arrived

  def call(self, do: str, limit: float = LIMIT, **arguments: Any) -> dict[str, Any]:
    """Sends a command and returns its answer."""
    self.ask(do, **arguments)
    return self.answer(limit)

  def done(self, do: str, limit: float = LIMIT, **arguments: Any) -> Any:
    """Sends a command that has to succeed; returns its result.

    Raises:
      Harm: it fails.
    """
    answer = self.call(do, limit, **arguments)
    if not answer['ok']:
      raise Harm(f'{do} fails: {answer["error"]}: {answer["text"]}')
    return answer['result']

  @property
  def _pid(self) -> int:
    """The process that runs Python, as this process knows it."""
    pid = self._process.pid
    children = Path(f'/proc/{pid}/task/{pid}/children').read_text().split()
    return int(children[0]) if self._elsewhere and children else pid

  def kill(self) -> list[dict[str, Any]]:
    """Kills the process; returns the messages that it had sent."""
    os.kill(self._pid, signal.SIGKILL)
    self._process.wait()
    with self._arrived:
      self._arrived.wait_for(lambda: self._ended, 10)
    return self.answers()

  def stop(self) -> None:
    """Stops the process until `resume`."""
    os.kill(self._pid, signal.SIGSTOP)
    state = Path(f'/proc/{self._pid}/stat')
    while state.read_text().rpartition(')')[2].split()[0] not in 'TZ':
      time.sleep(0.001)

  def resume(self) -> None:
    os.kill(self._pid, signal.SIGCONT)

  def end(self) -> None:
    """Lets the process end; kills it if it doesn't."""
    with contextlib.suppress(OSError):
      self._process.stdin.close()
    try:
      self._process.wait(30)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()


def can_be_elsewhere() -> bool:
  """Whether processes can be started in a PID namespace of their own."""
  try:
    return subprocess.run([*UNSHARE, 'true'], capture_output=True).returncode == 0
  except OSError:
    return False


@contextlib.contextmanager
def workers(count: int, **options: Any) -> Iterator[list[Worker]]:
  """Some workers, which end with the block."""
  started = [Worker(**options) for _ in range(count)]
  try:
    yield started
  finally:
    for worker in started:
      worker.end()


class Victims:
  """Workers to kill, one after the other; the next one starts while this one is at work."""

  def __init__(self, **options: Any):
    self._options = options
    self._next = Worker(**options)

  def take(self) -> Worker:
    victim, self._next = self._next, Worker(**self._options)
    return victim

  def __enter__(self) -> Victims:
    return self

  def __exit__(self, *exc: object) -> None:
    self._next.kill()
