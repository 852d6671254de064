"""`flax-spmd search`: search for the best layout of a model, and write it as TOML."""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flax_spmd.cli.explore import model_of, new_file, reference

if TYPE_CHECKING:
  from flax_spmd.explore import SearchResult


def add_to(commands: Any) -> None:
  """Adds the command to a parser."""
  text = "search for the best layout on hardware you don't have"
  parser = commands.add_parser('search', help=text, description=f'{text[0].upper()}{text[1:]}.')
  parser.add_argument(
    'model',
    type=reference,
    metavar='MODULE:FUNCTION',
    help='function that returns an explore.TrainStep, or its fields: step, state-creating function, batch; it may '
    'take the layout',
  )
  parser.set_defaults(run=_search)
  parser.add_argument(
    '--target',
    required=True,
    help="hardware to search for: 'h100:64', 'v5e:16x16', '2xv5e:16x16' (slices), 'cpu:8'; see flax-spmd targets",
  )
  parser.add_argument(
    '--memory', metavar='SIZE', help='memory budget of a device, such as 60GiB (default: all of it)'
  )
  parser.add_argument('--hardware', metavar='TOML', help='file that describes additional chips')
  _add_constraints(parser)
  for name, default, text in (
    ('candidates', 1000, 'number of layouts to estimate'),
    ('top', 8, 'number of the best layouts to compile; 0 compiles nothing'),
    ('seed', 0, 'random seed'),
  ):
    parser.add_argument(
      f'--{name}', type=int, metavar='N', default=default, help=f'{text} (default {default})'
    )
  parser.add_argument(
    '--time-limit', type=float, metavar='SECONDS', help='time limit of the whole search'
  )
  parser.add_argument('--fresh', action='store_true', help='discard cached estimates')
  parser.add_argument('--out', type=new_file, metavar='TOML', help='write the best layout to this file')
  parser.add_argument('--html', type=new_file, metavar='HTML', help='write a report to this file')
  parser.add_argument('--json', action='store_true', help='print the result as JSON')


def _add_constraints(parser: argparse.ArgumentParser) -> None:
  repeated: dict[str, Any] = {'action': 'append', 'default': []}
  parser.add_argument(
    '--mesh',
    type=_mesh,
    metavar='AXIS=SIZE,...',
    help='fixed mesh; one size may be -1 (default: search every mesh)',
  )
  parser.add_argument(
    '--pin',
    type=_pair,
    metavar='NAME=AXIS,...',
    help='shard this logical name over these mesh axes; NAME= replicates it; may be repeated',
    **repeated,
  )
  parser.add_argument(
    '--forbid',
    type=_pair,
    metavar='NAME[=AXIS,...]',
    help='never shard this logical name, or never over these mesh axes; may be repeated',
    **repeated,
  )
  parser.add_argument(
    '--batch-only',
    metavar='AXIS',
    help='reserve this mesh axis for the batch; may be repeated',
    **repeated,
  )
  parser.add_argument(
    '--tensor',
    type=int,
    metavar='DEVICES',
    help='largest number of devices for tensor parallelism (default: the devices of one node)',
  )
  parser.add_argument(
    '--host',
    metavar='PATHS',
    help="arrays that may be in the host's memory, as a regular expression of their paths, such as ^opt_state/; may "
    'be repeated',
    **repeated,
  )
  parser.add_argument(
    '--choice',
    type=_pair,
    metavar='ARGUMENT=VALUE,...',
    help='values to try for an argument of the step; may be repeated',
    **repeated,
  )
  parser.add_argument(
    '--pipeline',
    type=_schedule,
    metavar='SCHEDULE',
    help="pipeline schedule to try, such as 'OneFOneB(ranks=4)', for a step that uses "
    'pipeline.accumulate; may be repeated',
    **repeated,
  )


def _schedule(text: str) -> Any:
  """A schedule, written as a Python call.

  Example:
    >>> _schedule('Interleaved1F1B(ranks=4, chunks=2)').stages
    8
  """
  from flax_spmd import pipeline
  from flax_spmd.errors import PipelineError

  known = [name for name, kind in vars(pipeline).items() if _is_schedule(kind, pipeline.Schedule)]
  try:
    call = ast.parse(text.strip(), mode='eval').body
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in known):
      raise ValueError(text)
    values = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    if len(values) < len(call.keywords):
      raise ValueError(text)
    return getattr(pipeline, call.func.id)(*map(ast.literal_eval, call.args), **values)
  except PipelineError as error:  # an invalid number of ranks or chunks; also a ValueError
    raise argparse.ArgumentTypeError(f'{text!r}: {error}') from error
  except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
    raise argparse.ArgumentTypeError(
      f'{text!r} is not a schedule such as OneFOneB(ranks=4); known schedules: '
      f'{", ".join(sorted(known))}'
    ) from error


def _is_schedule(kind: Any, base: type) -> bool:
  return isinstance(kind, type) and issubclass(kind, base) and kind is not base


def _pair(text: str) -> tuple[str, tuple[str, ...] | None]:
  """`name=a,b`; None for a name alone.

  Example:
    >>> _pair('batch=data,model'), _pair('norm')
    (('batch', ('data', 'model')), ('norm', None))
  """
  name, equals, values = text.partition('=')
  return name, tuple(filter(None, values.split(','))) if equals else None


def _mesh(text: str) -> dict[str, int]:
  try:
    return {name: int(size) for name, _, size in (part.partition('=') for part in text.split(','))}
  except ValueError as error:
    raise argparse.ArgumentTypeError(f'{text!r} is not a mesh such as data=8,model=8') from error


def _value(text: str) -> Any:
  """A number, True, False, None, or the text itself."""
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def _search(options: argparse.Namespace) -> int:
  from flax_spmd.errors import InfeasibleError
  from flax_spmd.explore import search

  try:
    result = search(
      model_of(options.model),
      options.target,
      memory=options.memory,
      choices={name: [*map(_value, values or ())] for name, values in options.choice},
      mesh=options.mesh,
      pin=dict(options.pin),
      forbid=dict(options.forbid),
      batch_only=options.batch_only,
      tensor=options.tensor,
      host=options.host,
      pipelines=options.pipeline,
      candidates=options.candidates,
      time_limit=options.time_limit,
      top=options.top,
      seed=options.seed,
      fresh=options.fresh,
      hardware=options.hardware,
      show=sys.stderr.isatty(),
    )
  except InfeasibleError as error:
    print(f'FAILED {error}', file=sys.stderr)
    return 1
  print(result.to_json() if options.json else result)
  _write(options, result)
  return 0


def _write(options: argparse.Namespace, result: SearchResult) -> None:
  """Writes the files of `--out` and `--html`."""
  if options.out:
    result.to_toml(Path(options.out))
  if options.html:
    result.to_html(Path(options.html))
  written = [file for file in (options.out, options.html) if file]
  if written and not options.json:
    print(f'Wrote {", ".join(written)}')
