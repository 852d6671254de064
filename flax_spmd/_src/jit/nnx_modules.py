"""NNX modules as arguments and results of a jitted function.

    pure = PureFunction(step, arguments, options)         # a function of arrays, for JAX
    split = SplitCall.of((model, optimizer, x), {})       # modules as arrays, and their structure
    loss = split.finished(jax.jit(pure)(*split.args))     # updates the variables of model and optimizer

Semantics are those of `nnx.jit`: variables that are shared, in one argument or between arguments, stay shared; the
function may change variables and the structure of modules; a module that it returns is that of the caller, if the
caller passed it. An `nnx.State` is a tree of arrays, and nothing is written back to it.

A call costs one traversal of the modules. Only values that have changed leave the program, and they are written to the
variables directly; modules are rebuilt only if the function has changed their structure.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import GetAttrKey

from flax_spmd._src import compat
from flax_spmd._src.jit.donated_arguments import DonatedArguments
from flax_spmd._src.names.nnx_variables import (
  LeafNumber,
  attributes_as_keys,
  ends_walk,
  is_module,
  leaf_numbers,
)
from flax_spmd._src.names.tree_names import TreeNames
from flax_spmd._src.rules.placements import PlannedResult
from flax_spmd.errors import LayoutError

ResultPlanner = Callable[[Any, Any, Sequence[bool]], Sequence[PlannedResult]]


@jax.tree_util.register_pytree_with_keys_class
class Split:
  """A module as arrays and their structure.

  Attributes:
    structure: the module's graph without its arrays.
    leaves: the value of each variable, and each array that is in no variable.
  """

  __slots__ = ('leaves', 'structure')

  def __init__(self, structure: Any, leaves: Sequence[Any]):
    self.structure, self.leaves = structure, leaves

  def tree_flatten(self):
    return self.leaves, self.structure

  def tree_flatten_with_keys(self):
    keys = map(GetAttrKey, compat.nnx_leaf_paths(self.structure))
    return list(zip(keys, self.leaves, strict=True)), self.structure

  @classmethod
  def tree_unflatten(cls, structure, leaves):
    return cls(structure, list(leaves))


@jax.tree_util.register_pytree_node_class
class Updated(NamedTuple):
  """The result of a function of modules.

  Attributes:
    result: its own result, with modules split.
    modules: the modules of the arguments, split, if their structure has changed; else empty.
    values: the new values of variables.
    numbers: the numbers of these variables, among all variables of the arguments.
  """

  result: Any
  modules: tuple[Split, ...]
  values: tuple[Any, ...]
  numbers: tuple[int, ...]

  def tree_flatten(self):
    return self[:3], self.numbers

  @classmethod
  def tree_unflatten(cls, numbers, children):
    return cls(children[0], children[1], children[2], numbers)


class SplitCall(NamedTuple):
  """The arguments of a call, with modules split.

  Attributes:
    args, kwargs: the arguments, for JAX.
    nodes: the modules and variables of the caller, by their index in the graph.
  """

  args: tuple[Any, ...]
  kwargs: dict[str, Any]
  nodes: Mapping[int, Any]

  @classmethod
  def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitCall:
    """Splits the modules of arguments."""
    indices = compat.nnx_ref_map()
    args, kwargs = _split((args, kwargs), indices)
    return cls(args, kwargs, {index: node for node, index in indices.items()})

  def finished(self, updated: Updated) -> Any:
    """The function's own result, after its updates have been written to the caller's modules."""
    nodes = compat.nnx_index_map(self.nodes)
    if updated.modules:
      new = compat.nnx_index_map({})
      for module in updated.modules:
        compat.nnx_merge(module.structure, module.leaves, new, onto=nodes)
      nodes = new
    else:
      variables = _variables(self.nodes)
      for number, value in zip(updated.numbers, updated.values, strict=True):
        variables[number].set_raw_value(value)
    return merged(updated.result, nodes)

  def result(self, updated: Updated) -> Any:
    """The function's own result, without any update; of an abstract call."""
    nodes = compat.nnx_index_map({} if updated.modules else self.nodes)
    merged(updated.modules, nodes)
    return merged(updated.result, nodes)


class PureFunction:
  """A function of modules as a function of split modules; its result is an `Updated`.

  Args:
    fn: the function.
    options: arguments of `jax.jit`, of which donation matters: donated variables are returned even if unchanged.
  """

  def __init__(self, fn: Callable[..., Any], options: Mapping[str, Any]):
    functools.update_wrapper(self, fn, updated=() if isinstance(fn, type) else ('__dict__',))
    self._fn = fn
    self._donated = DonatedArguments(fn, options)

  def __call__(self, *args: Any, **kwargs: Any) -> Updated:
    """Runs the function on merged modules; called while JAX traces."""
    nodes = compat.nnx_index_map({})
    inner_args, inner_kwargs = merged((args, kwargs), nodes)
    variables = _variables(nodes)
    before, all_before = _leaves_of(variables), _leaves_of(_arrays((args, kwargs)))
    origins = compat.nnx_ref_map(nodes)
    modules = tuple(filter(is_module, jax.tree.leaves((inner_args, inner_kwargs), is_leaf=ends_walk)))
    result = self._fn(*inner_args, **inner_kwargs)
    indices = compat.nnx_ref_map()
    split = _split(modules, indices)
    _check_static(split)
    changed = _changed(before, _leaves_of(variables))
    # Arrays that are in no variable belong to the structure.
    same = _have_structures(split, (args, kwargs)) and (
      len(_changed(all_before, _leaves_of(_arrays(split)))) == len(changed)
    )
    kept, has_others = self._donated_arrays(inner_args, inner_kwargs)
    if not same or has_others or any(origins.get(node) != index for node, index in indices.items()):
      indices = compat.nnx_ref_map()
      return Updated(
        modules=_split(modules, indices, origins), result=_split(result, indices), values=(), numbers=()
      )
    changed |= {number for number, variable in enumerate(variables) if id(variable) in kept}
    numbers = tuple(sorted(changed))
    values = tuple(variables[number].get_raw_value() for number in numbers)
    return Updated(_split(result, indices), (), values, numbers)

  def _donated_arrays(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[set[int], bool]:
    """The ids of the variables in donated modules, and whether these have arrays that are in no variable."""
    donated = self._donated.of(args, kwargs)
    indices = compat.nnx_ref_map()
    arrays = _arrays(_split(donated, indices))
    variables = {id(node) for node, _ in indices.items() if compat.is_variable_type(type(node))}
    return variables, len(arrays) > len(variables)


class ModulePlans:
  """Functions that plan trees, for trees with split modules: they see modules.

  A module as a tree of JAX has its leaves in another order than a split one, and a shared variable in each of its places.

  Args:
    plan_results: plan of a function's own result; see `Jitted`.
    plan_updates: the same without placements, for the modules of the arguments.
  """

  def __init__(self, plan_results: ResultPlanner, plan_updates: ResultPlanner):
    self._plan_results, self._plan_updates = plan_results, plan_updates

  def results(self, updated: Updated, dynamic: Any, constrained: Sequence[bool]) -> list[PlannedResult]:
    """The plan of each leaf of an `Updated`; the new value of a variable is sharded as the variable is."""
    numbers = _numbered(updated)
    planned = dict.fromkeys(range(len(constrained)), PlannedResult(None))
    arguments = _viewed(dynamic)
    described = zip(
      (self._plan_updates, self._plan_results),
      _merged_parts(updated, dynamic),
      _merged_parts(numbers, _filled(dynamic)),
      strict=True,
    )
    for plan, part, numbered in described:
      order = leaf_numbers(numbered)
      flags = [number is not None and constrained[number] for number in order]
      planned |= zip(reversed(order), reversed(plan(part, arguments, flags)), strict=True)
    planned |= self._values(updated, numbers, dynamic, arguments)
    return [planned[number] for number in range(len(constrained))]

  def _values(self, updated: Updated, numbers: Updated, dynamic: Any, arguments: Any) -> Any:
    """The plan of the new values of variables."""
    args, kwargs = arguments
    each = [*args, *(kwargs[name] for name in sorted(kwargs))]
    plans = self._plan_updates(each, arguments, [False] * len(jax.tree.leaves(each)))
    by_leaf = dict(zip(reversed(_tree_order(dynamic)), reversed(plans), strict=True))
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(dynamic)]
    before = leaves_of_values(updated, dynamic)
    for leaves, value, results in zip(before, updated.values, numbers.values, strict=True):
      described = zip(leaves, jax.tree.leaves(value), leaf_numbers(results), strict=False)
      for leaf, new, result in described:
        if shapes[leaf] == np.shape(new) and leaf in by_leaf:
          yield result, by_leaf[leaf]

  @staticmethod
  def inputs(plan: Callable[[Any], Sequence[Any]]) -> Callable[[Any], list[Any]]:
    """A plan of arguments, one value per leaf, for arguments with split modules."""

    def planned(dynamic: Any) -> list[Any]:
      values = plan(_viewed(dynamic))
      by_leaf = dict(zip(reversed(_tree_order(dynamic)), reversed(values), strict=True))
      return [by_leaf.get(leaf) for leaf in range(len(jax.tree.leaves(dynamic)))]

    return planned

  @staticmethod
  def of_modules(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of arguments, for arguments with split modules."""
    return lambda dynamic: function(_viewed(dynamic))

  @staticmethod
  def batch(find: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
    """A search for the batch of a step, for arguments with split modules, whose names and updates it can't see."""

    def found(dynamic: Any, updated: Updated, jaxpr: Any) -> Any:
      if not any(TreeNames(_viewed(dynamic)).statics):
        return find(dynamic, updated, jaxpr)
      return find(dynamic, updated, jaxpr, lambda: _updated_leaves(updated, dynamic))

    return found


def _check_static(modules: Sequence[Split]) -> None:
  """Checks that no module has an array where it had a number, which NNX keeps in the structure.

  Raises:
    LayoutError: one has. The array would be lost, or a tracer would get out of the function.
  """
  paths = [path for each in modules for path in compat.nnx_static_arrays(each.structure)]
  if paths:
    raise LayoutError(
      f'{", ".join(paths)}: an array in the place of a number, which is part of the structure of its module.\n'
      'Fix: create it as an array or as an nnx.Variable, so that functions may change it.'
    )


def _have_structures(modules: Sequence[Split], arguments: Any) -> bool:
  """Whether modules are as they were when they were split."""
  return [each.structure for each in modules] == [each.structure for each in _splits(arguments)]


def _splits(tree: Any) -> list[Split]:
  nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Split))
  return [node for node in nodes if isinstance(node, Split)]


def _arrays(tree: Any) -> list[Any]:
  """The value of each variable, and each array that is in no variable, of the split modules in a tree."""
  return [leaf for each in _splits(tree) for leaf in each.leaves]


def _leaves_of(values: Sequence[Any]) -> list[list[Any]]:
  return [jax.tree.leaves(value) for value in values]


def _changed(before: Sequence[Sequence[Any]], after: Sequence[Sequence[Any]]) -> set[int]:
  """The positions at which values have other leaves."""
  pairs = zip(before, after, strict=False)
  return {number for number, (one, other) in enumerate(pairs) if not _same(one, other)}


def merged(tree: Any, nodes: Any) -> Any:
  """The tree with modules in the place of split ones.

  Args:
    tree: a tree with split modules.
    nodes: the nodes of the graph so far, by index; those of the tree are added.
  """
  return jax.tree.map(
    lambda node: (
      compat.nnx_merge(node.structure, node.leaves, nodes) if isinstance(node, Split) else node
    ),
    tree,
    is_leaf=lambda node: isinstance(node, Split),
  )


def _split(tree: Any, indices: Any, onto: Any = None) -> Any:
  """The tree with its modules split.

  Args:
    tree: a tree with modules.
    indices: the index of each node of the graph so far; those of the tree are added.
    onto: the index of each node in another graph, in which it is to be updated.
  """
  return jax.tree.map(
    lambda node: Split(*compat.nnx_split(node, indices, onto)) if is_module(node) else node,
    tree,
    is_leaf=ends_walk,
  )


def _merged_parts(updated: Updated, dynamic: Any) -> tuple[Any, Any]:
  """The modules of an `Updated`, if it has them, and the result, which may contain modules of the arguments."""
  nodes = compat.nnx_index_map({})
  if not updated.modules:
    merged(dynamic, nodes)
  parts = merged(updated.modules, nodes), merged(updated.result, nodes)
  return attributes_as_keys(parts[0], set()), attributes_as_keys(parts[1], set())


def _viewed(dynamic: Any) -> Any:
  """Split arguments as trees of keys, for plans: a module has a place once, also if it contains itself."""
  return attributes_as_keys(merged(dynamic, compat.nnx_index_map({})), set())


def _tree_order(dynamic: Any) -> list[int]:
  """The number of each leaf of merged arguments, among the leaves of the split ones."""
  args, kwargs = _viewed(_numbered(dynamic))
  return leaf_numbers([*args, *(kwargs[name] for name in sorted(kwargs))])


def _updated_leaves(updated: Updated, dynamic: Any) -> set[int]:
  """The leaves of split arguments that a function updates: those of variables, or all of its modules."""
  if updated.modules:
    return {*jax.tree.leaves(_splits(_numbered(dynamic)))}
  return {leaf for leaves in leaves_of_values(updated, dynamic) for leaf in leaves}


def leaves_of_values(updated: Updated, dynamic: Any) -> list[list[int]]:
  """The leaves of split arguments that are the value of each variable in `updated.values`."""
  nodes = compat.nnx_index_map({})
  merged(_numbered(dynamic), nodes)
  variables = _variables(nodes)
  return [leaf_numbers(variables[number].get_raw_value()) for number in updated.numbers]


def _numbered(tree: Any) -> Any:
  structure = jax.tree.structure(tree)
  return jax.tree.unflatten(structure, map(LeafNumber, range(structure.num_leaves)))


def _filled(tree: Any) -> Any:
  return jax.tree.map(lambda _: _Filler, tree)


class _Filler:
  """Stands for a leaf that is not a result's own."""


def _variables(nodes: Mapping[int, Any]) -> list[Any]:
  """The variables of a graph, in its order."""
  return [nodes[i] for i in sorted(nodes) if compat.is_variable_type(type(nodes[i]))]


def _same(before: Sequence[Any], after: Sequence[Any]) -> bool:
  return len(before) == len(after) and all(map(operator.is_, before, after))
