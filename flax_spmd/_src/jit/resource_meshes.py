"""Resource meshes: the meshes of `with mesh:`, which models that were written for `pjit` look for.

    if not pxla.thread_resources.env.physical_mesh.empty:
      x = with_sharding_constraint(x, P('data'))

A layout puts its mesh in force as `jax.set_mesh` does, which such a model does not see: it constrains nothing.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from flax_spmd._src.compat import recorded_readers
from flax_spmd._src.source_lines import line_text


@contextlib.contextmanager
def warn_of_unseen_mesh(fn: Callable[..., Any], reported: set[str]) -> Iterator[None]:
  """Warns of the lines of a function that look for the mesh of `with mesh:` in vain. Only the first trace warns."""
  lines: dict[tuple[str, int], str] = {}
  with recorded_readers(lambda *line: lines.setdefault(line, line_text(*line))):
    yield
  if lines and 'resource mesh' not in reported:
    reported.add('resource mesh')
    text = (
      f'{getattr(fn, "__qualname__", fn)}: {", ".join(lines.values())} looked for the mesh of `with mesh:`, and found '
      "none. Its constraints have no effect: the layout's mesh is that of "
      'jax.sharding.get_abstract_mesh().\n'
      'Fix: enter `with layout.mesh:` in the function, around its model.'
    )
    warnings.warn_explicit(text, UserWarning, *next(iter(lines)))
