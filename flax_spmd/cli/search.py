"""`flax-spmd search`: the best layout for a model, a machine and a budget of memory, as TOML."""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import Any

from flax_spmd.cli.explore import model_of, reference


def add_to(commands: Any) -> None:
  """Adds the command to a parser."""
  text = 'search for the best layout for hardware that is not here'
  parser = commands.add_parser('search', help=text, description=f'{text[0].upper()}{text[1:]}.')
  parser.add_argument(
    'model', type=reference, metavar='MODULE:FUNCTION', help='returns step, create, batch'
  )
  parser.set_defaults(run=_search)
  parser.add_argument('--target', required=True, help="'h100:64', 'v5e:16x16', 'cpu:8'; see targets")
  parser.add_argument('--memory', metavar='SIZE', help='what a device may need, such as 60GiB')
  parser.add_argument('--hardware', metavar='TOML', help='a file with chips of your own')
  _add_wishes(parser)
  for name, default, text in (
    ('candidates', 1000, 'how many are estimated'),
    ('top', 8, 'how many of the best are compiled; 0 is none'),
    ('seed', 0, 'of what is random'),
  ):
    parser.add_argument(f'--{name}', type=int, default=default, help=f'{text} (default {default})')
  parser.add_argument('--time-limit', type=float, metavar='SECONDS', help='for all of it')
  parser.add_argument('--fresh', action='store_true', help='throw away what was estimated before')
  parser.add_argument('--out', metavar='TOML', help='write the layout there')
  parser.add_argument('--html', metavar='HTML', help='write a page about it there')
  parser.add_argument('--json', action='store_true')


def _add_wishes(parser: argparse.ArgumentParser) -> None:
  several: dict[str, Any] = {'action': 'append', 'default': []}
  parser.add_argument('--mesh', type=_mesh, metavar='AXIS=SIZE,...', help='if that is decided')
  parser.add_argument(
    '--pin',
    type=_pair,
    metavar='NAME=AXIS,...',
    help='where a name has to lie; nothing is nowhere',
    **several,
  )
  parser.add_argument(
    '--forbid',
    type=_pair,
    metavar='NAME[=AXIS,...]',
    help='where it must not; alone: anywhere',
    **several,
  )
  parser.add_argument('--batch-only', metavar='AXIS', help='for nothing but the batch', **several)
  parser.add_argument('--tensor', type=int, metavar='DEVICES', help='that a product is cut over at most')
  parser.add_argument(
    '--choice',
    type=_pair,
    metavar='ARGUMENT=VALUE,...',
    help='values of an argument of the step',
    **several,
  )
  parser.add_argument(
    '--pipeline',
    type=_schedule,
    metavar='SCHEDULE',
    help="tried too, such as 'OneFOneB(ranks=4)'; the step has a microbatch loop",
    **several,
  )


def _schedule(text: str) -> Any:
  """A schedule, as Python writes it.

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
  except PipelineError as error:  # what a schedule says of its own numbers; a ValueError too
    raise argparse.ArgumentTypeError(f'{text!r}: {error}') from error
  except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
    said = f'is no schedule such as OneFOneB(ranks=4); there are {", ".join(sorted(known))}'
    raise argparse.ArgumentTypeError(f'{text!r} {said}') from error


def _is_schedule(kind: Any, base: type) -> bool:
  return isinstance(kind, type) and issubclass(kind, base) and kind is not base


def _pair(text: str) -> tuple[str, tuple[str, ...] | None]:
  """`name=a,b`; None where nothing is said of it.

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
    raise argparse.ArgumentTypeError(f'{text!r} is no mesh such as data=8,model=8') from error


def _value(text: str) -> Any:
  """A number, True, None, or the text itself."""
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def _search(options: argparse.Namespace) -> int:
  from flax_spmd.errors import InfeasibleError
  from flax_spmd.explore import search

  forbid = dict(options.forbid)
  try:
    found = search(
      **model_of(options.model),
      target=options.target,
      memory=options.memory,
      choices={name: [*map(_value, values or ())] for name, values in options.choice},
      mesh=options.mesh,
      pin=dict(options.pin),
      forbid=forbid,
      batch_only=options.batch_only,
      tensor=options.tensor,
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
  print(found.to_json() if options.json else found)
  _write(options, found)
  return 0


def _write(options: argparse.Namespace, found: Any) -> None:
  """The files that were asked for."""
  if options.out:
    found.to_toml(Path(options.out))
  if options.html:
    found.to_html(Path(options.html))
  written = [file for file in (options.out, options.html) if file]
  if written and not options.json:
    print(f'written: {", ".join(written)}')
