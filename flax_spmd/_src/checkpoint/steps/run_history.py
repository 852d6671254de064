"""Run history: the steps of a run as its policies see them, while the writer saves and removes steps.

The policies see the step that is being saved as one that is there, and those that it replaces as gone.
Orbax's do, too. If the save fails, the history is listed again.
"""

from __future__ import annotations

from orbax.checkpoint import v1 as ocp

from flax_spmd._src.checkpoint.steps.step_folder import StepFolder
from flax_spmd._src.checkpoint.storage.async_save import AsyncSave, in_first


class RunHistory:
  """The history of a run; every process has it, and calls each method.

  Args:
    folder: folder of the run.
  """

  def __init__(self, folder: StepFolder):
    self._folder = folder
    self._saving: AsyncSave | None = None
    self._steps: list[ocp.training.CheckpointMetadata] | None = None

  @property
  def steps(self) -> list[ocp.training.CheckpointMetadata]:
    """The complete steps and the one being saved, without those that it replaces."""
    if self._steps is None:
      listed = in_first(self._folder.history)
      self._steps = [self._folder.described(*entry) for entry in listed]
    return self._steps

  @property
  def is_saving(self) -> bool:
    """Whether a step is being saved now."""
    return self._saving is not None and not self._saving.done()

  def begin(self, saving: AsyncSave, steps: list[ocp.training.CheckpointMetadata]) -> None:
    """Records a save in progress, and the steps that are there once it is complete."""
    self._saving, self._steps = saving, steps

  def settle(self) -> None:
    """Records the end of the save in progress, whose error has been raised already."""
    saving, self._saving = self._saving, None
    if saving is not None and saving.error() is not None:
      self.forget()

  def forget(self) -> None:
    """Lists the steps again when they are needed."""
    self._steps = None
