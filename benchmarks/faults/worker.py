"""Worker: the process that saves, to be killed, stopped or disturbed; it reads commands from stdin and answers on stdout.

{"do": "save", "path": "...", "number": 2, "size": [4, 64, 0], "overwrite": true}
{"saved": 2, "seconds": 0.1}
"""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import sys
import time
import warnings
from typing import Any

from faults.known_states import Size, is_state, layout, state_of
from flax_spmd import checkpoint, errors

ANSWERS = os.dup(1)  # libraries may print


@functools.cache
def _state(number: int, *size: int) -> Any:
  return state_of(number, Size(*size))


def answer(**message: Any) -> None:
  os.write(ANSWERS, (json.dumps(message) + '\n').encode())


class Actions:
  """The commands of a worker, one method each."""

  def __init__(self) -> None:
    self._manager: checkpoint.Manager | None = None

  def make(self, numbers: list[int], size: list[int]) -> None:
    """Makes states beforehand, and saves a tiny one, so that a timed save does nothing else."""
    for number in numbers:
      _state(number, *size)

  def save(self, path: str, number: int, size: list[int], **options: Any) -> None:
    checkpoint.save(path, _state(number, *size), layout=layout(), **options)

  def save_async(self, path: str, number: int, size: list[int], **options: Any) -> None:
    checkpoint.save_async(path, _state(number, *size), layout=layout(), **options).result()

  def open(self, root: str, keep: int) -> None:
    self._manager = checkpoint.Manager(root, layout(), every=1, keep=keep)

  def step(self, number: int, size: list[int]) -> None:
    manager = self._manager
    assert manager is not None
    if not manager.save(number, _state(number, *size)):
      raise RuntimeError(f'the manager did not save step {number}; its steps are {manager.steps}')
    manager.wait()

  def steps(self) -> list[int]:
    assert self._manager is not None
    return self._manager.steps

  def newest(self, root: str, size: list[int]) -> int:
    """Restores the newest step, beside the manager that writes; returns its number, which is that of its state."""
    with checkpoint.Manager(root, layout(), read_only=True) as manager:
      step, state = manager.restore()
    if not is_state(state, step, Size(*size)):
      raise RuntimeError(f'step {step} is restored, but is not its state')
    return step

  def close(self) -> None:
    manager, self._manager = self._manager, None
    if manager is not None:
      manager.close()

  def renamed_step(self, step: int, number: int, size: list[int]) -> None:
    """Saves a state as a step that has another number."""
    assert self._manager is not None
    if not self._manager.save(step, _state(number, *size)):
      raise errors.CheckpointExistsError(f'the manager did not save step {step}')
    self._manager.wait()

  def loop_until_told(self, path: str, numbers: list[int], size: list[int]) -> int:
    """Overwrites a path again and again until the next line, at least three times; returns how often."""
    count = 0
    while count < 3 or not select.select([sys.stdin], [], [], 0)[0]:
      self.save(path, numbers[count % len(numbers)], size, overwrite=True)
      count += 1
    sys.stdin.readline()
    return count

  def series(self, mode: str, root: str, numbers: list[int], size: list[int], pause: int = 0) -> None:
    """Saves states one after the other; reports each as it begins and when it is saved.

    After the number `pause` it does nothing any more.
    """
    for number in numbers:
      answer(begun=number)
      _SERIES[mode](self, root, number, size)
      answer(saved=number)
      if mode == 'save new, delete old' and number > numbers[0]:
        shutil.rmtree(f'{root}/{number - 1}')
      if number == pause:
        answer(paused=number)
        time.sleep(600)


def _rotate(actions: Actions, root: str, number: int, size: list[int]) -> None:
  if actions._manager is None:
    actions.open(f'{root}/run', keep=1)
  actions.step(number, size)


_SERIES = {
  'new paths': lambda a, root, n, size: a.save(f'{root}/{n}', n, size),
  'save new, delete old': lambda a, root, n, size: a.save(f'{root}/{n}', n, size),
  'async': lambda a, root, n, size: a.save_async(f'{root}/{n}', n, size),
  'overwrite': lambda a, root, n, size: a.save(f'{root}/one', n, size, overwrite=True),
  'packed': lambda a, root, n, size: a.save(f'{root}/one', n, size, overwrite=True, pack=4096),
  'rotation': _rotate,
}


def main() -> None:
  warnings.simplefilter('ignore')
  actions = Actions()
  answer(ready=os.getpid())
  while line := sys.stdin.readline():
    command = json.loads(line)
    begin = time.monotonic()
    try:
      result = getattr(actions, command.pop('do'))(**command)
      answer(ok=True, result=result, seconds=time.monotonic() - begin)
    except Exception as error:
      answer(
        ok=False,
        error=type(error).__name__,
        clear=isinstance(error, errors.CheckpointError),
        text=str(error),
        seconds=time.monotonic() - begin,
      )


if __name__ == '__main__':
  main()
