"""The idea in one picture: names, rules, mesh and devices of the example in `idea.md`, as SVG.

    python docs/idea.py        # writes docs/idea.svg

The first cell of the page runs, and the picture shows the decisions of its layout, as `draw` has them.
`tests/docs_test.py` holds the file to that.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

import flax_spmd as spmd
from flax_spmd._src.draw.text_picture import colour
from flax_spmd._src.mesh import axis_sizes
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.rules.decisions import axis_names

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT = 980, 460
NAMES, RULES, MESH, DEVICES = 24, 300, 515, 735  # where the columns begin
TOP, STEP = 92, 122  # where the arrays begin, and from one to the next
CHIP = 24  # height
CELL = 36  # of a device
COLOURS = ('#2f6fd0', '#c2560c', '#2b8a57', '#8b4fc0')  # of mesh axes
GREY = '#6b7280'


def example() -> tuple[spmd.Layout, list[Row]]:
  """The layout of the page's example, on real devices; its batch and its parameters, as rows."""
  cell = re.search(r'```{code-cell} ipython3\n(.*?)```', (HERE / 'idea.md').read_text(), re.S)
  if cell is None:
    raise ValueError('idea.md has no code cell')
  names: dict[str, Any] = {'__name__': 'idea'}
  exec(compile(cell[1], 'idea.md', 'exec'), names)
  layout = spmd.Layout(axis_sizes(names['layout'].mesh), names['layout'].rules)
  batch = spmd.LogicallyPartitioned(jax.ShapeDtypeStruct((16, 64), jax.numpy.float32), ('batch', None))
  return layout, layout.rows({'batch': batch, 'params': names['params']})


def picture(layout: spmd.Layout, rows: list[Row]) -> str:
  """The whole, as an SVG document."""
  axes = dict(zip(axis_sizes(layout.mesh), COLOURS))
  size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
  elements = [
    f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="13" '
    'role="img" aria-label="A model names its axes, rules map names to mesh axes, each device holds a part">',
    f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>',
    *headings(),
    *links(layout, rows, axes),
    *(element for at, row in enumerate(rows) for element in names_of(row, TOP + at * STEP, axes)),
    *rules_of(layout, axes),
    *mesh_of(layout, axes),
    *(element for at, row in enumerate(rows) for element in held(layout, row, TOP + at * STEP)),
    '</svg>',
  ]
  return '\n'.join(elements) + '\n'


def headings() -> Iterator[str]:
  """One over each column."""
  for x, title, what in (
    (NAMES, 'names', 'given once, by the model'),
    (RULES, 'rules', 'the table to swap'),
    (MESH, 'mesh', 'devices in a grid'),
    (DEVICES, 'devices', 'who holds which slice'),
  ):
    yield text(x, 30, title, size=17, weight=600)
    yield text(x, 50, what, fill=GREY)


def names_of(row: Row, y: float, axes: dict[str, str]) -> Iterator[str]:
  """An array: its path, and a chip per dimension, in the colour of the mesh axis that it got."""
  yield text(NAMES, y, row.path, weight=600, mono=True)
  for decision in row.decisions:
    x = NAMES + 118 * decision.dim
    found = axis_names(decision.axes)
    yield chip(
      x, y + 14, 110, f'{decision.name or "(no name)"} {row.shape[decision.dim]}', ink(found, axes)
    )


def rules_of(layout: spmd.Layout, axes: dict[str, str]) -> Iterator[str]:
  """A chip per rule."""
  for at, (name, over) in enumerate(layout.rules.pairs):
    yield chip(
      RULES, rule_y(at), 150, f'{name} → {", ".join(axis_names(over))}', ink(axis_names(over), axes)
    )
  yield text(RULES, rule_y(len(layout.rules.pairs)) + 16, 'a name without a rule', fill=GREY)
  yield text(RULES, rule_y(len(layout.rules.pairs)) + 33, 'is replicated', fill=GREY)


def mesh_of(layout: spmd.Layout, axes: dict[str, str]) -> Iterator[str]:
  """The grid of devices: the first axis downwards, the second to the right."""
  (down, rows), (right, columns) = axis_sizes(layout.mesh).items()
  left, top, cell = MESH + 12, rule_y(0) + 4, CELL
  for at, device in enumerate(layout.mesh.devices.flat):
    x, y = left + at % columns * cell, top + at // columns * cell
    yield f'<rect x="{x}" y="{y}" width="{cell - 4}" height="{cell - 4}" rx="4" fill="#eef0f3" stroke="#c9ced6"/>'
    yield text(x + (cell - 4) / 2, y + cell / 2 + 2, str(device.id), anchor='middle')
  yield text(left, top - 10, f'{down} {rows} ↓', fill=axes[down], weight=600)
  yield text(left, top + rows * cell + 16, f'{right} {columns} →', fill=axes[right], weight=600)


def held(layout: spmd.Layout, row: Row, y: float) -> Iterator[str]:
  """An array cut into its slices, each with the devices that hold it; `draw` says which."""
  array = jax.ShapeDtypeStruct(row.shape, row.dtype)
  drawing = spmd.draw(array, jax.sharding.NamedSharding(layout.mesh, row.spec))
  wide, high = 220, 80
  down, right = (size / length for size, length in zip((high, wide), row.shape))
  yield text(DEVICES, y, f'{row.path}: {row.spec}', mono=True, size=12)
  for key, part in enumerate(drawing.slices):
    (top, bottom), (left, end) = part.ranges
    x, at = DEVICES + left * right, y + 12 + top * down
    width, height = (end - left) * right, (bottom - top) * down
    yield (
      f'<rect x="{x:.1f}" y="{at:.1f}" width="{width - 2:.1f}" height="{height - 2:.1f}" rx="3" '
      f'fill="{colour(key)}"/>'
    )
    yield text(
      x + width / 2 - 1, at + height / 2 + 4, ids(part.devices), anchor='middle', fill='#111111'
    )


def ids(devices: tuple[int, ...]) -> str:
  """`0-3`, or `0, 4`."""
  run = devices == tuple(range(devices[0], devices[-1] + 1)) and len(devices) > 2
  return f'{devices[0]}-{devices[-1]}' if run else ', '.join(map(str, devices))


def links(layout: spmd.Layout, rows: list[Row], axes: dict[str, str]) -> Iterator[str]:
  """A line from each dimension to the rule that decided it, and from each rule to its mesh axis."""
  for at, row in enumerate(rows):
    for decision in row.decisions:
      if decision.rule is not None:
        found = axis_names(decision.axes)
        x, y = NAMES + 118 * decision.dim + 110, TOP + at * STEP + 14 + CHIP / 2
        yield curve(x, y, RULES, rule_y(decision.rule) + CHIP / 2, ink(found, axes))
  top, rows_of_devices = rule_y(0) + 4, axis_sizes(layout.mesh)[next(iter(axes))]
  ends = (top - 14, top + rows_of_devices * CELL + 12)  # as `mesh_of` writes them
  for at, (_, over) in enumerate(layout.rules.pairs):
    for axis in axis_names(over):
      y = ends[[*axes].index(axis)]
      yield curve(RULES + 150, rule_y(at) + CHIP / 2, MESH + 8, y, axes[axis])


def rule_y(at: int) -> float:
  """Where a rule's chip begins."""
  return TOP + STEP - 12 + at * 44


def ink(over: tuple[str, ...], axes: dict[str, str]) -> str:
  """The colour of what lies over some mesh axes."""
  return axes[over[0]] if over else GREY


def chip(x: float, y: float, width: float, words: str, fill: str) -> str:
  """A word in a frame."""
  place = f'<rect x="{x}" y="{y}" width="{width}" height="{CHIP}" rx="12"'
  frame = f'{place} fill="#ffffff"/>{place} fill="{fill}1f" stroke="{fill}"/>'  # links pass behind it
  return frame + text(x + width / 2, y + CHIP / 2 + 4.5, words, anchor='middle', fill=fill)


def curve(x: float, y: float, end: float, end_y: float, stroke: str) -> str:
  """From the right of one thing to the left of another."""
  middle = (x + end) / 2
  path = f'M{x} {y} C{middle} {y} {middle} {end_y} {end} {end_y}'
  return f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="1.5" opacity="0.75"/>'


def text(
  x: float,
  y: float,
  words: str,
  *,
  fill: str = '#1f2430',
  size: int = 13,
  weight: int = 400,
  anchor: str = 'start',
  mono: bool = False,
) -> str:
  """One line."""
  family = ' font-family="ui-monospace, monospace"' if mono else ''
  look = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"{family}'
  return f'<text x="{x}" y="{y}" fill="{fill}" {look}>{html.escape(words)}</text>'


if __name__ == '__main__':
  jax.config.update('jax_num_cpu_devices', 8)
  (HERE / 'idea.svg').write_text(picture(*example()))
