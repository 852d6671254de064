"""Step folder: the checkpoints of a run, in the folders `<root>/<step>`, and how they are listed and removed.

Every listing looks at the storage itself: another process may have saved or removed steps.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import operator
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from flax_spmd._src.checkpoint.storage.generations import remove_checkpoint
from flax_spmd._src.checkpoint.storage.head import read_head
from flax_spmd._src.checkpoint.storage.killed_saves import remove_killed_saves
from flax_spmd._src.checkpoint.storage.manifest import check_replaceable
from flax_spmd._src.checkpoint.storage.recognition import (
  custom_metadata,
  has_metadata,
  has_record,
  is_checkpoint,
  saved_at,
)
from flax_spmd._src.checkpoint.storage.refused_reads import refusals
from flax_spmd._src.checkpoint.storage.source import current_source
from flax_spmd._src.checkpoint.storage.store import open_store
from flax_spmd._src.text import value_text, with_article
from flax_spmd.errors import CheckpointDamagedError, CheckpointError

_STEP = re.compile(r'0|[1-9]\d*')
_NUMBERED = re.compile(r'(.*[_-])?(\d+)')  # of Orbax, with a prefix or a fixed length
_LEFT = re.compile(r'\d+\.orbax-checkpoint-tmp.*')  # of Orbax's Checkpointer
_METRICS = 'flax_spmd_metrics'


class StepFolder:
  """The folder of a run.

  Attributes:
    root: path of the folder.
    damaged: steps that were found damaged, and could not be moved away.
  """

  def __init__(self, root: epath.Path):
    self.root = root
    self.damaged: set[int] = set()

  def path(self, step: int) -> epath.Path:
    """The path of a step."""
    return self.root / str(step)

  def steps(self) -> list[int]:
    """The complete steps at this moment, oldest first.

    A step is removed once a newer one is complete. So the newer ones are looked at later, and those that
    appear meanwhile in another look: a step that replaces another one is never missed.
    """
    names, before = self.names(), None
    complete: list[int] = []
    while names != before:
      complete = [step for step in names if is_checkpoint(self.path(step))]
      names, before = self.names(), names
    return [step for step in complete if step not in self.damaged]

  def names(self) -> list[int]:
    """The steps that have a folder at this moment, complete or not, oldest first."""
    return sorted(int(name) for name in self._children() if _STEP.fullmatch(name))

  def unread(self) -> str:
    """The warning for checkpoints whose names end with a number and are not steps; '' if there are none."""
    numbers = {name: int(match[2]) for name in self._children() if (match := _NUMBERED.fullmatch(name))}
    names = [name for name in numbers if not _STEP.fullmatch(name) and is_checkpoint(self.root / name)]
    if not names:
      return ''
    last = max(names, key=lambda name: numbers[name])
    return (
      f'The run in {self.root} begins anew: {", ".join(names)} in it are no steps by their names. If it should continue '
      f'from {last}, rename that to {numbers[last]}.'
    )

  def history(self) -> list[tuple[int, int, Any]]:
    """Each complete step with its time, in nanoseconds since 1970, and its metrics."""
    return [(step, _time(self.path(step)), _metrics(self.path(step))) for step in self.steps()]

  def described(self, step: int, nanoseconds: int, metrics: Any) -> ocp.training.CheckpointMetadata:
    """A step in the terms of Orbax's policies."""
    return ocp.training.CheckpointMetadata(
      step, self.path(step), metadata=None, metrics=metrics, commit_timestamp_nsecs=nanoseconds
    )

  def is_unchecked(self, step: int) -> bool:
    """Whether nothing is known about the contents of a step, so that damage would go unnoticed.

    Only old versions of Orbax write no metadata. A run does not go back to one: if an earlier step has a
    record, then this one had one too.

    Raises:
      CheckpointDamagedError: the record of the step is lost.
    """
    path = self.path(step)
    with refusals(path):
      if has_metadata(path) or not path.exists():
        return False
    if any(has_record(self.path(earlier)) for earlier in self.steps() if earlier < step):
      raise CheckpointDamagedError(
        f'Checkpoint {path} has lost its record of names and checksums; earlier steps have theirs.\n'
        'Fix: restore another step; or restore this one unverified, with flax_spmd.checkpoint.restore.'
      )
    return True

  def remove(self, step: int, check: Callable[[], object] = lambda: None) -> bool:
    """Removes a step, unless a reader uses it. One whose removal is interrupted is no longer listed.

    Args:
      step: the step.
      check: see `remove_checkpoint`.

    Returns:
      Whether there is no such step now.
    """
    if str(step) not in self._children():
      return True
    store = open_store(self.root)
    check_replaceable(store, self.path(step), store.children(str(step)))
    return remove_checkpoint(self.path(step), check)

  def set_aside(self, step: int) -> str:
    """Moves a damaged step away, and returns its new name. In cloud storage it stays, and '' is returned."""
    if '://' in str(self.root):
      return ''
    aside = self.root / f'.{step}.damaged'
    if aside.exists():
      aside.rmtree()
    self.path(step).rename(aside)
    return aside.name

  def tidy(self) -> None:
    """Removes parts of steps that interrupted saves and removals have left. Only the writer may call this."""
    store = open_store(self.root)
    for name in self._children():
      if _LEFT.fullmatch(name):
        store.remove(name)
      elif _STEP.fullmatch(name) and self._is_remainder(name):
        remove_checkpoint(self.root / name)
    remove_killed_saves(store)

  def _is_remainder(self, name: str) -> bool:
    """Whether a path has a head, but no checkpoint: its save was killed, or its removal."""
    path = self.root / name
    return not is_checkpoint(path) and read_head(open_store(self.root), path).tag is not None

  def _children(self) -> list[str]:
    return open_store(self.root).children()


def checked_step(step: Any) -> int:
  """A number of steps, which may be an array, as an int."""
  try:
    number = operator.index(step)
  except TypeError:
    number = -1
  if number < 0 or isinstance(step, (bool, np.bool_)):
    raise CheckpointError(
      f'step={value_text(step)} is not a number of steps.\nFix: pass an integer, 0 or more.'
    )
  return number


def metrics_metadata(metrics: Any) -> dict[str, Any]:
  """Metrics as JSON values, to store with a step."""
  if metrics is None or metrics == {}:
    return {}
  if not isinstance(metrics, Mapping):
    raise CheckpointError(
      f'metrics={value_text(metrics)} is no dict.\nFix: pass numbers by name: {{"loss": 0.5}}.'
    )
  wrong = {}
  values = {}
  for name, value in metrics.items():
    try:
      values[name] = value if _is_json(value) else float(value)
    except (TypeError, ValueError, OverflowError):
      wrong[name] = value
  if wrong:
    lines = [
      f'metrics[{name!r}] is {with_article(type(value).__name__)}, not a number.'
      for name, value in wrong.items()
    ]
    raise CheckpointError('\n'.join(lines) + '\nFix: pass numbers.')
  return {_METRICS: values}


def metrics_of(metadata: dict[str, Any]) -> Any:
  """The metrics among the JSON values stored with a step; None if there are none."""
  return metadata.get(_METRICS)


def _is_json(value: Any) -> bool:
  try:
    json.dumps(value)
  except (TypeError, ValueError, RecursionError):
    return False
  return True


def _metrics(path: epath.Path) -> Any:
  """The metrics of a step; those of a step of Orbax are in a file of their own."""
  file = path / 'metrics' / 'metrics'
  with (
    refusals(path),
    contextlib.suppress(CheckpointDamagedError, json.JSONDecodeError, UnicodeDecodeError),
  ):
    return json.loads(file.read_text()) if file.exists() else metrics_of(custom_metadata(path))
  return None


def _time(path: epath.Path) -> int:
  """The time of a save, in nanoseconds since 1970."""
  with refusals(path), contextlib.suppress(CheckpointDamagedError, FileNotFoundError):
    saved = saved_at(path, current_source(path)) or datetime.datetime.fromtimestamp(path.stat().mtime)
    return int(saved.timestamp() * 1e9)
  return time.time_ns()
