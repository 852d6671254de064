"""`flax-spmd explain | compare | report | targets`: compare layout files for hardware you don't have.

A model is given as `module:function`. The function returns the training step, the function that creates a state,
and a batch, or an `explore.TrainStep`. It has no arguments; for a model that holds a mesh, it has one, the layout.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flax_spmd.cli.devices import emulate, on_cpus
from flax_spmd.errors import FlaxSpmdError, MeshError, RulesError

if TYPE_CHECKING:
  from flax_spmd._src.compare.train_step import TrainStep, TrainStepLike
  from flax_spmd._src.layout import Layout


def add_to(commands: Any) -> None:
  """Adds the commands to a parser."""
  explain = _add(commands, 'explain', _explain, 'explain the sharding of every array under a layout')
  explain.add_argument('layout', help='layout file (TOML)')
  explain.add_argument('--json', action='store_true', help='print the explanation as JSON')
  explain.add_argument(
    '--devices', type=int, metavar='N', help='number of devices, for a layout with an axis of size -1'
  )
  _add_limits(explain)
  compare = _add(
    commands, 'compare', _compare, "compile a model under several layouts for hardware you don't have"
  )
  compare.add_argument('layouts', nargs='+', help='layout files (TOML)')
  compare.add_argument('--json', action='store_true', help='print the comparison as JSON')
  report = _add(commands, 'report', _report, 'compare layouts and write an HTML report')
  report.add_argument('layouts', nargs='+', help='layout files (TOML)')
  report.add_argument(
    '--to',
    type=new_file,
    default='report.html',
    metavar='HTML',
    help='path of the report (default report.html)',
  )
  for parser in (compare, report):
    parser.add_argument(
      '--target',
      required=True,
      help="hardware to compile for: 'h100:64', 'v5e:16x16', '2xv5e:16x16' (slices), 'cpu:8'; see flax-spmd targets",
    )
    parser.add_argument('--hardware', metavar='TOML', help='file that describes additional chips')
    _add_limits(parser)
  targets = commands.add_parser('targets', help='list known hardware and installed compilers')
  targets.set_defaults(run=_targets)


def _add(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
  parser = commands.add_parser(name, help=text, description=f'{text[0].upper()}{text[1:]}.')
  parser.add_argument(
    'model',
    type=reference,
    metavar='MODULE:FUNCTION',
    help='function that returns an explore.TrainStep, or its fields: step, state-creating function, batch; it may '
    'take the layout',
  )
  parser.set_defaults(run=run)
  return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    '--fail-if-over',
    type=size,
    metavar='SIZE',
    help='exit with code 1 if a device needs more memory than this, such as 14GiB',
  )
  parser.add_argument(
    '--fail-if-replicated',
    nargs=2,
    action=_PathsAndSize,
    default=[],
    metavar=('REGEX', 'SIZE'),
    help='exit with code 1 if an array is replicated, its path matches REGEX, and it is larger than SIZE',
  )


class _PathsAndSize(argparse.Action):
  """Appends a search for paths, and a size in bytes."""

  def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
    from flax_spmd._src.rules.path_patterns import problem_of, searcher

    problem = problem_of('REGEX', values[0])
    if problem is not None:
      raise argparse.ArgumentError(self, problem.text)
    try:
      limit = size(values[1])
    except argparse.ArgumentTypeError as error:
      raise argparse.ArgumentError(self, str(error)) from error
    setattr(namespace, self.dest, [*getattr(namespace, self.dest), (searcher(values[0]), limit)])


def reference(text: str) -> tuple[str, str]:
  """Parses the reference to a model, `module:function`."""
  module, colon, function = text.partition(':')
  if not (module and colon and function):
    raise argparse.ArgumentTypeError(f'{text!r} is not of the form module:function')
  return module, function


def size(text: str) -> int:
  """Parses a size such as `14GiB` as bytes, for `argparse`.

  Example:
    >>> size('14GiB'), size('100')
    (15032385536, 100)
  """
  from flax_spmd._src.text import parse_size

  try:
    return parse_size(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(str(error)) from error


def new_file(text: str) -> str:
  """Checks that a file can be written, before anything takes time, for `argparse`."""
  folder = Path(text).parent
  if Path(text).is_dir() or not text:
    raise argparse.ArgumentTypeError(f'{text!r} is a folder, not a file')
  if not folder.is_dir():
    raise argparse.ArgumentTypeError(f'{text!r} cannot be written: there is no folder {str(folder)!r}')
  if not os.access(text if Path(text).exists() else folder, os.W_OK):
    raise argparse.ArgumentTypeError(f'{text!r} cannot be written: no permission')
  return text


def model_of(reference: tuple[str, str]) -> TrainStepLike:
  """The user's training step, or one that a function returns; the function if it takes the layout."""
  on_cpus()
  emulate(8)
  sys.path.insert(0, os.getcwd())
  name = ':'.join(reference)
  try:
    module = importlib.import_module(reference[0])
  except ModuleNotFoundError as error:
    if error.name != reference[0]:
      raise  # the model's own
    raise FlaxSpmdError(_NOT_FOUND.format(name, error)) from error
  try:
    found = getattr(module, reference[1])
  except AttributeError as error:
    raise FlaxSpmdError(_NOT_FOUND.format(name, error)) from error
  if not callable(found):
    return _train_step(f'{name} is', found)
  if not _has_an_argument(found):
    return _train_step(f'{name} returned', found())

  @functools.wraps(found)
  def train_step_of(layout: Layout, **choices: Any) -> TrainStep:
    signature = inspect.signature(found)
    try:
      signature.bind(layout, **choices)
    except TypeError as error:
      raise FlaxSpmdError(
        f'{name}{signature} is called with {", ".join(["a layout", *choices])}: {error}.\n'
        'Fix: name an explore.TrainStep, or a function, of a layout if need be, that returns one.'
      ) from error
    return _train_step(f'{name} returned', found(layout, **choices))

  return cast('TrainStepLike', train_step_of)


_NOT_FOUND = (
  '{} cannot be imported: {}.\nFix: correct the name, or run the command in the folder of the module.'
)


def _has_an_argument(function: Any) -> bool:
  """Whether a function cannot be called without arguments: it takes the layout."""
  parameters = inspect.signature(function).parameters.values()
  positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
  return any(one.kind in positional and one.default is inspect.Parameter.empty for one in parameters)


def _train_step(subject: str, result: Any) -> TrainStep:
  """A user's training step, of its fields or as it is; `subject` begins each error, as in 'train:step returned'."""
  from flax_spmd._src.compare.train_step import TrainStep, check_train_step

  if not (isinstance(result, tuple) and 3 <= len(result) <= len(TrainStep._fields)):
    raise FlaxSpmdError(
      f'{subject} {type(result).__name__}, not a training step.\n'
      'Fix: name an explore.TrainStep, or a function that returns one or its fields, (step, create, batch).'
    )
  found = TrainStep(*result)
  wrong = [
    f'{name} is {type(getattr(found, name)).__name__}'
    for name in ('step', 'create')
    if not callable(getattr(found, name))
  ]
  if wrong:
    raise FlaxSpmdError(
      f'{subject} a training step whose {" and ".join(wrong)}, not a function.\n'
      'Fix: return (step, create, batch), where create() returns the state, and step(state, batch) the next one.'
    )
  try:
    check_train_step(found, 'compare')
  except TypeError as error:
    raise FlaxSpmdError(f'{subject} a training step that cannot be called.\n{error}') from error
  return found


def _layout(file: str, devices: int | None) -> Layout:
  """Reads a layout file, for a mesh without devices."""
  from flax_spmd._src.layout import Layout
  from flax_spmd._src.mesh import abstract_mesh
  from flax_spmd._src.rules import toml_format

  try:
    parsed = toml_format.read(Path(file).read_text())
    if devices is None and -1 in parsed.axes.values():
      raise MeshError(
        f'A mesh axis has size -1: {parsed.axes}.\nFix: pass the number of devices as --devices.'
      )
    mesh = abstract_mesh(parsed.axes, devices=devices, axis_types=parsed.types)
    return Layout(mesh, parsed.rules, strict=parsed.strict)
  except (OSError, UnicodeDecodeError) as error:
    reason = error.strerror if isinstance(error, OSError) else error
    raise FlaxSpmdError(f'{file} cannot be read: {reason}.\nFix: pass a layout file (TOML).') from error
  except (MeshError, RulesError) as error:
    raise type(error)(f'{file}: {error}') from error


def _explain(options: argparse.Namespace) -> int:
  from flax_spmd._src.compare.train_step import train_step_on
  from flax_spmd._src.compat import target_devices
  from flax_spmd._src.explanation import explain

  model, layout = model_of(options.model), _layout(options.layout, options.devices)
  with target_devices('cpu'):  # of any platform: the state is the same
    train_step = train_step_on(layout, model)
    state = layout.abstract(train_step.create, *train_step.args)
  explanation = explain(layout, state)
  print(explanation.to_json() if options.json else explanation)
  over = (
    [] if options.fail_if_over is None else _over(options, options.layout, explanation.bytes_per_device)
  )
  return _fail([*over, *_replicated(options, options.layout, explanation.rows)])


def _compare(options: argparse.Namespace) -> int:
  comparison = _comparison(options)
  print(comparison.to_json() if options.json else comparison)
  return _exit_code(options, comparison)


def _report(options: argparse.Namespace) -> int:
  comparison = _comparison(options)
  comparison.to_html(options.to)
  print(f'Wrote {options.to}')
  return _exit_code(options, comparison)


def _comparison(options: argparse.Namespace) -> Any:
  from flax_spmd.explore import compare, parse_target

  devices = parse_target(options.target, options.hardware).devices
  stems = [Path(file).stem for file in options.layouts]
  names = stems if len(set(stems)) == len(stems) else options.layouts
  layouts = {name: _layout(file, devices) for name, file in zip(names, options.layouts, strict=True)}
  train_step = model_of(options.model)
  return compare(
    train_step, layouts, options.target, hardware=options.hardware, show=sys.stderr.isatty()
  )


def _exit_code(options: argparse.Namespace, comparison: Any) -> int:
  """1 if a layout exceeds a limit or fails, else 0."""
  failures: list[str] = []
  for outcome in comparison:
    if outcome.error:
      failures.append(f'{outcome.name}: {outcome.error.splitlines()[0]}')
    if outcome.memory and options.fail_if_over is not None:
      failures += _over(options, outcome.name, outcome.memory.peak)
    if outcome.program:
      failures += _replicated(options, outcome.name, outcome.program.rows)
  return _fail(failures)


def _over(options: argparse.Namespace, name: str, needed: int) -> list[str]:
  from flax_spmd._src.text import size_text

  limit = options.fail_if_over
  return (
    [f'{name}: {size_text(needed)} per device, the limit is {size_text(limit)}']
    if needed > limit
    else []
  )


def _replicated(options: argparse.Namespace, name: str, rows: Any) -> list[str]:
  from flax_spmd._src.text import size_text

  return [
    f'{name}: {row.path} ({size_text(row.bytes)}) is replicated'
    for search, limit in options.fail_if_replicated
    for row in rows
    if search(row.path) and row.bytes_per_device == row.bytes > limit
  ]


def _fail(failures: list[str]) -> int:
  for line in failures:
    print(f'FAILED {line}', file=sys.stderr)
  return 1 if failures else 0


def _targets(options: argparse.Namespace) -> int:
  from flax_spmd._src.compare.compilation import check_compiler
  from flax_spmd._src.compare.hardware import Target, chips
  from flax_spmd._src.text import size_text
  from flax_spmd.errors import TargetDeviceError

  for name, chip in chips().items():
    example = Target(f'{name}:{"x".join(["4"] * chip.torus) or 8}', chip, (4,) * chip.torus or (1, 8))
    try:
      check_compiler(example)
      compiler = 'compiler installed'
    except TargetDeviceError as error:
      compiler = str(error).splitlines()[-1].removeprefix('Fix: ')
    flops = ', '.join(f'{dtype} {value:.3g}' for dtype, value in chip.flops.items())
    print(
      f"'{example.text}'  {size_text(chip.memory)}, {chip.bandwidth:.3g} B/s, FLOP/s {flops}; {compiler}"
    )
    print(f'    {chip.source}')
  return 0
