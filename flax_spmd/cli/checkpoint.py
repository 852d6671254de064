"""`flax-spmd checkpoint`: look at checkpoints, verify them, and make others of them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flax_spmd.cli.devices import emulate

if TYPE_CHECKING:
  from flax_spmd._src.layout import Layout

_EMULATED = 64  # as many devices as that are emulated to write in the pieces of the layout


def add_to(commands: Any) -> None:
  """Adds the commands to a parser."""
  group = commands.add_parser('checkpoint', help='look at checkpoints, verify and convert them')
  verbs = group.add_subparsers(required=True)
  _add(verbs, 'ls', _ls, 'the checkpoints in a folder', 'folder').add_argument(
    '--json', action='store_true'
  )
  _add(verbs, 'show', _show, 'every leaf: names, shape, bytes, layout', 'path').add_argument(
    '--json', action='store_true'
  )
  _add(verbs, 'diff', _diff, 'how two checkpoints differ; exits with 1 if they do', 'one', 'other')
  _add(verbs, 'verify', _verify, 'read it all, compare checksums; exits with 1 if it is damaged', 'path')
  _add_convert(verbs)


def _add(verbs: Any, name: str, run: Any, text: str, *paths: str) -> argparse.ArgumentParser:
  verb = verbs.add_parser(name, help=text, description=f'{text[0].upper()}{text[1:]}.')
  for path in paths:
    verb.add_argument(path)
  verb.set_defaults(run=run)
  return verb


def _add_convert(verbs: Any) -> None:
  text = 'make another checkpoint: stacked or single layers, other dtypes, names, layout'
  verb = _add(verbs, 'convert', _convert, text, 'path', 'to')
  verb.add_argument(
    '--layout', type=Path, metavar='TOML', help='the layout of the result, as a TOML file'
  )
  verb.add_argument('--only', metavar='PART', help='the part to keep, such as params')
  verb.add_argument(
    '--stack',
    type=_pair,
    action='append',
    default=[],
    metavar='MODULE=SINGLE',
    help='between layers and layers_{}, along dimension 0 or that of layers=layers_{}:1',
  )
  verb.add_argument('--rename', type=_pair, action='append', default=[], metavar='REGEX=NEW')
  verb.add_argument('--dtype', type=_pair, action='append', default=[], metavar='OLD=NEW')
  verb.add_argument('--compress', action='store_true', help='compress the data')
  verb.add_argument(
    '--pack', type=int, default=0, metavar='BYTES', help='store arrays of up to so many together'
  )


def _pair(text: str) -> tuple[str, str]:
  old, equals, new = text.partition('=')
  if not (old and equals):
    raise argparse.ArgumentTypeError(f'{text!r} is not of the form OLD=NEW')
  return old, new


def _ls(options: argparse.Namespace) -> int:
  from flax_spmd.checkpoint import ls

  found = ls(options.folder)
  if options.json:
    print(json.dumps([_summary(shown) for shown in found], indent=2))
  else:
    print('\n'.join(shown.title for shown in found) or f'no checkpoints in {options.folder}')
  return 0


def _summary(shown: Any) -> dict[str, Any]:
  return {
    'path': shown.path,
    'leaves': len(shown.record.leaves),
    'bytes': shown.record.bytes,
    'saved': shown.saved and shown.saved.isoformat(),
    'written_by': shown.record.written_by,
    'error': shown.error,
  }


def _show(options: argparse.Namespace) -> int:
  from rich.console import Console

  from flax_spmd.checkpoint import show

  shown = show(options.path)
  if options.json:
    content = _summary(shown) | {
      'layout': shown.record.layout,
      'kinds': shown.record.kinds,
      'leaves': shown.records(),
    }
    print(json.dumps(content, indent=2))
  else:
    console = Console()
    console.width = console.width if console.is_terminal else 200
    console.print(shown, markup=False, highlight=False)
  return 0


def _diff(options: argparse.Namespace) -> int:
  from flax_spmd.checkpoint import diff

  lines = diff(options.one, options.other)
  print('\n'.join(lines) or 'the same')
  return 1 if lines else 0


def _verify(options: argparse.Namespace) -> int:
  from flax_spmd.checkpoint import show, verify

  damaged = verify(options.path)
  if damaged:
    print('\n'.join([f'{options.path} is damaged, in {len(damaged)} of its leaves:', *damaged]))
    return 1
  print(f'{show(options.path).title}: whole')
  return 0


def _convert(options: argparse.Namespace) -> int:
  from flax_spmd.checkpoint import convert, show

  layout = _layout(options.layout)
  size = _mesh_size(options, layout)
  emulate(size if size <= _EMULATED else 1)
  convert(
    options.path,
    options.to,
    layout=layout,
    only=options.only,
    renames=dict(options.rename),
    stacks=dict(map(_stack, options.stack)),
    dtypes=dict(options.dtype) or 'keep',
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
  from flax_spmd._src.rules import toml_format as toml

  if file is None:
    return None
  parsed = toml.read(file.read_text())
  return Layout(abstract_mesh(parsed.axes, axis_types=parsed.types), parsed.rules)


def _mesh_size(options: argparse.Namespace, layout: Layout | None) -> int:
  """How many devices the result is for."""
  from flax_spmd.checkpoint import recorded_layout

  return (layout or recorded_layout(options.path)).mesh.size
