"""Training steps: a step function with everything needed to trace it, and nothing allocated.

train_step = TrainStep(step, create_state, batch)
compare(train_step, layouts, 'h100:64')
search(train_step, 'h100:64')

A model that holds a mesh, for its `shard_map`s say, is built anew for each layout, by a function:

    def train_step_of(layout):
      model = Model(mesh=layout.mesh)
      return TrainStep(model.step, model.create, batch)

    compare(train_step_of, layouts, 'h100:64')
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from flax_spmd._src.jit.foreign_meshes import explained_mesh_errors
from flax_spmd._src.jit.jitted import Jitted
from flax_spmd._src.layout import Layout
from flax_spmd._src.public import public
from flax_spmd._src.text import plural, value_text
from flax_spmd.errors import ArgumentTypeError


@public('flax_spmd.explore')
class TrainStep(NamedTuple):
  """A training step with the shapes that it is called with, for `compare`, `search` and `Estimator`.

  `step` and `create` are only traced: nothing is allocated, and nothing runs. For a model that is built on a mesh, pass
  a function from a layout to a `TrainStep` instead.

  Attributes:
    step: `step(state, batch)`, any function that can be jitted.
    create: `create(*args)`, which returns the state.
    batch: second argument of the step in its global shape: arrays or `jax.ShapeDtypeStruct`s.
    args: arguments of `create`.
    placements: placements of the batch, as for `Layout.shard`. Default: the first dimension of each array
      has the logical name `batch`.
    donate: whether the state is donated to the step.
    axis_name, in_axes, out_axes: of a step that reduces over an axis name, as for `Layout.jit`.

  Example:
    >>> def create():
    ...   return {'w': LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))}
    >>> def step(state, x):
    ...   return jax.tree.map(lambda w: w - 0.1, state), jnp.sum((x @ state['w'].unbox()) ** 2)
    >>> explore.TrainStep(step, create, jax.ShapeDtypeStruct((32, 64), jnp.float32)).donate
    True
  """

  step: Callable[..., Any]
  create: Callable[..., Any]
  batch: Any
  args: Sequence[Any] = ()
  placements: Any = None
  donate: bool = True
  axis_name: str | None = None
  in_axes: Any = None
  out_axes: Any = None

  def jitted(self, layout: Layout, *, donate: bool = False) -> Jitted[..., Any]:
    """The step under a layout. Where no rule gives its axis name mesh axes, the batch is one part."""
    return self.with_axis(layout).jit(
      self.step,
      axis_name=self.axis_name,
      in_axes=self.in_axes,
      out_axes=self.out_axes,
      donate_argnums=0 if donate and self.donate else None,
    )

  def with_axis(self, layout: Layout, *, of_mesh: bool = False) -> Layout:
    """A layout with a rule for the step's axis name, if it needs one.

    Args:
      layout: the layout.
      of_mesh: whether a name that is an axis of the mesh needs a rule, too.
    """
    name, axes = self.axis_name, layout.mesh.axis_names
    if name is None or name in layout.rules.by_name or (name in axes and not of_mesh):
      return layout
    return layout.replace(rules=((name, name if name in axes else None), *layout.rules))


TrainStepLike = TrainStep | Callable[[Layout], TrainStep]
"""A training step, or a function from a layout to one whose model is built on the layout's mesh."""


def check_train_step(value: Any, caller: str) -> None:
  """Raises unless a value is a `TrainStep`, or a function with one argument, which may return one.

  Args:
    value: first argument of a function.
    caller: name of that function, for the error text.

  Raises:
    ArgumentTypeError: the value is neither, or the functions of the `TrainStep` take other arguments. The text shows how to write
      the call.
  """
  if isinstance(value, TrainStep):
    _check_functions(value)
    return
  if _accepts(value, 1):
    return
  kind = 'function' if callable(value) else type(value).__name__
  raise ArgumentTypeError(
    f'The first argument of {caller} is of type {kind}, not a TrainStep.\n'
    f'Fix: write {caller}(TrainStep(step, create, batch), ...), with TrainStep from flax_spmd.explore; or pass a '
    'function that returns one for a layout, lambda layout: TrainStep(...).'
  )


def check_step(step: Any) -> None:
  """Raises unless a step can be called with a state and a batch.

  Raises:
    ArgumentTypeError: it takes other arguments, or is no function.
  """
  if not _accepts(step, 2):
    name = getattr(step, '__name__', 'step')
    raise ArgumentTypeError(
      f'A training step is called as step(state, batch), but {_other(step, "step")}.\n'
      f'Fix: pass a function of two arguments, such as lambda state, batch: {name}(state, *batch) for a batch that is a tuple, '
      f'or {name}(*state, *batch) if the state is one, too.'
    )


def _check_functions(train_step: TrainStep) -> None:
  """Raises unless the functions of a `TrainStep` can be called as it calls them, and `donate` is a boolean."""
  check_step(train_step.step)
  create, args = train_step.create, train_step.args
  if not isinstance(args, Sequence) or isinstance(args, str):
    raise ArgumentTypeError(
      f'TrainStep.args is {value_text(args)}, of type {type(args).__name__}.\n'
      'Fix: pass the arguments of create as a tuple, TrainStep(step, create, batch, args=(key,)).'
    )
  donate = train_step.donate
  if not isinstance(donate, bool | np.bool_):
    raise ArgumentTypeError(
      f'TrainStep.donate is {value_text(donate)}, of type {type(donate).__name__}.\n'
      'Fix: pass True, which donates the state to the step, or False.'
    )
  count = len(args)
  if not _accepts(create, count):
    of_arguments = 'pass its arguments, TrainStep(step, create, batch, args=(...)).'
    fix = of_arguments if callable(create) else 'pass a function that returns the state, lambda: state.'
    raise ArgumentTypeError(
      f'TrainStep calls create(*args), with {plural(count, "argument")}, but {_other(create, "create")}.\nFix: {fix}'
    )


def _accepts(function: Any, count: int) -> bool:
  """Whether a value is a function that can be called with a number of positional arguments."""
  if not callable(function):
    return False
  try:
    inspect.signature(function).bind(*[None] * count)
  except TypeError:
    return False
  except ValueError:  # a builtin without a signature
    pass
  return True


def _other(function: Any, name: str) -> str:
  """A function with the names of its parameters, or the type of another value, as the subject of an error."""
  if not callable(function):
    return f'{name} is of type {type(function).__name__}'
  parameters = inspect.signature(function).parameters.values()
  marks = {inspect.Parameter.VAR_POSITIONAL: '*', inspect.Parameter.VAR_KEYWORD: '**'}
  names = (f'{marks.get(each.kind, "")}{each.name}' for each in parameters)
  return f'{getattr(function, "__name__", name)}({", ".join(names)}) takes other arguments'


def train_step_on(layout: Layout, train_step: TrainStepLike) -> TrainStep:
  """The training step for a layout: itself, or the result of its function.

  Raises:
    ArgumentTypeError: the function returns something else, or a `TrainStep` whose functions take other arguments.
    MeshError: the function asks an abstract mesh for its devices.
    Exception: any error that the function raises.
  """
  if isinstance(train_step, TrainStep):
    return train_step
  with explained_mesh_errors(layout.mesh):
    result = train_step(layout)
  if not isinstance(result, TrainStep):
    name = getattr(train_step, '__name__', 'the function')
    raise ArgumentTypeError(
      f'{name}, which was passed in place of a TrainStep, returned {type(result).__name__} for a layout.\n'
      'Fix: return TrainStep(step, create, batch), with TrainStep from flax_spmd.explore.'
    )
  _check_functions(result)
  return result
