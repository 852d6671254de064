"""Marks: identity operations in a trace that end a stage, or start a pass of the microbatch loop.

    x = spmd.pipeline.stage_end(x)          # in a Linen module, between two stages

A pipeline cuts the program at its marks; all transformations (`jit`, `grad`, `vmap`, `remat`, `scan`)
treat them as the identity. The transpose of a mark is a mark too, so the backward pass is cut where the
forward pass is.

Marks are traced outside pipelines, too: JAX caches traces, so a trace must not depend on its caller.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from flax_spmd._src import compat
from flax_spmd._src.pipeline.argument_checks import check_arrays, named_leaves
from flax_spmd._src.public import public
from flax_spmd._src.text import value_text
from flax_spmd.errors import PipelineError

_numbers = itertools.count()  # of marks: a backward mark has that of its forward mark


@public('flax_spmd.pipeline', unchecked=['name'])
def stage_end(x: Any, name: str | None = None) -> Any:
  """Ends a stage of a pipeline; outside a pipeline, the identity.

  The next stage starts with the operations that use the result. Later stages may use other values of
  this stage, too. After the last stage a mark is optional. If there are more ends than stages, those that
  do not depend on one another end the same stage, as in several calls of a model.

  Args:
    x: a tree of arrays and numbers, of any dtypes.
    name: name of the stage, for errors.

  Returns:
    The same tree.

  Raises:
    PipelineError: the tree has no array, or a leaf that is neither array nor number; or the name is no string.

  Example:
    >>> stage_end({'h': jnp.ones(2), 'ids': jnp.arange(2)})['ids']
    Array([0, 1], dtype=int32)
  """
  if name is not None and not isinstance(name, str):
    raise PipelineError(
      f'stage_end: the name {value_text(name)} is not a string.\n'
      'Fix: pass all arrays as one tree, stage_end((x, y)), and the name as a string.'
    )
  leaves, treedef = jax.tree.flatten(x)
  if not leaves:
    raise PipelineError(
      f'stage_end({x!r}): there is no array to cut at.\nFix: pass the arrays that the next stage uses.'
    )
  check_arrays(
    named_leaves(x),
    'stage_end: only arrays and numbers can be sent from stage to stage, and these leaves are neither',
    'pass arrays and numbers only; every stage can use the rest as it is.',
  )
  params = {'direction': 'forward', 'number': next(_numbers), 'name': name}
  return jax.tree.unflatten(treedef, stage_end_p.bind(*leaves, **params))


@public('flax_spmd.pipeline')
def place_with(x: Any, anchor: Any) -> Any:
  """Computes a value on the rank of another one, after the microbatch loop; elsewhere, the identity.

  A pipeline runs an operation after the loop on the rank of its largest operand. This one makes `x`
  on the rank of `anchor` instead, so that what is computed from both needs no transfer of `anchor`.

  Args:
    x: a tree of arrays.
    anchor: a tree of arrays that depends on the loop, such as a gradient; its largest array counts.

  Returns:
    `x`.

  Raises:
    PipelineError: the tree `anchor` has no array, or a leaf is neither array nor number; in a pipeline, it does not depend on the loop.

  Example:
    >>> place_with(jnp.ones(2), jnp.zeros(3))
    Array([1., 1.], dtype=float32)
  """
  check_arrays(
    named_leaves({'x': x, 'anchor': anchor}),
    'place_with takes arrays and numbers, and these leaves are neither',
    'write place_with(x, anchor), with the arrays to compute and an array of the rank, such as a gradient.',
  )
  anchors = jax.tree.leaves(anchor)
  if not anchors:
    raise PipelineError(
      f'place_with: the anchor {anchor!r} has no array.\nFix: pass an array of the rank, such as a gradient.'
    )
  largest = max(anchors, key=jnp.size)
  return jax.tree.map(lambda leaf: place_with_p.bind(leaf, largest)[0], x)


@contextlib.contextmanager
def proposed_ends() -> Iterator[None]:
  """In this context, every call of a Linen module or lifted block ends in a `may_end` mark."""

  def end(call, args, kwargs, context):
    del context
    return _may_end(call(*args, **kwargs))

  with nn.intercept_methods(end), compat.lifted_results(_may_end):
    yield


def _may_end(results: Any) -> Any:
  """The same results, with a `may_end` mark on those that are traced."""
  leaves, treedef = jax.tree.flatten(results)
  traced = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
  if traced:
    values = [leaves[number] for number in traced]
    marked = may_end_p.bind(*values, direction='forward', number=next(_numbers))
    for number, value in zip(traced, marked, strict=True):
      leaves[number] = value
  return jax.tree.unflatten(treedef, leaves)


def _define(primitive: Primitive, results: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
  """Defines a primitive that returns some of its operands."""
  primitive.multiple_results = True
  primitive.def_impl(lambda *operands, **_: list(results(operands)))
  primitive.def_abstract_eval(lambda *operands, **_: list(results(operands)))
  mlir.register_lowering(primitive, lambda ctx, *operands, **_: results(operands))


def _identity(name: str) -> Primitive:
  """A primitive that returns its operands, of any number.

  Its derivatives are the same primitive, with another `direction`; derivatives of derivatives are 'second', and stay so.
  Tangents of integers are symbolic zeros, which are not bound.
  """
  primitive = Primitive(name)
  _define(primitive, lambda operands: operands)

  def batch(operands, dimensions, **params):
    return primitive.bind(*operands, **params), dimensions

  def bind(values, direction, **params):
    """Binds the values that are not symbolic zeros; a list with None for the others."""
    nonzero = [value for value in values if type(value) is not ad.Zero]
    bound = iter(primitive.bind(*nonzero, direction=direction, **params) if nonzero else ())
    return [None if type(value) is ad.Zero else next(bound) for value in values]

  def jvp(primals, tangents, **params):
    results = primitive.bind(*primals, **params)
    order = 'tangent' if params['direction'] == 'forward' else 'second'
    moved = bind(tangents, **(params | {'direction': order}))
    return results, [old if new is None else new for old, new in zip(tangents, moved)]

  def transpose(cotangents, *_, **params):
    order = 'second' if params['direction'] == 'second' else 'backward'
    return bind(cotangents, **(params | {'direction': order}))

  batching.primitive_batchers[primitive] = batch
  ad.primitive_jvps[primitive] = jvp
  ad.primitive_transposes[primitive] = transpose
  compat.drop_unused_operands(primitive)
  return primitive


stage_end_p = _identity('stage_end')
"""Ends a stage. `direction` is 'forward', 'tangent', 'backward' or 'second'; `number` identifies the
forward mark."""

microbatch_p = _identity('microbatch')
"""Starts a pass of the microbatch loop. `schedule` is the loop's schedule, or None."""

may_end_p = _identity('may_end')
"""Marks a possible stage end, after a Linen module. It has the parameters of `stage_end_p`."""

place_with_p = Primitive('place_with')
"""Returns its first operand. An equation after the loop runs on the rank of its second operand."""

_define(place_with_p, lambda operands: operands[:1])
batching.primitive_batchers[place_with_p] = lambda operands, dimensions: (
  place_with_p.bind(*operands),
  dimensions[:1],
)
ad.primitive_jvps[place_with_p] = lambda primals, tangents: (place_with_p.bind(*primals), tangents[:1])

MARKS = stage_end_p, may_end_p, microbatch_p
_inside: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def marks_inside(equation: Any, *primitives: Primitive) -> list[Any]:
  """The marks of some primitives inside an equation, ours or JAX's, at any depth; those of a function once per function."""
  inside = itertools.chain.from_iterable(map(_marks_of, compat.jaxprs_in(equation.params)))
  return [mark for mark in inside if mark.primitive in primitives]


def _marks_of(jaxpr: Any) -> list[Any]:
  if jaxpr not in _inside:
    each = (
      [one] if one.primitive in MARKS else marks_inside(one, *MARKS)
      for one in compat.jaxpr_parts(jaxpr).equations
    )
    _inside[jaxpr] = list({id(mark): mark for marks in each for mark in marks}.values())
  return _inside[jaxpr]
