"""Resource meshes: the meshes of `with mesh:`, which models that were written for `pjit` look for.

    if not pxla.thread_resources.env.physical_mesh.empty:
      x = with_sharding_constraint(x, P('data'))

A layout puts its mesh in force as `jax.set_mesh` does, which such a model does not see: it constrains nothing.

Many look for the mesh in any case, and have no constraint to make, or none on this platform. So the function is traced
again, with the mesh in such a block: the same operations mean that nothing is missing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax

from flax_spmd._src import compat
from flax_spmd._src.mesh import MeshLike
from flax_spmd._src.source_lines import line_text


def called_without_resources(
  fn: Callable[..., Any], mesh: MeshLike, reported: set[str], args: Any, kwargs: Any
) -> Any:
  """Calls a function in a trace, and warns of its lines that look for the mesh of `with mesh:` in vain.

  Args:
    fn: the function.
    mesh: the layout's mesh, which it would find in such a block.
    reported: the kinds of warnings already issued; only the first trace warns.
    args, kwargs: its arguments.

  Returns:
    The function's result.

  Warns:
    UserWarning: it looks for the mesh, and would make another program in a block that has it.
  """
  lines: dict[tuple[str, int], str] = {}
  with compat.recorded_readers(lambda *line: lines.setdefault(line, line_text(*line))):
    result = fn(*args, **kwargs)
    if not lines or 'resource mesh' in reported:
      return result
    reported.add('resource mesh')
    depends = _depends_on_resources(fn, mesh, args, kwargs)
  if depends:
    text = (
      f'{getattr(fn, "__qualname__", fn)}: {", ".join(lines.values())} looked for the mesh of `with mesh:`, and found '
      "none. Its constraints have no effect: the layout's mesh is that of "
      'jax.sharding.get_abstract_mesh().\n'
      'Fix: enter `with layout.mesh:` in the function, around its model.'
    )
    warnings.warn_explicit(text, UserWarning, *next(iter(lines)))
  return result


def _depends_on_resources(fn: Callable[..., Any], mesh: MeshLike, args: Any, kwargs: Any) -> bool:
  """Whether a function has other operations in a block `with mesh:`; so too where it cannot be traced there."""

  def operations() -> list[str]:
    def leaves() -> list[Any]:
      return [leaf for leaf in jax.tree.leaves(fn(*args, **kwargs)) if isinstance(leaf, jax.Array)]

    return [equation.primitive.name for equation in compat.equations_in(jax.make_jaxpr(leaves)())]

  try:
    without = operations()
    with compat.resource_mesh(mesh):
      return operations() != without
  except Exception:
    return True
