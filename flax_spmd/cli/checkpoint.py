"""`flax-spmd checkpoint`: list, show, compare, verify and convert checkpoints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flax_spmd.cli.devices import emulate, on_cpus

if TYPE_CHECKING:
  from flax_spmd._src.checkpoint.inspection import CheckpointSummary
  from flax_spmd._src.layout import Layout

_EMULATED = 64  # most devices to emulate, so that arrays are written in the layout's shards


def add_to(commands: Any) -> None:
  """Adds the commands to a parser."""
  text = 'list, show, compare, verify and convert checkpoints'
  group = commands.add_parser('checkpoint', help=text, description=f'{text[0].upper()}{text[1:]}.')
  verbs = group.add_subparsers(required=True)
  checkpoint = {'path': 'folder or file of a checkpoint'}
  ls = _add(verbs, 'ls', _ls, 'list the checkpoints in a folder', {'folder': 'folder to search'})
  show = _add(
    verbs,
    'show',
    _show,
    'show names, shape, bytes and saved spec of every leaf, and the layout',
    checkpoint,
  )
  for verb in (ls, show):
    verb.add_argument('--json', action='store_true', help='print the result as JSON')
  two = {'one': 'first checkpoint', 'other': 'second checkpoint'}
  _add(verbs, 'diff', _diff, 'compare two checkpoints; exits with 1 if they differ', two)
  text = 'read a checkpoint and compare its checksums; exits with 1 if it is damaged'
  _add(verbs, 'verify', _verify, text, checkpoint)
  _add_convert(verbs)


def _add(
  verbs: Any, name: str, run: Any, text: str, arguments: Mapping[str, str]
) -> argparse.ArgumentParser:
  verb = verbs.add_parser(name, help=text, description=f'{text[0].upper()}{text[1:]}.')
  for argument, help_text in arguments.items():
    verb.add_argument(argument, help=help_text)
  verb.set_defaults(run=run)
  return verb


def _add_convert(verbs: Any) -> None:
  text = 'write a checkpoint with other layer stacking, dtypes, paths, parts or layout'
  paths = {'path': 'checkpoint to convert', 'to': 'path of the new checkpoint'}
  verb = _add(verbs, 'convert', _convert, text, paths)
  verb.add_argument('--layout', type=Path, metavar='TOML', help='layout of the result, as a TOML file')
  verb.add_argument('--only', metavar='PART', help='part to keep, such as params')
  repeatable: dict[str, Any] = {'type': _pair, 'action': 'append', 'default': []}
  verb.add_argument(
    '--stack',
    **repeatable,
    metavar='MODULE=SINGLE',
    help='stack or unstack layers: layers=layers_{}, or layers=layers_{}:1 for dimension 1; repeatable',
  )
  verb.add_argument(
    '--rename',
    **repeatable,
    metavar='REGEX=NEW',
    help='replace this regular expression in paths; repeatable',
  )
  verb.add_argument(
    '--rearrange',
    **repeatable,
    metavar='REGEX=DIMENSIONS',
    help="split, reorder or merge dimensions: '/kernel$=out in -> in out'; repeatable",
  )
  verb.add_argument(
    '--dtype', **repeatable, metavar='OLD=NEW', help='cast arrays of a dtype to another; repeatable'
  )
  verb.add_argument('--compress', action='store_true', help='compress the data')
  verb.add_argument(
    '--pack',
    type=int,
    default=0,
    metavar='BYTES',
    help='store arrays of up to this size together (default: 0)',
  )


def _pair(text: str) -> tuple[str, str]:
  old, equals, new = text.partition('=')
  if not (old and equals):
    raise argparse.ArgumentTypeError(f'{text!r} does not have the form OLD=NEW')
  return old, new


def _ls(options: argparse.Namespace) -> int:
  from flax_spmd.checkpoint import ls

  summaries = ls(options.folder)
  if options.json:
    print(json.dumps([_as_json(summary) for summary in summaries], indent=2))
  else:
    titles = [summary.title for summary in summaries]
    print('\n'.join(titles) or f'There are no checkpoints in {options.folder}.')
  return 0


def _as_json(summary: CheckpointSummary) -> dict[str, Any]:
  return {
    'path': summary.path,
    'leaves': len(summary.record.leaves),
    'bytes': summary.record.bytes,
    'saved': summary.saved and summary.saved.isoformat(),
    'written_by': summary.record.written_by,
    'error': summary.error,
  }


def _show(options: argparse.Namespace) -> int:
  from rich.console import Console

  from flax_spmd.checkpoint import show

  summary = show(options.path)
  if options.json:
    content = _as_json(summary) | {
      'layout': summary.record.layout,
      'kinds': summary.record.kinds,
      'leaves': summary.records(),
    }
    print(json.dumps(content, indent=2))
  else:
    console = Console()
    console.width = console.width if console.is_terminal else 200
    console.print(summary, markup=False, highlight=False)
  return 0


def _diff(options: argparse.Namespace) -> int:
  from flax_spmd.checkpoint import diff

  on_cpus()
  lines = diff(options.one, options.other)
  print('\n'.join(lines) or 'The checkpoints are equal.')
  return 1 if lines else 0


def _verify(options: argparse.Namespace) -> int:
  from flax_spmd.checkpoint import show, verify

  on_cpus()
  damaged = verify(options.path)
  if damaged:
    print('\n'.join([f'{options.path} is damaged:', *damaged]))
    return 1
  print(f'{show(options.path).title}: undamaged')
  return 0


def _convert(options: argparse.Namespace) -> int:
  from flax_spmd.checkpoint import Changes, convert, show

  changes = Changes(
    renames=dict(options.rename),
    rearranged=dict(options.rearrange),
    stacks=dict(map(_stack, options.stack)),
    dtypes=dict(options.dtype) or 'keep',
    only=options.only,
  )
  layout = _layout(options.layout)
  size = _mesh_size(options, layout)
  on_cpus()
  emulate(size if size <= _EMULATED else 1)
  convert(
    options.path,
    options.to,
    changes=changes,
    layout=layout,
    compress=options.compress,
    pack=options.pack,
    show=True,
  )
  print(show(options.to).title)
  return 0


def _stack(pair: tuple[str, str]) -> tuple[str, Any]:
  single, colon, axis = pair[1].rpartition(':')
  return pair[0], (single, int(axis)) if colon and axis.lstrip('-').isdecimal() else pair[1]


def _layout(file: Path | None) -> Layout | None:
  from flax_spmd._src.layout import Layout
  from flax_spmd._src.mesh import abstract_mesh
  from flax_spmd._src.rules import toml_format

  if file is None:
    return None
  parsed = toml_format.read(file.read_text())
  return Layout(abstract_mesh(parsed.axes, axis_types=parsed.types), parsed.rules, strict=parsed.strict)


def _mesh_size(options: argparse.Namespace, layout: Layout | None) -> int:
  """Number of devices of the result's mesh."""
  from flax_spmd.checkpoint import recorded_layout

  return (layout or recorded_layout(options.path)).mesh.size
