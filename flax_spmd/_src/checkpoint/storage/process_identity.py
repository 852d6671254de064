"""Process identities: which process holds a lease, and whether that process has ended.

A process is known by its identifier, its start time and its PID namespace. Another process of the same
namespace can tell at once whether it has ended; a process of another machine or container cannot.
"""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

_START_TIME = 19  # index in `/proc/<pid>/stat`, counted after the command's name


class ProcessIdentity(NamedTuple):
  """A process, as other processes know it.

  Attributes:
    host: name of its machine.
    namespace: boot of the machine and PID namespace; empty if unknown.
    pid: its identifier in that namespace.
    started: start time in clock ticks since the boot; empty if unknown.
  """

  host: str
  namespace: str
  pid: int
  started: str

  def __str__(self) -> str:
    return f'process {self.pid} on {self.host}'

  @property
  def is_local(self) -> bool:
    """Whether the process is in this process's PID namespace."""
    return bool(self.namespace) and self.namespace == _namespace()

  @property
  def has_ended(self) -> bool:
    """Whether the process is known to have ended; False for processes of other namespaces."""
    return self.is_local and _started(self.pid) != self.started


def this_process() -> ProcessIdentity:
  """The identity of the calling process."""
  pid = os.getpid()
  return ProcessIdentity(socket.gethostname(), _namespace(), pid, _started(pid))


def parsed_identity(content: Any) -> ProcessIdentity:
  """The identity stored as a JSON list; raises ValueError or TypeError for any other value."""
  host, namespace, pid, started = content
  if not (isinstance(pid, int) and all(isinstance(text, str) for text in (host, namespace, started))):
    raise ValueError('a process is not a host, a namespace, a number and a start time')
  return ProcessIdentity(host, namespace, pid, started)


@functools.cache
def _namespace() -> str:
  try:
    boot = Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    return f'{boot}/{os.stat("/proc/self/ns/pid").st_ino}'
  except OSError:  # not Linux
    return ''


def _started(pid: int) -> str:
  """The start time of a process; empty if there is none, or it has ended and waits for its parent."""
  try:
    fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
  except OSError:
    return ''
  return '' if fields[0] in 'ZX' else fields[_START_TIME]
