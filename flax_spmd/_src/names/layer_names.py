"""Layer names: names for models that have none, from the types of their layers and the paths of their arrays.

create = names_for(model.init, {'mlp/wi/kernel$': ('embed', 'mlp')})
variables = layout.init(create, key, x)   # as if the model were annotated
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import flax.linen as nn
import jax

from flax_spmd._src import compat
from flax_spmd._src.names.box_trees import is_unit
from flax_spmd._src.names.layer_outputs import outputs_constrained
from flax_spmd._src.names.layer_table import LayerTable, table_of_flax
from flax_spmd._src.names.linen_layers import LayerBox, LinenLayers
from flax_spmd._src.names.nnx_layers import name_optimizer_state, name_variables
from flax_spmd._src.public import public
from flax_spmd._src.tree_paths import KEY_TEXT, path_string
from flax_spmd.errors import raise_problems

P = ParamSpec('P')
Result = TypeVar('Result')

# part of the key of JAX's caches: the tables of all calls around a trace
_trace_key = jax.make_user_context(())


@public('flax_spmd')
def names_for(create: Callable[P, Result], names: Any = ()) -> Callable[P, Result]:
  """A function that creates the same state with names, or makes the same step: as if the model were annotated.

  The layers of Flax have the names of `presets.layer_names()`, unless the model or `names` give others. Names of the
  model itself have priority, then expressions for paths, then types, then Flax's layers.

  Inside a program under rules with one for `batch`, the results of Flax's layers are constrained, by the names that
  their dimensions have in the layer's array: `('batch', 'length', 'mlp')` for a kernel `('embed', 'mlp')`.

  Args:
    create: function that creates the variables of a Linen model, an NNX module, or a state with either. The arrays
      of Linen get boxes, and those of NNX metadata. Or a step: variables that `apply` gets stay as they are.
    names: a dictionary, or a sequence of pairs:
      an expression for paths (`params/mlp/wi/kernel`, from the top module; in NNX `mlp/wi/kernel`), and the names of
      an array, or None for no names;
      a type of modules, and a dictionary from paths of arrays below such a module to names, to None, or to a function
      of the module that returns them;
      an expression, and one name, a str, for the dimensions that `nn.scan` and `vmap` add to arrays with such paths.
      The name in a Linen transformation's `metadata_params` has priority. In NNX, the fields of Flax's layers show
      which dimensions `nnx.vmap` has added; elsewhere they are the first, as many as the array has beyond its names.
      Names are a tuple, for the dimensions of a single layer.

  Returns:
    A function with the signature of `create`. It raises `LayoutError` for an entry that names nothing in a state that it
    creates, returned or not, unless it is for a type that the model lacks, and for more names than dimensions (lists all of them).

  Raises:
    LayoutError: `names` has an invalid entry, or a key twice (lists all of them).

  Example:
    >>> create = names_for(nn.Dense(16).init, {nn.Dense: {'kernel': ('embed', 'mlp')}})
    >>> params = create(jax.random.key(0), jnp.ones((1, 8)))['params']
    >>> params['kernel'], params['bias']
    (LogicallyPartitioned(float32[8,16], names=('embed', 'mlp')), LogicallyPartitioned(float32[16], names=('out',)))
  """
  table = LayerTable.of(names)
  linen = table, table_of_flax('flax.linen')

  @functools.wraps(create, updated=())
  def named(*args: P.args, **kwargs: P.kwargs) -> Result:
    layers = LinenLayers(linen)
    key = _trace_key((*_trace_key.value, table))
    with key, nn.intercept_methods(layers), outputs_constrained(layers.outputs):
      result = create(*args, **kwargs)
    return _named(result, linen, layers)

  return named


def _named(result: Any, linen: tuple[LayerTable, LayerTable], layers: LinenLayers) -> Any:
  """The result with boxes of the user's kind, and with names on the modules of NNX."""
  own = linen[0]
  flat, treedef = jax.tree_util.tree_flatten_with_path(result, is_leaf=_is_named)
  nodes = [node for _, node in flat]
  origins = layers.origins
  if any(map(_is_nnx, nodes)):
    of_nnx = own, table_of_flax('flax.nnx')
    paths = [tuple(KEY_TEXT[type(entry)](entry) for entry in path) for path, _ in flat]
    for path, node in zip(paths, nodes, strict=True):
      origins += name_variables(node, path, of_nnx)
    name_optimizer_state(zip(paths, nodes, strict=True))
  for index, node in enumerate(nodes):
    if isinstance(node, LayerBox):
      nodes[index], origin = node.named(linen)
      origins.append(origin)
  units = jax.tree_util.tree_flatten_with_path(result, is_leaf=is_unit)[0]
  problems = dict.fromkeys(origin.problem for origin in origins if origin.problem is not None)
  # a model whose trace JAX has in its cache does not run
  creates = layers.has_initialized or (bool(origins) and not layers.outputs.has_run)
  paths = [path_string(path) for path, _ in units]
  idle = list(own.idle(origins, paths)) if creates else []
  if idle and layers.created:  # a function may return a part of the variables, such as the caches
    created = [box.named(linen)[1] for box in layers.created]
    idle = list(own.idle([*origins, *created], paths))
  raise_problems([*problems, *idle])
  return (
    jax.tree.unflatten(treedef, nodes) if any(isinstance(node, LayerBox) for _, node in flat) else result
  )


def _is_nnx(node: Any) -> bool:
  return compat.is_nnx_module_type(type(node)) or compat.is_variable_type(type(node))


def _is_named(node: Any) -> bool:
  """Whether a node has names to finish, or is a node of NNX, which keeps its identity."""
  return isinstance(node, LayerBox) or _is_nnx(node)
