"""Plots of the pages, as SVG: ratios of each benchmark, bytes sent per layout, estimates against compiled figures."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use('svg')

import matplotlib.pyplot as plt
from render import RESULTS, Record, records

COLORS = '#4269d0', '#efb118', '#ff725c', '#6cc5b0', '#9c6b4e'
STYLE = {
  'svg.fonttype': 'none',  # text stays text
  'svg.hashsalt': 'flax_spmd',  # makes the file reproducible
  'font.size': 9,
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.grid': True,
  'axes.grid.axis': 'x',
  'grid.color': '#dddddd',
  'axes.axisbelow': True,
}
KINDS = 'all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all', 'collective-permute'
MIB = 2**20


def draw_all() -> None:
  names = sorted({path.name.partition('-jax-')[0] for path in RESULTS.glob('*-jax-*.json')})
  special = {'layouts': wire, 'search_sample': sample}
  with plt.rc_context(STYLE):
    for name in names:
      figure = special.get(name, ratios)(records(name))
      if figure is None:
        (RESULTS / f'{name}.svg').unlink(missing_ok=True)
      else:
        _save(figure, RESULTS / f'{name}.svg')


def _save(figure: plt.Figure, path: Path) -> None:
  figure.savefig(path, bbox_inches='tight', metadata={'Date': None, 'Creator': None})
  plt.close(figure)


def ratios(recorded: Sequence[Record]) -> plt.Figure | None:
  """Each ratio with its interval and target, in one color per JAX version."""
  names = list(
    dict.fromkeys(each['name'] for one in recorded for each in one['figures'] if each['unit'] == 'x')
  )
  if len(names) < 2:
    return None
  figure, axes = plt.subplots(figsize=(7, 0.6 + 0.28 * len(names)))
  colors = dict(zip((one['versions']['jax'] for one in recorded), itertools.cycle(COLORS)))
  for index, one in enumerate(recorded):
    color = colors[one['versions']['jax']]
    rows = {each['name']: each for each in one['figures']}
    shift = 0.24 * (index - (len(recorded) - 1) / 2)
    for y, name in enumerate(names):
      if name in rows:
        low, high = rows[name]['interval']
        axes.plot([low, high], [y + shift] * 2, color=color, linewidth=4, alpha=0.35)
        axes.plot(rows[name]['value'], y + shift, 'o', color=color, markersize=4)
        limit = (rows[name]['target'] or '').removeprefix('<= ')
        if limit and limit[0].isdigit():
          axes.plot(float(limit.split(' ')[0]), y, '|', color='#555555', markersize=12)
  axes.axvline(1, color='#999999', linewidth=0.8)
  axes.set_yticks(range(len(names)), names)
  axes.invert_yaxis()
  axes.set_xlim(left=0)
  axes.set_xlabel('times as much; | is the target')
  for jax, color in colors.items():
    axes.plot([], [], 'o', color=color, label=f'jax {jax}')
  axes.legend(frameon=False, loc='lower center', bbox_to_anchor=(0.4, 1), ncols=len(recorded))
  return figure


def wire(recorded: Sequence[Record]) -> plt.Figure | None:
  """Bytes that each layout sends, by kind of collective, for each compiler."""
  sent = recorded[-1]['details'].get('wire') if recorded else None
  if not sent:
    return None
  figure, _ = plt.subplots(1, len(sent), sharey=True, figsize=(3 * len(sent), 3.6))
  for axes, (target, layouts) in zip(figure.axes, sent.items(), strict=True):
    left = [0.0] * len(layouts)
    for kind, color in zip(KINDS, COLORS, strict=True):
      widths = [each.get(kind, 0) / MIB for each in layouts.values()]
      axes.barh(list(layouts), widths, left=left, color=color, label=kind)
      left = [before + more for before, more in zip(left, widths, strict=True)]
    axes.set_title(target, fontsize=9)
    axes.set_xlabel('MiB a device and step')
  figure.axes[0].invert_yaxis()
  handles, labels = figure.axes[0].get_legend_handles_labels()
  figure.legend(handles, labels, frameon=False, loc='upper center', bbox_to_anchor=(0.5, 1.08), ncols=5)
  return figure


def sample(recorded: Sequence[Record]) -> plt.Figure | None:
  """The sample: estimated against compiled figures, with doubtful estimates in another color."""
  pairs = recorded[-1]['details'].get('sample', {}).get('pairs', ()) if recorded else ()
  pairs = [
    pair for pair in pairs if None not in (*pair['estimated'].values(), *pair['compiled'].values())
  ]
  if not pairs:
    return None
  figure, panels = plt.subplots(1, 3, figsize=(9, 3))
  for axes, (quantity, unit) in zip(
    panels, {'seconds': 's', 'memory': 'bytes', 'wire': 'bytes'}.items(), strict=True
  ):
    both = [each[source][quantity] for each in pairs for source in ('estimated', 'compiled')]
    ends = [min(both) / 1.3, max(both) * 1.3]
    axes.plot(ends, ends, color='#999999', linewidth=0.8)
    for doubted, color in ((True, COLORS[1]), (False, COLORS[0])):
      chosen = [each for each in pairs if bool(each['doubts']) == doubted]
      axes.plot(
        [each['compiled'][quantity] for each in chosen],
        [each['estimated'][quantity] for each in chosen],
        'o',
        color=color,
        markersize=4,
        label='in doubt' if doubted else 'not in doubt',
      )
    axes.set(xscale='log', yscale='log', xlim=ends, ylim=ends, title=f'{quantity}, {unit}')
    axes.set_xlabel('compiled')
  panels[0].set_ylabel('estimated')
  panels[0].legend(frameon=False)
  figure.tight_layout()
  return figure


if __name__ == '__main__':
  draw_all()
