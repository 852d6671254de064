"""Trackers: explanations and comparisons in the tools in which people follow their runs, by one call each.

    tracking.log_tensorboard(spmd.explain(layout, state), 'runs/1')
    tracking.log_wandb(explore.compare(train_step, layouts, 'h100:64'), run)

An optional wheel that is missing is an error with the extra that adds it.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from flax_spmd._src.public import public
from flax_spmd._src.tracking.report import Described, Report, report_of
from flax_spmd.errors import LayoutError


@public('flax_spmd.tracking')
def log_tensorboard(
  value: Described, writer: str | os.PathLike[str] | Any, step: int = 0, name: str = 'layout'
) -> None:
  """Logs the figures and the text of an explanation or a comparison to TensorBoard.

  Args:
    value: the result of `explain`, `layout.jit(f).explain(...)`, `explore.compare` or `explore.search`.
    writer: the folder of a run, which tensorboardX writes to; or the run's own writer: a `SummaryWriter` of PyTorch,
      tensorboardX or Flax, or a `MetricWriter` of CLU.
    step: the step of the run.
    name: the first part of the tags.

  Raises:
    LayoutError: `value` is something else, `writer` is neither, or a folder is given and tensorboardX is not installed.

  Example:
    >>> class Writer:  # such as torch.utils.tensorboard.SummaryWriter
    ...   def add_text(self, tag, text, step): print(tag, text.splitlines()[2][:42])
    ...   def add_scalar(self, tag, value, step): print(tag, value)
    >>> layout = Layout({'data': 8}, (('embed', 'data'),))
    >>> w = LogicallyPartitioned(jnp.ones((8, 16)), ('embed', None))
    >>> tracking.log_tensorboard(explain(layout, {'w': w}), Writer())
    layout ...
  """
  report = report_of(value)
  if not isinstance(writer, (str, os.PathLike)):
    _write(report, writer, step, name)
    return
  try:
    tensorboardx = importlib.import_module('tensorboardX')
  except ImportError:
    raise LayoutError(
      f"Writing to {os.fspath(writer)} for TensorBoard needs the package tensorboardX.\nFix: pip install 'flax-spmd[tensorboard]', "
      'or pass the writer of the run.'
    ) from None
  with tensorboardx.SummaryWriter(os.fspath(writer)) as own:
    _write(report, own, step, name)


def _write(report: Report, writer: Any, step: int, name: str) -> None:
  """Writes a report by the methods that a writer has."""
  text = f'```\n{report.text}\n```'  # Markdown
  figures = {f'{name}/{key}': number for key, number in report.figures.items()}
  if hasattr(writer, 'write_texts'):  # of CLU
    writer.write_texts(step, {name: text})
    writer.write_scalars(step, figures)
    return
  write_text, write_scalar = (
    next((getattr(writer, each) for each in names if hasattr(writer, each)), None)
    for names in (('add_text', 'text'), ('add_scalar', 'scalar'))
  )
  if write_text is None or write_scalar is None:
    raise LayoutError(
      f'A {type(writer).__name__} writes no text and scalars for TensorBoard: it has neither add_text and add_scalar, nor text '
      'and scalar, nor write_texts and write_scalars.\nFix: pass a folder, or a SummaryWriter or MetricWriter.'
    )
  write_text(name, text, step)
  for key, number in figures.items():
    write_scalar(key, number, step)


@public('flax_spmd.tracking')
def log_wandb(value: Described, run: Any = None, step: int | None = None, name: str = 'layout') -> None:
  """Logs an explanation or a comparison to Weights & Biases: a table, a page, and figures in the summary of the run.

  Args:
    value: the result of `explain`, `layout.jit(f).explain(...)`, `explore.compare` or `explore.search`.
    run: a run from `wandb.init`, online or offline. None: the current one.
    step: the step of the run. None: its next one.
    name: the first part of the keys: `layout/table`, `layout/page`, and `layout/...` for each figure.

  Raises:
    LayoutError: `value` is something else, wandb is not installed, or there is no run.

  Example:
    >>> tracking.log_wandb({'w': 1})
    Traceback (most recent call last):
    flax_spmd.errors.LayoutError: A dict has no report.
  """
  report = report_of(value)
  try:
    wandb = importlib.import_module('wandb')
  except ImportError:
    raise LayoutError(
      "Logging to Weights & Biases needs the package wandb.\nFix: pip install 'flax-spmd[wandb]'."
    ) from None
  run = wandb.run if run is None else run
  if run is None:
    raise LayoutError('There is no run of wandb to log to.\nFix: call wandb.init before, or pass run=.')
  columns = list(report.rows[0]) if report.rows else ['empty']
  cells = [[_cell(row[column]) for column in columns] for row in report.rows]
  run.log(
    {f'{name}/table': wandb.Table(columns=columns, data=cells), f'{name}/page': wandb.Html(report.html)},
    step=step,
  )
  run.summary.update({f'{name}/{key}': number for key, number in report.figures.items()})


def _cell(value: Any) -> Any:
  """A value of a table: a number, or text."""
  return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
