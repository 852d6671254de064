"""`flax-spmd explain | compare | report | targets`: layouts of a model, from files, without hardware.

A model is given as `module:function`; the function takes nothing and returns what is compared: the
training step, the function that makes a state, and a batch, or an `explore.TrainStep`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flax_spmd.cli.devices import emulate
from flax_spmd.errors import FlaxSpmdError, MeshError, RulesError

if TYPE_CHECKING:
  from flax_spmd._src.compare.train_step import TrainStep
  from flax_spmd._src.layout import Layout


def add_to(commands: Any) -> None:
  """Adds the commands to a parser."""
  explain = _add(commands, 'explain', _explain, 'why every array lies where it lies')
  explain.add_argument('layout', help='a TOML file')
  explain.add_argument('--json', action='store_true')
  explain.add_argument(
    '--devices', type=int, metavar='N', help='how many there are, if the file leaves a size open (-1)'
  )
  _add_limits(explain)
  compare = _add(
    commands, 'compare', _compare, 'compile under several layouts for hardware that is not here'
  )
  compare.add_argument('layouts', nargs='+', help='TOML files')
  compare.add_argument('--json', action='store_true')
  report = _add(commands, 'report', _report, 'compare, and write the page about it')
  report.add_argument('layouts', nargs='+', help='TOML files')
  report.add_argument(
    '--to', default='report.html', metavar='HTML', help='the file (default report.html)'
  )
  for parser in (compare, report):
    parser.add_argument('--target', required=True, help="'h100:64', 'v5e:16x16', 'cpu:8'; see targets")
    parser.add_argument('--hardware', metavar='TOML', help='a file with chips of your own')
    _add_limits(parser)
  targets = commands.add_parser(
    'targets', help='the hardware that is known, and which compilers are here'
  )
  targets.set_defaults(run=_targets)


def _add(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
  parser = commands.add_parser(name, help=text, description=f'{text[0].upper()}{text[1:]}.')
  parser.add_argument(
    'model', type=reference, metavar='MODULE:FUNCTION', help='returns step, create, batch'
  )
  parser.set_defaults(run=run)
  return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    '--fail-if-over', type=size, metavar='SIZE', help='exit with 1 if a device needs more, such as 14GiB'
  )
  parser.add_argument(
    '--fail-if-replicated',
    nargs=2,
    action='append',
    default=[],
    metavar=('REGEX', 'SIZE'),
    help='exit with 1 if an array of such a path and of more bytes lies whole on every device',
  )


def reference(text: str) -> tuple[str, str]:
  """A model, given as `module:function`."""
  module, colon, function = text.partition(':')
  if not (module and colon and function):
    raise argparse.ArgumentTypeError(f'{text!r} is not of the form module:function')
  return module, function


def size(text: str) -> int:
  """Bytes of `14GiB`, as an argument of a command.

  Example:
    >>> size('14GiB'), size('100')
    (15032385536, 100)
  """
  from flax_spmd._src.text import parse_size

  try:
    return parse_size(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(str(error)) from error


def model_of(reference: tuple[str, str]) -> TrainStep:
  """The training step that a user's function returns."""
  emulate(8)
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  sys.path.insert(0, os.getcwd())
  try:
    function = getattr(importlib.import_module(reference[0]), reference[1])
  except (ModuleNotFoundError, AttributeError) as error:
    if isinstance(error, ModuleNotFoundError) and error.name != reference[0]:
      raise  # the model's own
    raise FlaxSpmdError(
      f'There is no {":".join(reference)}: {error}.\nFix: run this where the module can be imported from.'
    ) from error
  from flax_spmd._src.compare.train_step import TrainStep

  result = function()
  if not (isinstance(result, tuple) and 3 <= len(result) <= len(TrainStep._fields)):
    raise FlaxSpmdError(
      f'{":".join(reference)} returned {type(result).__name__}, not a training step.\n'
      'Fix: return (step, create, batch), or an explore.TrainStep.'
    )
  return TrainStep(*result)


def _layout(file: str, devices: int | None) -> Layout:
  """The layout of a file, for devices that need not be here."""
  from flax_spmd._src.layout import Layout
  from flax_spmd._src.mesh import abstract_mesh
  from flax_spmd._src.rules import toml_format as toml

  try:
    parsed = toml.read(Path(file).read_text())
    if devices is None and -1 in parsed.axes.values():
      raise MeshError(
        f'The size of a mesh axis is left open: {parsed.axes}.\n'
        'Fix: say how many devices there are, with --devices.'
      )
    mesh = abstract_mesh(parsed.axes, devices=devices, axis_types=parsed.types)
  except OSError as error:
    raise FlaxSpmdError(
      f'{file} cannot be read: {error.strerror}.\nFix: pass a layout as TOML.'
    ) from error
  except (MeshError, RulesError) as error:
    raise type(error)(f'{file}: {error}') from error
  return Layout(mesh, parsed.rules)


def _explain(options: argparse.Namespace) -> int:
  from flax_spmd._src.explanation import explain

  train_step, layout = model_of(options.model), _layout(options.layout, options.devices)
  state = layout.abstract(train_step.create, *train_step.args)
  found = explain(layout, state)
  print(found.to_json() if options.json else found)
  rows = layout.rows(state)
  over = [] if options.fail_if_over is None else _over(options, options.layout, found.bytes_per_device)
  return _fail([*over, *_replicated(options, options.layout, rows)])


def _compare(options: argparse.Namespace) -> int:
  found = _compared(options)
  print(found.to_json() if options.json else found)
  return _verdict(options, found)


def _report(options: argparse.Namespace) -> int:
  found = _compared(options)
  found.to_html(options.to)
  print(f'written: {options.to}')
  return _verdict(options, found)


def _compared(options: argparse.Namespace) -> Any:
  from flax_spmd.explore import compare, parse_target

  devices = parse_target(options.target, options.hardware).devices
  layouts = {Path(file).stem: _layout(file, devices) for file in options.layouts}
  train_step = model_of(options.model)
  return compare(
    train_step, layouts, options.target, hardware=options.hardware, show=sys.stderr.isatty()
  )


def _verdict(options: argparse.Namespace, found: Any) -> int:
  """1 if a layout breaks a limit, or fails."""
  wrong: list[str] = []
  for outcome in found:
    if outcome.error:
      wrong.append(f'{outcome.name}: {outcome.error.splitlines()[0]}')
    if outcome.memory and options.fail_if_over is not None:
      wrong += _over(options, outcome.name, outcome.memory.peak)
    if outcome.program:
      wrong += _replicated(options, outcome.name, outcome.program.rows)
  return _fail(wrong)


def _over(options: argparse.Namespace, name: str, needed: int) -> list[str]:
  from flax_spmd._src.text import size_text

  limit = options.fail_if_over
  return (
    [f'{name}: {size_text(needed)} on a device, the limit is {size_text(limit)}']
    if needed > limit
    else []
  )


def _replicated(options: argparse.Namespace, name: str, rows: Any) -> list[str]:
  from flax_spmd._src.text import size_text

  return [
    f'{name}: {row.path} ({size_text(row.bytes)}) lies whole on every device'
    for pattern, limit in options.fail_if_replicated
    for row in rows
    if re.search(pattern, row.path) and row.bytes_per_device == row.bytes > size(limit)
  ]


def _fail(wrong: list[str]) -> int:
  for line in wrong:
    print(f'FAILED {line}', file=sys.stderr)
  return 1 if wrong else 0


def _targets(options: argparse.Namespace) -> int:
  from flax_spmd._src.compare.compilation import check_compiler
  from flax_spmd._src.compare.hardware import Target, chips
  from flax_spmd._src.text import size_text
  from flax_spmd.errors import TargetDeviceError

  for name, chip in chips().items():
    example = Target(f'{name}:{"x".join(["4"] * chip.torus) or 8}', chip, (4,) * chip.torus or (1, 8))
    try:
      check_compiler(example)
      here = 'compiler is here'
    except TargetDeviceError as error:
      here = str(error).splitlines()[-1].removeprefix('Fix: ')
    flops = ', '.join(f'{dtype} {value:.3g}' for dtype, value in chip.flops.items())
    print(
      f"'{example.text}'  {size_text(chip.memory)}, {chip.bandwidth:.3g} B/s, FLOP/s {flops}; {here}"
    )
    print(f'    {chip.source}')
  return 0
