"""The README's badges as SVG, from `pyproject.toml`, without any server.

    python docs/badges.py      # writes docs/badges.svg

`tests/docs_test.py` holds the file to it.
"""

from __future__ import annotations

import html
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEIGHT, GAP, LETTER = 20, 6, 6.6  # pixels; the width of a letter is about that
GREY, BLUE = '#555555', '#2f6fd0'


def badges() -> list[tuple[str, str]]:
  """Name and value of each badge."""
  project = tomllib.loads((HERE.parent / 'pyproject.toml').read_text())['project']
  marker = 'Programming Language :: Python :: '
  pythons = [text.removeprefix(marker) for text in project['classifiers'] if text.startswith(marker)]
  least = dict(text.split('>=') for text in project['dependencies'])
  return [
    ('python', ' | '.join(pythons)),
    ('jax', f'≥ {least["jax"]}'),
    ('flax', f'≥ {least["flax"]}'),
    ('licence', project['license']),
  ]


def picture(badges: list[tuple[str, str]]) -> str:
  """All of them in a row."""
  parts, left = [], 0.0
  for name, value in badges:
    for text, color in ((name, GREY), (value, BLUE)):
      width = LETTER * len(text) + 12
      parts += [
        f'<rect x="{left:.1f}" width="{width:.1f}" height="{HEIGHT}" fill="{color}"/>',
        f'<text x="{left + width / 2:.1f}" y="14" textLength="{width - 12:.1f}">{html.escape(text)}</text>',
      ]
      left += width
    left += GAP
  size = f'width="{left - GAP:.0f}" height="{HEIGHT}"'
  style = 'fill="#ffffff" text-anchor="middle" font-family="Verdana, sans-serif" font-size="11"'
  title = html.escape(', '.join(f'{name} {value}' for name, value in badges))
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{title}</title>\n<g {style}>\n'
    + '\n'.join(parts)
    + '\n</g>\n</svg>\n'
  )


if __name__ == '__main__':
  (HERE / 'badges.svg').write_text(picture(badges()))
