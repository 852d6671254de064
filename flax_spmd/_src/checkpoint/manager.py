"""The manager: checkpoints of a training run, taken as it goes and found again when it is started anew.

    with checkpoint.Manager(root, layout, every=500, keep=3) as manager:
      start, state = manager.resume(create_state, key, x, data=batches)
      for step in range(start, steps):
        state = train_step(state, next(batches))
        manager.save(step + 1, state, data=batches)
        if manager.preempted:
          break

Orbax's Checkpointer writes, names, keeps and removes them, under Orbax's policies.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, Self

import filelock
import jax
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from flax_spmd._src.checkpoint.restore import restore
from flax_spmd._src.checkpoint.storage import async_save as pending
from flax_spmd._src.checkpoint.storage.byte_progress import Bar
from flax_spmd._src.checkpoint.storage.contents import contents_of
from flax_spmd._src.checkpoint.storage.folders import as_path, is_remote, locked
from flax_spmd._src.checkpoint.storage.orbax_context import context
from flax_spmd._src.checkpoint.storage.readers import custom_metadata
from flax_spmd._src.layout import Layout
from flax_spmd._src.multihost import CALLS, TIMEOUT, exchange
from flax_spmd._src.public_module import set_module
from flax_spmd.errors import (
  CheckpointBusyError,
  CheckpointDamagedError,
  CheckpointError,
  CheckpointNotFoundError,
)

_DATA = 'flax_spmd_data'


class Data(Protocol):
  """An iterator over data that can go on where it was, as those of Grain."""

  def get_state(self) -> Any:
    """Where it is: bytes, or what JSON can hold."""
    ...

  def set_state(self, state: Any) -> None:
    """Goes to where it was."""
    ...


@set_module('flax_spmd.checkpoint')
class Resumed(NamedTuple):
  """What training goes on with: how many steps are done, and the state after them.

  Example:
    >>> with checkpoint.Manager(tmp / 'new', Layout({'data': 8})) as manager:
    ...   resumed = manager.resume(lambda: {'w': jnp.zeros(8)})
    >>> resumed.step, resumed.state['w'].shape
    (0, (8,))
  """

  step: int
  state: Any


@set_module('flax_spmd.checkpoint')
class Manager:
  """The checkpoints of one training run, in the folders `<root>/<step>`.

  In a program of several processes, every process makes one and calls it alike.

  Args:
    root: a folder of its own; is made if it is not there. While a manager is open, no other one can
      write there.
    layout: the layout that the states live under.
    every: a checkpoint is taken of steps that are divisible by this, or as a policy of
      `orbax.checkpoint.v1.training.save_decision_policies` says.
    keep: how many are kept, the newest ones, or a policy of `...training.preservation_policies`.
    compress, memory, show: as of `save`.

  Raises:
    CheckpointBusyError: another manager has the folder.
    CheckpointError: an argument is not what it should be.

  Example:
    >>> layout = Layout({'data': 8}, (('embed', 'data'),))
    >>> create = lambda: {'w': LogicallyPartitioned(jnp.zeros(8), ('embed',))}
    >>> with checkpoint.Manager(tmp / 'run', layout, every=2, keep=1) as manager:
    ...   start, state = manager.resume(create)
    ...   for step in range(start, 5):
    ...     state = jax.tree.map(lambda x: x + 1, state)
    ...     _ = manager.save(step + 1, state)
    >>> with checkpoint.Manager(tmp / 'run', layout) as manager:
    ...   step, state = manager.resume(create)
    >>> step, float(state['w'].value[0])
    (4, 4.0)
  """

  def __init__(
    self,
    root: str | os.PathLike[str],
    layout: Layout,
    *,
    every: int | Any = 1000,
    keep: int | Any = 3,
    compress: bool = False,
    memory: int | None = None,
    show: bool = False,
  ):
    self.root = as_path(root)
    self.layout = layout
    self._show, self._memory, self._closed = show, memory, False
    if not isinstance(layout, Layout):
      raise CheckpointError(
        f'{layout!r} is no Layout.\nFix: pass the layout that the states live under.'
      )
    for name, number in (('every', every), ('keep', keep)):
      if isinstance(number, int) and number < 1:
        raise CheckpointError(
          f'{name}={number} is no number of steps.\nFix: pass 1 or more, or a policy.'
        )
    self._lock = _hold(self.root)
    self._preemption = _Preemption()
    self._checkpointer = ocp.training.Checkpointer(
      self.root,
      context=context(compress=compress, memory=memory),
      save_decision_policy=_every(every),
      preservation_policy=_keep(keep),
      cleanup_tmp_directories=True,
    )

  @property
  def steps(self) -> list[int]:
    """The steps of which there are checkpoints, the oldest first."""
    return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

  @property
  def preempted(self) -> bool:
    """Whether the machine is to be taken away (SIGTERM); the last `save` has saved, then."""
    return self._preemption.saved

  def save(
    self,
    step: int,
    state: Any,
    *,
    data: Data | None = None,
    metrics: Mapping[str, float] | None = None,
    force: bool = False,
  ) -> bool:
    """Takes a checkpoint if it is time to, in the background; call it after every step.

    When the machine is to be taken away (SIGTERM), it takes one at once and waits for it.

    Args:
      step: how many steps are done.
      state: the state after them.
      data: the iterator that the next batch comes from; where it is is saved too.
      metrics: what a policy such as `BestN` decides by.
      force: takes one whatever the policy says.

    Returns:
      Whether it takes one.

    Raises:
      CheckpointError: as `save`; or an earlier one has failed.
    """
    if self._closed:
      raise CheckpointError(
        f'The manager of {self.root} has been closed.\nFix: save before its with-block ends.'
      )
    preempted = self._preemption.reached(step)
    if step in self.steps:
      self._preemption.saved |= preempted
      return False
    if not (force or preempted or self._checkpointer.should_save(step)):
      return False
    pending.finish()
    contents = contents_of(state, self.layout).summed()
    if self._memory is not None and self._memory <= contents.record.largest:
      raise CheckpointError(
        f'memory={self._memory} has no room for the largest array, of {contents.record.largest} bytes.\n'
        'Fix: give the manager more, or leave memory= out.'
      )
    bar = Bar(self._show, f'save step {step}', contents.record.bytes, 'written')
    try:
      response = self._checkpointer.save_async(
        step,
        contents.tree,
        force=True,
        metrics=dict(metrics) if metrics else None,
        custom_metadata=contents.metadata | _data_metadata(data),
      )
    except BaseException:
      bar.close()
      raise
    if response is None:
      bar.close()
      return False
    saving = pending.start(response, pending.Follower(self.root / str(step), self.root), bar, _nothing)
    if preempted:
      saving.result()
      self._preemption.saved = True
    return True

  def resume(
    self, fn: Any, *args: Any, data: Data | None = None, boxed: bool = True, **kwargs: Any
  ) -> Resumed:
    """Goes on from the newest checkpoint that is whole, or begins with a state of its own.

    Args:
      fn, *args, **kwargs, boxed: what makes a state, as of `layout.init`.
      data: an iterator, which is set to where it was.

    Returns:
      How many steps are done (0: it begins), and the state.

    Raises:
      CheckpointError: as `restore`; and if there are checkpoints and all of them are damaged.
    """
    if not self.steps:
      return Resumed(0, self.layout.init(fn, *args, boxed=boxed, **kwargs))
    target = self.layout.abstract(fn, *args, boxed=boxed, **kwargs)
    return self.restore(target, data=data)

  def restore(
    self, target: Any = None, *, step: int | None = None, data: Data | None = None, **how: Any
  ) -> Resumed:
    """A checkpoint of this run: that of a step, or the newest that is whole.

    Args:
      target: as of `restore`; None: what the record says, under the manager's layout.
      step: which one. None: the newest; if it is damaged, it is renamed, and the one before it is
        taken, with a warning.
      data: an iterator, which is set to where it was.
      **how: the other arguments of `restore`.

    Raises:
      CheckpointNotFoundError: there is none.
      CheckpointError: as `restore`.
    """
    self.wait()
    steps = self.steps if step is None else [step]
    if not steps:
      raise CheckpointNotFoundError(
        f'There are no checkpoints in {self.root} yet.\nFix: call resume, which begins without one.'
      )
    how = {'layout': self.layout, 'memory': self._memory, 'show': self._show} | how
    for number in reversed(steps):
      path = self.root / str(number)
      try:
        state = restore(path, target, **how)
      except (CheckpointDamagedError, CheckpointNotFoundError) as error:
        if number == steps[0]:
          raise
        aside = self._set_aside(number)
        warnings.warn(
          f'{error}\nIt is kept as {aside.name}, and the checkpoint before it is tried.', stacklevel=2
        )
        continue
      if data is not None:
        _set_data(path, data)
      return Resumed(number, state)
    raise AssertionError  # the last step returns or raises

  def _set_aside(self, step: int) -> epath.Path:
    """Renames a damaged step, so that training can come to it again."""
    path = self.root / str(step)
    aside = self.root / f'.{step}.damaged'
    if jax.process_index() == 0:
      if aside.exists():
        aside.rmtree()
      path.rename(aside)
    if jax.process_count() > 1:
      pending.from_first({})
    self._checkpointer.reload()
    return aside

  def wait(self) -> None:
    """Waits for the checkpoint that is being taken; raises its error."""
    pending.finish()

  def close(self) -> None:
    """Waits for what is under way, and lets go of the folder."""
    self._closed = True
    try:
      self.wait()
    finally:
      self._preemption.close()
      self._checkpointer.close()
      if self._lock is not None:
        self._lock.release()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()


def _every(every: Any) -> Any:
  return (
    ocp.training.save_decision_policies.FixedIntervalPolicy(every) if isinstance(every, int) else every
  )


def _keep(keep: Any) -> Any:
  return ocp.training.preservation_policies.LatestN(keep) if isinstance(keep, int) else keep


def _nothing() -> None:
  pass


def _hold(root: epath.Path) -> filelock.BaseFileLock | None:
  """The folder, held by the first process."""
  held, said = None, {}
  if jax.process_index() == 0 and not is_remote(root):
    root.mkdir(parents=True, exist_ok=True)
    try:
      held = locked(root / 'steps')
    except CheckpointBusyError:
      said = {'busy': True}
  if (pending.from_first(said) if jax.process_count() > 1 else said).get('busy'):
    raise CheckpointBusyError(
      f'Another manager has {root}.\nFix: close it, wait for the other job, or use another folder.'
    )
  return held


class _Preemption:
  """Whether the machine is to be taken away.

  One process hears of it by SIGTERM. In a job of several, JAX hears of it and lets all of them know
  at the same step.
  """

  def __init__(self) -> None:
    self.saved = False
    self._heard = False
    self._before: Any = None
    if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
      self._before = signal.signal(signal.SIGTERM, self._hear)

  def _hear(self, number: int, frame: Any) -> None:
    self._heard = True

  def reached(self, step: int) -> bool:
    """Whether it is time to save for the last time; every process asks at every step."""
    if jax.process_count() == 1:
      return self._heard
    try:
      return multihost_utils.reached_preemption_sync_point(step)
    except RuntimeError:  # the service is switched off
      return False

  def close(self) -> None:
    """Does as before when SIGTERM comes."""
    if self._before is not None:
      signal.signal(signal.SIGTERM, self._before)
      self._before = None


# -- the iterator over data


def _data_metadata(data: Data | None) -> dict[str, Any]:
  """Where each process's iterator is, as custom metadata."""
  if data is None:
    return {}
  text = _to_text(data.get_state())
  if jax.process_count() == 1:
    return {_DATA: [text]}
  groups = exchange('data', tuple(range(jax.process_count())), text, CALLS, TIMEOUT)
  by_process = {process: said for processes, said in groups for process in processes}
  return {_DATA: [by_process[process] for process in sorted(by_process)]}


def _to_text(state: Any) -> str:
  if isinstance(state, bytes):
    return json.dumps({'bytes': base64.b64encode(state).decode()})
  try:
    return json.dumps({'json': state})
  except TypeError as error:
    raise CheckpointError(
      f'The state of the data iterator cannot be saved: {error}.\n'
      'Fix: let get_state return bytes, or what JSON can hold.'
    ) from error


def _set_data(path: epath.Path, data: Data) -> None:
  saved = custom_metadata(path).get(_DATA)
  if saved is None:
    raise CheckpointError(
      f'The checkpoint {path} does not say where the data iterator was.\n'
      'Fix: pass data= to every save; or go on without, and set the iterator yourself.'
    )
  if len(saved) != jax.process_count():
    raise CheckpointError(
      f'The checkpoint {path} says where the iterators of {len(saved)} processes were; this job has '
      f'{jax.process_count()}.\n'
      'Fix: leave data= out, and set the iterators yourself: each would read another part of the data.'
    )
  state = json.loads(saved[jax.process_index()])
  data.set_state(base64.b64decode(state['bytes']) if 'bytes' in state else state['json'])
