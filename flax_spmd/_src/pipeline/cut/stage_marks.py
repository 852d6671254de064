"""Marks: where a stage of a model ends, and what one pass of the microbatch loop is.

    x = spmd.pipeline.stage_end(x)          # in a Linen module, between two stages

A mark is an identity that stays visible in the traced program: the pipeline cuts there, everything else
(`jit`, `grad`, `vmap`, `remat`, `scan`) passes through it. Its transpose is marked too, so that the
backward pass is cut at the same place as the forward pass.

Marks are always in the program, pipeline or not: JAX keeps traces, so a trace must not depend on who
asked for it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from flax_spmd._src import compat
from flax_spmd._src.pipeline.argument_checks import strangers
from flax_spmd._src.public_module import set_module
from flax_spmd._src.text import few
from flax_spmd.errors import PipelineError

_numbers = itertools.count()  # of marks: a backward mark has that of its forward mark


@set_module('flax_spmd.pipeline')
def stage_end(x: Any) -> Any:
  """Ends a stage of a pipeline here; the identity everywhere else.

  What crosses from one stage to the next by way of `x` is what the mark is about; other values may cross
  too. After the last stage a mark is optional.

  Args:
    x: any tree of arrays and numbers, of any dtypes.

  Returns:
    The same tree.

  Raises:
    PipelineError: there is no array in it, or what is none.

  Example:
    >>> stage_end({'h': jnp.ones(2), 'ids': jnp.arange(2)})['ids']
    Array([0, 1], dtype=int32)
  """
  leaves, treedef = jax.tree.flatten(x)
  if not leaves:
    raise PipelineError(
      f'stage_end({x!r}): there is no array to cut at.\nFix: pass what the next stage gets.'
    )
  strange = strangers(x)
  if strange:
    raise PipelineError(
      'stage_end: what is no array cannot go from stage to stage:\n'
      + few(strange)
      + '\nFix: pass arrays and numbers only; the rest is known to every stage.'
    )
  return treedef.unflatten(stage_end_p.bind(*leaves, way='forward', number=next(_numbers)))


@contextlib.contextmanager
def proposed_ends() -> Iterator[None]:
  """Within it, every Linen module and every lifted block that is called says that a stage may end there."""

  def end(call, args, kwargs, context):
    del context
    return _may_end(call(*args, **kwargs))

  with nn.intercept_methods(end), compat.lifted_results(_may_end):
    yield


def _may_end(results: Any) -> Any:
  """The same results; those that are traced are marked."""
  leaves, treedef = jax.tree.flatten(results)
  traced = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
  if traced:
    values = [leaves[number] for number in traced]
    marked = may_end_p.bind(*values, way='forward', number=next(_numbers))
    for number, value in zip(traced, marked, strict=True):
      leaves[number] = value
  return treedef.unflatten(leaves)


def _identity(name: str) -> Primitive:
  """A primitive of any number of operands, which are its results."""
  primitive = Primitive(name)
  primitive.multiple_results = True
  primitive.def_impl(lambda *operands, **_: list(operands))
  primitive.def_abstract_eval(lambda *operands, **_: list(operands))
  mlir.register_lowering(primitive, lambda ctx, *operands, **_: operands)

  def batch(operands, dimensions, **params):
    return primitive.bind(*operands, **params), dimensions

  batching.primitive_batchers[primitive] = batch
  return primitive


def _differentiable(primitive: Primitive) -> None:
  """Derivatives of an identity of which `way` says what it is an identity on.

  Integers have tangents that are symbolic zeros; those are passed by.
  """

  def bind(values, way, **params):
    """Of those values that are there; a list with None for the others."""
    there = [value for value in values if type(value) is not ad.Zero]
    bound = iter(primitive.bind(*there, **(params | {'way': way})) if there else ())
    return [None if type(value) is ad.Zero else next(bound) for value in values]

  def jvp(primals, tangents, **params):
    results = primitive.bind(*primals, **params)
    moved = bind(tangents, **(params | {'way': 'tangent'}))
    return results, [old if new is None else new for old, new in zip(tangents, moved)]

  def transpose(cotangents, *_, **params):
    return bind(cotangents, **(params | {'way': 'backward'}))

  ad.primitive_jvps[primitive] = jvp
  ad.primitive_transposes[primitive] = transpose


stage_end_p = _identity('stage_end')
"""Ends a stage. `way` is 'forward', 'tangent' or 'backward'; `number` is that of the forward mark."""

microbatch_p = _identity('microbatch')
"""Stands at the beginning of a pass of the microbatch loop. `schedule` is the loop's, or None."""

may_end_p = _identity('may_end')
"""Stands where a stage could end: after a Linen module. Its parameters are those of `stage_end_p`."""

_differentiable(stage_end_p)
_differentiable(may_end_p)
_differentiable(microbatch_p)
