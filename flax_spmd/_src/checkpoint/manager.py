"""The manager: saves a training run's checkpoints at intervals, and resumes the run from the newest one.

    with checkpoint.Manager(root, layout, every=500, keep=3) as manager:
      start, state = manager.resume(create_state, key, x, data=batches)
      for step in range(start, steps):
        state = train_step(state, next(batches))
        manager.save(step + 1, state, data=batches)
        if manager.preempted:
          break

Each step is a checkpoint as `save` writes it, in the folder `<root>/<step>`. Orbax's policies decide which
steps are saved and kept.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, Self, Unpack, overload

from flax_spmd._src.checkpoint.matching.allowed_changes import NO_CHANGES, Changes
from flax_spmd._src.checkpoint.restore import RestoreRequest, restore_with
from flax_spmd._src.checkpoint.restore_options import RecordRestoreOptions, RestoreOptions
from flax_spmd._src.checkpoint.save import SaveRequest, start_save
from flax_spmd._src.checkpoint.steps import data_positions
from flax_spmd._src.checkpoint.steps.data_positions import DataIterator, MergedPositions
from flax_spmd._src.checkpoint.steps.preemption import Preemption
from flax_spmd._src.checkpoint.steps.root_writer import RootWriter
from flax_spmd._src.checkpoint.steps.run_history import RunHistory
from flax_spmd._src.checkpoint.steps.step_folder import (
  StepFolder,
  checked_step,
  metrics_metadata,
  metrics_of,
)
from flax_spmd._src.checkpoint.steps.step_follower import StepFollower
from flax_spmd._src.checkpoint.steps.step_policies import History, StepPolicies
from flax_spmd._src.checkpoint.storage import async_save
from flax_spmd._src.checkpoint.storage.async_save import in_first
from flax_spmd._src.checkpoint.storage.contents import check_bytes, check_is_layout
from flax_spmd._src.checkpoint.storage.recognition import metadata_of
from flax_spmd._src.checkpoint.storage.store import as_path
from flax_spmd._src.joint_call import first_line
from flax_spmd._src.layout import Layout
from flax_spmd._src.multihost import joint
from flax_spmd._src.public import public
from flax_spmd._src.source_lines import warn
from flax_spmd._src.state_plan import Plan, State
from flax_spmd._src.text import value_text
from flax_spmd.errors import (
  CheckpointBusyError,
  CheckpointDamagedError,
  CheckpointError,
  CheckpointExistsError,
  CheckpointNotFoundError,
  LayoutError,
)


@public('flax_spmd.checkpoint')
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


@public('flax_spmd.checkpoint')
class Manager:
  """Manages the checkpoints of one training run, in the folders `<root>/<step>`.

  In a job of several processes, every process makes a manager, and calls it in the same way.

  Args:
    root: folder for this run alone; created if needed. One manager writes to it; others may read.
    layout: layout of the states, or their plan; see `save`. `resume` makes a plan, too.
    every: number of steps between checkpoints: steps divisible by it are saved. Or a policy of
      `orbax.checkpoint.v1.training.save_decision_policies`.
    keep: number of checkpoints to keep, the newest ones. Or a policy of
      `orbax.checkpoint.v1.training.preservation_policies`. A step is removed once the new one is complete.
    read_only: whether the manager only restores and follows, beside the one that saves. A root that cannot
      be written to, on a read-only file system or of another user, is opened like this in any case.
    compress, memory, durable, show: see `save`.

  Attributes:
    root: folder of the run.
    layout: layout of the states.
    read_only: whether `save` is refused.

  Raises:
    CheckpointBusyError: another manager writes to the folder.
    CheckpointError: an argument is invalid, or the folder cannot be created.

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
    read_only: bool = False,
    compress: bool = False,
    memory: int | None = None,
    durable: bool = True,
    show: bool = False,
  ):
    self.root = as_path(root)
    check_is_layout(layout)
    check_bytes(memory=memory)
    self._plan = layout if isinstance(layout, Plan) else None
    self.layout = layout.layout if isinstance(layout, Plan) else layout
    self._policies = StepPolicies(every, keep)
    self._request = SaveRequest(compress=compress, memory=memory, durable=durable, show=show)
    self._closed = threading.Event()
    self._folder = StepFolder(self.root)
    self._history = RunHistory(self._folder)
    self._in_use: list[int] = []
    self._writer = None if read_only else RootWriter(self.root)
    self._obstacle = (
      'it was opened with read_only=True' if self._writer is None else self._writer.obstacle
    )
    self.read_only = bool(self._obstacle)
    self._preemption: Preemption | None = None
    if not self.read_only:
      self._begin_writing()

  def _begin_writing(self) -> None:
    try:
      in_first(self._folder.tidy)
      self._preemption = Preemption()
    except BaseException:
      if self._writer is not None:
        self._writer.release()
      raise

  @property
  def steps(self) -> list[int]:
    """The complete steps in the folder now, oldest first. In a job of several processes, `wait` comes first."""
    return self._folder.steps()

  @property
  def preempted(self) -> bool:
    """Whether the job was preempted (SIGTERM). The state of the last `save` has then been saved."""
    return self._preemption is not None and self._preemption.saved

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
      CheckpointError: see `save`; or `step` is no number of steps; or an earlier save has failed.
    """
    preemption, step = self._checked_preemption(), checked_step(step)
    is_preempted = preemption.reached(step)
    is_new = all(step != saved.step for saved in self._history.steps)
    is_saved = is_new and (force or is_preempted or self._is_due(step, is_preempted))
    if is_saved:
      self._start(step, state, data_positions.position_of(data), metrics_metadata(metrics))
    if is_preempted:
      self.wait()
      preemption.saved = True
    return is_saved

  def _checked_preemption(self) -> Preemption:
    """The detector of preemption, which only a manager that can save has."""
    if self._closed.is_set():
      raise CheckpointError(
        f'The manager of {self.root} is closed.\nFix: save before its with-block ends.'
      )
    if self._preemption is None:
      raise CheckpointError(
        f'The manager of {self.root} cannot save: {self._obstacle}.\n'
        'Fix: save with the manager of the training job, or to a folder that this job can write to.'
      )
    return self._preemption

  def _is_due(self, step: int, is_preempted: bool) -> bool:
    return self._policies.is_due(
      self._folder.described(step, time.time_ns(), None),
      self._history.steps,
      is_saving=self._history.is_saving,
      is_preempted=is_preempted,
    )

  def _start(self, step: int, state: Any, position: str | None, metrics: dict[str, Any]) -> None:
    """Starts the save of a step. It ends with the removal of the steps that it replaces."""
    with joint('step', f'The save of step {step} to {self.root}'):
      self._start_jointly(step, state, position, metrics)

  def _start_jointly(self, step: int, state: Any, position: str | None, metrics: dict[str, Any]) -> None:
    self.wait()
    steps = [*self._history.steps, self._folder.described(step, time.time_ns(), metrics_of(metrics))]
    kept: list[int] = []

    def before() -> dict[str, Any]:
      kept.extend(in_first(lambda: self._kept(steps)))
      return data_positions.positions_metadata(position, self.layout) | metrics

    try:
      saving = start_save(
        self._folder.path(step),
        state,
        self._layout_or_plan(state),
        self._request,
        overwrite=step in self._folder.damaged,
        before=before,
        after=lambda: self._remove(step, [old.step for old in steps if old.step not in kept]),
      )
    except CheckpointExistsError:  # saved by a manager that has taken over
      in_first(self._check_writer)
      raise
    self._folder.damaged.discard(step)
    self._history.begin(saving, [saved for saved in steps if saved.step in kept])

  def _kept(self, steps: History) -> list[int]:
    """The steps to keep; raises an error if another manager has taken the folder over."""
    self._check_writer()
    there = {*self._folder.names(), steps[-1].step}  # someone may have removed others
    return [step.step for step in self._policies.kept([old for old in steps if old.step in there])]

  def _check_writer(self) -> None:
    if self._writer is not None:
      self._writer.check()

  def _remove(self, saved: int, steps: list[int]) -> None:
    """Removes steps in the first process. Those that readers are using are removed after a later save."""
    self._check_writer()
    in_use = []
    for step in dict.fromkeys([*self._in_use, *steps]):
      try:
        if not self._folder.remove(step, self._check_writer):
          in_use.append(step)
      except CheckpointBusyError:
        raise
      except (OSError, CheckpointError) as error:
        raise CheckpointError(
          f'Step {saved} of {self.root} is saved, but step {step} cannot be removed: {first_line(error)}.\n'
          'Fix: remove it yourself, or make the folder writable; the next save tries again.'
        ) from error
    self._in_use = in_use

  def resume(
    self,
    fn: Callable[..., State] | Plan[State],
    *args: Any,
    data: DataIterator | None = None,
    data_from: MergedPositions | None = None,
    boxed: bool = True,
    **kwargs: Any,
  ) -> ResumedState[State]:
    """Restores the newest undamaged checkpoint, or creates a new state if there are no checkpoints.

    Args:
      fn: function that creates a state, or its plan; see `layout.plan`.
      *args, **kwargs, boxed: see `layout.plan`.
      data: iterator, or its `prefetch`, to move to its saved position.
      data_from: see `restore`.

    Returns:
      The number of completed steps, 0 for a new state, and the state.

    Warns:
      UserWarning: there are no steps, but checkpoints whose names end with a number: `ckpt_3` or `00000003` of Orbax.

    Raises:
      CheckpointError: see `restore`; or all checkpoints are damaged.
      LayoutError: the plan is one of another layout.
    """
    plan = fn if isinstance(fn, Plan) else self.layout.plan(fn, *args, boxed=boxed, **kwargs)
    self._check_layout(plan)
    self._plan = plan
    with joint('resume', f'The restore from {self.root}'):
      self.wait()
      is_new = not in_first(self._folder.steps)
      unread = in_first(self._folder.unread) if is_new else ''
    if unread:
      warn(unread)
    return ResumedState(0, plan.init()) if is_new else self.restore(plan, data=data, data_from=data_from)

  def _layout_or_plan(self, state: Any) -> Layout | Plan:
    """The plan of this run, if this is its state."""
    return self._plan if self._plan is not None and self._plan.fits(state) else self.layout

  def _check_layout(self, target: Any) -> None:
    if isinstance(target, Plan) and target.layout != self.layout:
      raise LayoutError(
        f'The plan is one of {value_text(target.layout)}, but the manager has {value_text(self.layout)}.\n'
        'Fix: plan the state with the layout of the manager.'
      )

  @overload
  def restore(
    self,
    target: None = None,
    *,
    step: int | None = None,
    data: DataIterator | None = None,
    data_from: MergedPositions | None = None,
    **options: Unpack[RecordRestoreOptions],
  ) -> ResumedState[Any]: ...
  @overload
  def restore(
    self,
    target: Plan[State],
    *,
    step: int | None = None,
    data: DataIterator | None = None,
    data_from: MergedPositions | None = None,
    **options: Unpack[RestoreOptions],
  ) -> ResumedState[State]: ...
  @overload
  def restore(
    self,
    target: State,
    *,
    step: int | None = None,
    data: DataIterator | None = None,
    data_from: MergedPositions | None = None,
    **options: Unpack[RestoreOptions],
  ) -> ResumedState[State]: ...
  def restore(
    self,
    target: Any = None,
    *,
    step: int | None = None,
    data: DataIterator | None = None,
    data_from: MergedPositions | None = None,
    changes: Changes = NO_CHANGES,
    **options: Any,
  ) -> ResumedState:
    """Restores a checkpoint of this run.

    Args:
      target: state to restore into, see `restore`; default: from the record, under the manager's layout.
      step: step to restore; default: the newest. If that is damaged, it is renamed with a warning, and
        the checkpoint before it is restored.
      data: iterator, or its `prefetch`, to move to its saved position: that of a process that read the rows of this
        one, by the rule of 'batch'. Without such a rule, rows are the same if mesh and devices are.
      data_from: function from the list of positions of all processes that saved to the position of this process;
        called only if none of them read its rows, as in a job of another number of processes.
      changes: differences between checkpoint and target to allow.
      **options: other arguments of `restore`.

    Raises:
      CheckpointNotFoundError: there are no checkpoints, or none of this step.
      CheckpointError: see `restore`.
      LayoutError: the target is a plan of another layout.
    """
    with joint('restored step', f'The restore from {self.root}'):
      self._check_layout(target)
      self.wait()
      if target is None and not options.keys() & {'mesh', 'rules'}:
        options.setdefault('layout', self.layout)
      own = {'memory': self._request.memory, 'show': self._request.show, 'changes': changes}
      request = RestoreRequest(**own | options)
      if step is not None:
        return self._restored(checked_step(step), target, (data, data_from), request)
      failed: list[int] = []
      while True:
        untried = [number for number in in_first(self._folder.steps) if number not in failed]
        if not untried:
          raise CheckpointNotFoundError(
            f'There are no checkpoints in {self.root} yet.\nFix: call resume, which creates a state if there are none.'
          )
        try:
          return self._restored(untried[-1], target, (data, data_from), request)
        except (CheckpointDamagedError, CheckpointNotFoundError) as error:
          failed.append(untried[-1])
          self._skip(untried[-1], error, failed)

  def _restored(
    self,
    step: int,
    target: Any,
    moved: tuple[DataIterator | None, MergedPositions | None],
    request: RestoreRequest,
  ) -> ResumedState[Any]:
    data, data_from = moved
    path = self._folder.path(step)
    if in_first(lambda: self._folder.is_unchecked(step)):
      warn(
        f'{path} has no record of names and checksums: an old version of Orbax wrote it, or the record is lost. '
        'It is restored unverified.'
      )
    try:
      state, stored = restore_with(
        lambda source: {} if data is None else metadata_of(path, source), path, target, request
      )
    except CheckpointDamagedError as error:
      if step in in_first(self._folder.steps):
        raise
      raise CheckpointNotFoundError(
        f'Step {step} of {self.root} was removed while it was being restored.\nFix: restore a newer one.'
      ) from error
    if data is not None:
      data_positions.move(data, stored, path, data_from, self.layout)
    return ResumedState(step, state)

  def _skip(self, step: int, error: CheckpointError, failed: list[int]) -> None:
    """Continues without a step that cannot be restored; raises its error if there are no others."""
    steps = in_first(self._folder.steps)
    if all(number in failed for number in steps):
      raise error
    if step not in steps:  # its writer has removed it
      return
    aside = '' if self.read_only else in_first(lambda: self._set_aside(step))
    if not self.read_only and not aside:
      self._folder.damaged.add(step)
    self._history.forget()
    fate = f'kept as {aside}' if aside else 'skipped'
    warn(f'{error}\nIt is {fate}; restoring the checkpoint before it.')

  def _set_aside(self, step: int) -> str:
    self._check_writer()
    return self._folder.set_aside(step)

  def follow(
    self, *, after: int = -1, timeout: float | None = None, every: float = 5.0
  ) -> Iterator[int]:
    """Yields the steps of a run as they become complete, for example to evaluate them while it continues.

    Another process, on this machine or another one, may write them. The newest step always comes next; the
    older ones that were missed meanwhile follow, newest first, unless they have been removed. A step may be
    removed before it is restored: `restore` then raises CheckpointNotFoundError.

    Args:
      after: only steps after this one; default: those that are there already, too.
      timeout: most seconds to wait for a step; default: until `close` is called in another thread. In a
        job of several processes, the first one's counts.
      every: seconds between two looks at the folder.

    Raises:
      CheckpointError: `every` is not positive.

    Example:
      >>> layout = Layout({'data': 8})
      >>> with checkpoint.Manager(tmp / 'followed', layout, every=1) as manager:
      ...   for step in (1, 2):
      ...     _ = manager.save(step, {'w': jnp.full(8, step)})
      >>> with checkpoint.Manager(tmp / 'followed', layout, read_only=True) as manager:
      ...   for step in manager.follow(timeout=0):
      ...     print(step, manager.restore(step=step).state['w'][0])
      2 2
      1 1
    """
    if every <= 0:
      raise CheckpointError(
        f'every={every} is not positive.\nFix: pass the seconds between two looks at the folder.'
      )
    return iter(StepFollower(self._folder, after, timeout, every, self._closed))

  def wait(self) -> None:
    """Waits for the save in progress; raises its error."""
    try:
      async_save.finish()
    finally:
      self._history.settle()

  def close(self) -> None:
    """Waits for the save in progress, ends `follow`, and lets another manager write to the folder."""
    self._closed.set()
    try:
      self.wait()
    finally:
      if self._preemption is not None:
        self._preemption.close()
      if self._writer is not None:
        self._writer.release()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()
