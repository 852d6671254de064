"""The manager: saves a training run's checkpoints at intervals, and resumes the run from the newest one.

    with checkpoint.Manager(root, layout, every=500, keep=3) as manager:
      start, state = manager.resume(create_state, key, x, data=batches)
      for step in range(start, steps):
        state = train_step(state, next(batches))
        manager.save(step + 1, state, data=batches)
        if manager.preempted:
          break

Orbax's Checkpointer writes, names, keeps and removes the checkpoints, following Orbax's policies.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, Unpack, overload

import filelock
import jax
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from flax_spmd._src.checkpoint.matching.allowed_changes import NO_CHANGES, Changes
from flax_spmd._src.checkpoint.restore import restore
from flax_spmd._src.checkpoint.storage import async_save
from flax_spmd._src.checkpoint.storage.byte_progress import ByteProgress
from flax_spmd._src.checkpoint.storage.contents import check_is_layout, contents_of
from flax_spmd._src.checkpoint.storage.folders import as_path, is_remote, locked
from flax_spmd._src.checkpoint.storage.orbax_context import context
from flax_spmd._src.checkpoint.storage.readers import custom_metadata
from flax_spmd._src.data.prefetch import reader_of
from flax_spmd._src.layout import Layout
from flax_spmd._src.multihost import CALLS, TIMEOUT, exchange
from flax_spmd._src.public_module import set_module
from flax_spmd._src.state_plan import Plan, State
from flax_spmd.errors import (
  CheckpointBusyError,
  CheckpointDamagedError,
  CheckpointError,
  CheckpointNotFoundError,
  LayoutError,
)

if TYPE_CHECKING:
  from flax_spmd._src.checkpoint.restore_options import RecordRestoreOptions, RestoreOptions

_DATA = 'flax_spmd_data'


class DataIterator(Protocol):
  """An iterator over data whose position can be saved, as those of Grain."""

  def get_state(self) -> Any:
    """Returns the iterator's position, as bytes or a JSON value."""
    ...

  def set_state(self, state: Any) -> None:
    """Moves the iterator to a position."""
    ...


@set_module('flax_spmd.checkpoint')
class ResumedState(NamedTuple, Generic[State]):
  """The state to continue training from.

  Attributes:
    step: number of completed steps.
    state: state after them.

  Example:
    >>> with checkpoint.Manager(tmp / 'new', Layout({'data': 8})) as manager:
    ...   resumed = manager.resume(lambda: {'w': jnp.zeros(8)})
    >>> resumed.step, resumed.state['w'].shape
    (0, (8,))
  """

  step: int
  state: State


@set_module('flax_spmd.checkpoint')
class Manager:
  """Manages the checkpoints of one training run, in the folders `<root>/<step>`.

  In a job of several processes, every process makes a manager, and calls it in the same way.

  Args:
    root: folder for this run alone; created if needed. Only one manager at a time can have it open.
    layout: layout of the states, or their plan; see `save`. `resume` makes a plan, too.
    every: number of steps between checkpoints: steps divisible by it are saved. Or a policy of
      `orbax.checkpoint.v1.training.save_decision_policies`.
    keep: number of checkpoints to keep, the newest ones. Or a policy of
      `orbax.checkpoint.v1.training.preservation_policies`.
    compress, memory, show: see `save`.

  Attributes:
    root: folder of the run.
    layout: layout of the states.

  Raises:
    CheckpointBusyError: another manager has the folder open.
    CheckpointError: an argument is invalid.

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
    layout: Layout | Plan,
    *,
    every: int | Any = 1000,
    keep: int | Any = 3,
    compress: bool = False,
    memory: int | None = None,
    show: bool = False,
  ):
    self.root = as_path(root)
    self._show, self._memory, self._closed = show, memory, False
    check_is_layout(layout)
    self._plan = layout if isinstance(layout, Plan) else None
    self.layout = layout.layout if isinstance(layout, Plan) else layout
    for name, number in (('every', every), ('keep', keep)):
      if isinstance(number, int) and number < 1:
        raise CheckpointError(
          f'{name}={number} is not positive.\nFix: pass 1 or more, or a policy of Orbax.'
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
    """The saved steps, oldest first."""
    return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

  @property
  def preempted(self) -> bool:
    """Whether the job was preempted (SIGTERM). The state of the last `save` has then been saved."""
    return self._preemption.saved

  def save(
    self,
    step: int,
    state: Any,
    *,
    data: DataIterator | None = None,
    metrics: Mapping[str, float] | None = None,
    force: bool = False,
  ) -> bool:
    """Saves a checkpoint in the background if the step is due. Call it after every step.

    After a preemption (SIGTERM), it saves the current step and waits until the checkpoint is complete.

    Args:
      step: number of completed steps.
      state: state after them.
      data: iterator that the next batch comes from, or its `prefetch`; the position after the batches in use is
        saved too.
      metrics: metrics for a policy such as `BestN`.
      force: whether to save a step that is not due.

    Returns:
      Whether a checkpoint is saved.

    Raises:
      CheckpointError: see `save`; or an earlier save has failed.
    """
    if self._closed:
      raise CheckpointError(
        f'The manager of {self.root} is closed.\nFix: save before its with-block ends.'
      )
    preempted = self._preemption.reached(step)
    if step in self.steps:
      self._preemption.saved |= preempted
      return False
    if not (force or preempted or self._checkpointer.should_save(step)):
      return False
    async_save.finish()
    contents = contents_of(state, self._layout_or_plan(state)).with_checksums()
    if self._memory is not None and self._memory <= contents.record.largest:
      raise CheckpointError(
        f'memory={self._memory} is too small for the largest array, which has {contents.record.largest} bytes.\n'
        'Fix: pass a larger memory=, or leave it out.'
      )
    progress = ByteProgress(self._show, f'save step {step}', contents.record.bytes, 'written')
    try:
      response = self._checkpointer.save_async(
        step,
        contents.tree,
        force=True,
        metrics=dict(metrics) if metrics else None,
        custom_metadata=contents.metadata | _data_metadata(data),
      )
    except BaseException:
      progress.close()
      raise
    if response is None:
      progress.close()
      return False
    claim = async_save.NonWriter(self.root / str(step), self.root)  # Orbax moves the folder itself
    saving = async_save.start(response, claim, progress, _no_check, _no_check)
    if preempted:
      saving.result()
      self._preemption.saved = True
    return True

  def resume(
    self,
    fn: Callable[..., State] | Plan[State],
    *args: Any,
    data: DataIterator | None = None,
    boxed: bool = True,
    **kwargs: Any,
  ) -> ResumedState[State]:
    """Restores the newest undamaged checkpoint, or creates a new state if there are no checkpoints.

    Args:
      fn: function that creates a state, or its plan; see `layout.plan`.
      *args, **kwargs, boxed: see `layout.plan`.
      data: iterator, or its `prefetch`, to move to its saved position.

    Returns:
      The number of completed steps, 0 for a new state, and the state.

    Raises:
      CheckpointError: see `restore`; or all checkpoints are damaged.
      LayoutError: the plan is one of another layout.
    """
    plan = fn if isinstance(fn, Plan) else self.layout.plan(fn, *args, boxed=boxed, **kwargs)
    self._check_layout(plan)
    self._plan = plan
    return self.restore(plan, data=data) if self.steps else ResumedState(0, plan.init())

  def _layout_or_plan(self, state: Any) -> Layout | Plan:
    """The plan of this run, if this is its state."""
    return self._plan if self._plan is not None and self._plan.fits(state) else self.layout

  def _check_layout(self, target: Any) -> None:
    if isinstance(target, Plan) and target.layout != self.layout:
      raise LayoutError(
        f'The plan is one of {target.layout!r}, but the manager has {self.layout!r}.\n'
        'Fix: plan the state with the layout of the manager.'
      )

  @overload
  def restore(
    self,
    target: None = None,
    *,
    step: int | None = None,
    data: DataIterator | None = None,
    **options: Unpack[RecordRestoreOptions],
  ) -> ResumedState[Any]: ...
  @overload
  def restore(
    self,
    target: Plan[State],
    *,
    step: int | None = None,
    data: DataIterator | None = None,
    **options: Unpack[RestoreOptions],
  ) -> ResumedState[State]: ...
  @overload
  def restore(
    self,
    target: State,
    *,
    step: int | None = None,
    data: DataIterator | None = None,
    **options: Unpack[RestoreOptions],
  ) -> ResumedState[State]: ...
  def restore(
    self,
    target: Any = None,
    *,
    step: int | None = None,
    data: DataIterator | None = None,
    changes: Changes = NO_CHANGES,
    **options: Any,
  ) -> ResumedState:
    """Restores a checkpoint of this run.

    Args:
      target: state to restore into, see `restore`; default: from the record, under the manager's layout.
      step: step to restore; default: the newest. If that is damaged, it is renamed with a warning, and
        the checkpoint before it is restored.
      data: iterator, or its `prefetch`, to move to its saved position.
      changes: differences between checkpoint and target to allow.
      **options: other arguments of `restore`.

    Raises:
      CheckpointNotFoundError: there are no checkpoints, or none of this step.
      CheckpointError: see `restore`.
      LayoutError: the target is a plan of another layout.
    """
    self._check_layout(target)
    self.wait()
    steps = self.steps if step is None else [step]
    if not steps:
      raise CheckpointNotFoundError(
        f'There are no checkpoints in {self.root} yet.\nFix: call resume, which creates a state if there are none.'
      )
    options = {'memory': self._memory, 'show': self._show} | options
    if target is None and not options.keys() & {'mesh', 'rules'}:
      options.setdefault('layout', self.layout)
    for number in reversed(steps):
      path = self.root / str(number)
      try:
        state = restore(path, target, changes=changes, **options)
      except (CheckpointDamagedError, CheckpointNotFoundError) as error:
        if number == steps[0]:
          raise
        aside = self._set_aside(number)
        warnings.warn(
          f'{error}\nIt is kept as {aside.name}; restoring the checkpoint before it.', stacklevel=2
        )
        continue
      if data is not None:
        _set_data(path, data)
      return ResumedState(number, state)
    raise AssertionError  # the last step returns or raises

  def _set_aside(self, step: int) -> epath.Path:
    """Renames a damaged step, so that training can save it again."""
    path = self.root / str(step)
    aside = self.root / f'.{step}.damaged'
    if jax.process_index() == 0:
      if aside.exists():
        aside.rmtree()
      path.rename(aside)
    if jax.process_count() > 1:
      async_save.from_first({})
    self._checkpointer.reload()
    return aside

  def wait(self) -> None:
    """Waits for the save in progress; raises its error."""
    async_save.finish()

  def close(self) -> None:
    """Waits for the save in progress, and releases the folder."""
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


def _no_check() -> None:
  pass


def _hold(root: epath.Path) -> filelock.BaseFileLock | None:
  """Takes the lock of the folder, in the first process; None in the others."""
  lock, message = None, {}
  if jax.process_index() == 0 and not is_remote(root):
    root.mkdir(parents=True, exist_ok=True)
    try:
      lock = locked(root / 'steps')
    except CheckpointBusyError:
      message = {'busy': True}
  received = async_save.from_first(message) if jax.process_count() > 1 else message
  if received.get('busy'):
    raise CheckpointBusyError(
      f'Another manager has {root} open.\nFix: close it, wait for the other job, or use another folder.'
    )
  return lock


class _Preemption:
  """Detects preemption.

  A single process catches SIGTERM. In a job of several processes, JAX does, and makes all of them agree
  on the step.

  Attributes:
    saved: whether a state was saved after the signal.
  """

  def __init__(self) -> None:
    self.saved = False
    self._signalled = False
    self._before: Any = None
    if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
      self._before = signal.signal(signal.SIGTERM, self._on_signal)

  def _on_signal(self, number: int, frame: Any) -> None:
    self._signalled = True

  def reached(self, step: int) -> bool:
    """Whether to save this step and stop. Every process calls this at every step."""
    if jax.process_count() == 1:
      return self._signalled
    try:
      return multihost_utils.reached_preemption_sync_point(step)
    except RuntimeError:  # the service is switched off
      return False

  def close(self) -> None:
    """Restores the previous handler of SIGTERM."""
    if self._before is not None:
      signal.signal(signal.SIGTERM, self._before)
      self._before = None


# -- data iterators


def _data_metadata(data: DataIterator | None) -> dict[str, Any]:
  """The position of each process's iterator, as custom metadata."""
  if data is None:
    return {}
  text = _to_text(reader_of(data).get_state())
  if jax.process_count() == 1:
    return {_DATA: [text]}
  groups = exchange('data', tuple(range(jax.process_count())), text, CALLS, TIMEOUT)
  by_process = {process: text for processes, text in groups for process in processes}
  return {_DATA: [by_process[process] for process in sorted(by_process)]}


def _to_text(state: Any) -> str:
  if isinstance(state, bytes):
    return json.dumps({'bytes': base64.b64encode(state).decode()})
  try:
    return json.dumps({'json': state})
  except TypeError as error:
    raise CheckpointError(
      f'The state of the data iterator cannot be saved: {error}.\n'
      'Fix: let get_state return bytes or a JSON value.'
    ) from error


def _set_data(path: epath.Path, data: DataIterator) -> None:
  saved = custom_metadata(path).get(_DATA)
  if saved is None:
    raise CheckpointError(
      f'Checkpoint {path} has no position of a data iterator.\n'
      'Fix: pass data= to every save; or leave it out here, and set the iterator yourself.'
    )
  if len(saved) != jax.process_count():
    raise CheckpointError(
      f'The number of processes differs: checkpoint {path} has data iterator positions for {len(saved)}, '
      f'this job has {jax.process_count()}.\n'
      'Fix: leave data= out, and set the iterators yourself: each reads another part of the data now.'
    )
  state = json.loads(saved[jax.process_index()])
  reader_of(data).set_state(base64.b64decode(state['bytes']) if 'bytes' in state else state['json'])
