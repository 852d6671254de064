"""NNX variables: the names in the metadata of a `flax.nnx.Variable`, read as those of a box.

    nnx.Param(w, out_sharding=('embed', 'mlp'))                  # names are logical, or mesh axes
    nnx.Param(w, out_sharding=('embed', 'mlp'), sharding_rules=(('mlp', 'model'),))

NNX does not distinguish logical names from mesh axes: a name without a rule is the mesh axis of that name. A variable's
own rules come before those of the layout.

An attribute of a module is a key of its state: a module and `nnx.state` of it have the same paths. So a tree is read
with the attributes of modules as keys (`attributes_as_keys`). The fields of an optimizer remain fields in
`nnx.Optimizer`; in its state they are keys, and become fields again here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey, GetAttrKey, KeyPath

from flax_spmd._src import compat
from flax_spmd._src.cycles import one_level, outermost_modules
from flax_spmd._src.names.boxes import Static
from flax_spmd._src.names.optimizer_state import OptaxState, optax_fields
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.tree_paths import key_value
from flax_spmd.errors import LayoutError


def static_of_variable(variable: Any) -> tuple[Static | None, Any]:
  """The names of a variable (None if it has none) and its value."""
  return static_of_metadata(compat.variable_metadata(variable)), variable.get_raw_value()


def static_of_metadata(metadata: Mapping[str, Any]) -> Static | None:
  """The names in the metadata of a variable, or of a box of `nnx.bridge`; None if it has none."""
  names = _names(compat.variable_names(metadata))
  rules = metadata.get('sharding_rules')
  if names is None:
    return None
  return Static(names, True, None, Rules.of(rules) if rules else None, or_axes=True)


def with_spec(variable: Any, spec: Any) -> Any:
  """The variable with a spec in the place of its value, as `nnx.get_partition_spec` returns it."""
  return variable.replace(spec)


def with_metadata_names(variable: Any, names: tuple[Any, ...]) -> Any:
  """A copy of a variable with these names."""
  named = variable.replace(variable.get_raw_value())
  named.set_metadata(out_sharding=names)
  return named


def _names(given: Any) -> Any:
  """Names as a tuple; None for no names. A placement on a mesh has those of its spec."""
  if isinstance(given, Format):
    given = given.sharding
  if isinstance(given, NamedSharding):
    given = given.spec
  if isinstance(given, str):
    return given
  if not isinstance(given, (tuple, list, PartitionSpec)) or not tuple(given):
    return None
  return tuple(tuple(name) if isinstance(name, list) else name for name in given)


def has_modules(tree: Any, named: Callable[[KeyPath], KeyPath] = tuple) -> bool:
  """Whether a tree has modules, or variables that are not in an `nnx.State`. `named` is for errors, as in `outermost_modules`."""
  return bool(outermost_modules(tree, named)) or any(
    map(is_module, jax.tree.leaves(tree, is_leaf=ends_walk))
  )


def is_module(node: Any) -> bool:
  """Whether a node is a module or a variable: an object that a function may change."""
  return _is_module_type(type(node))


@functools.cache
def _is_module_type(cls: type) -> bool:
  return compat.is_nnx_module_type(cls) or compat.is_variable_type(cls)


def ends_walk(node: Any) -> bool:
  """Whether a node is a module, a variable, or an `nnx.State`, whose variables are only arrays."""
  cls = type(node)
  return _is_module_type(cls) or compat.is_nnx_state_type(cls)


def check_functional(tree: Any, by: str) -> None:
  """Checks that arguments have no modules, where these would be copied.

  Args:
    tree: the arguments.
    by: the option or function that copies them.

  Raises:
    LayoutError: they have; changes of their variables would be lost.
  """
  if has_modules(tree):
    kinds = {type(leaf).__name__ for leaf in jax.tree.leaves(tree, is_leaf=ends_walk) if is_module(leaf)}
    raise LayoutError(
      f'{by} copies its arguments, and there are NNX modules or variables among them ({", ".join(sorted(kinds))}): '
      'changes of their variables would be lost.\n'
      'Fix: pass nnx.state(module), and return the new state.'
    )


def rebuilt_modules(tree: Any, leaves: Iterable[Any]) -> Any:
  """The tree with other leaves, in the order of `jax.tree.leaves`; modules and variables that are shared stay shared.

  JAX would make two of one that has two places in a tree. What modules hold beside their arrays stays.
  """
  numbers, merged = _split_tree(tree)
  new = dict(zip(reversed(numbers), reversed(list(leaves)), strict=True))
  return merged(new[number] for number in range(len({*numbers} - {None})))


def first_places(tree: Any) -> list[int]:
  """For each array of a tree whose modules are split, its first position in `jax.tree.leaves`, where a shared one has several."""
  if not has_modules(tree):
    return list(range(len(jax.tree.leaves(tree))))
  numbers, _ = _split_tree(tree)
  positions = {number: at for at, number in reversed([*enumerate(numbers)])}
  return [positions[number] for number in range(len({*numbers} - {None}))]


def arrays_of(tree: Any) -> list[Any]:
  """The leaves of a tree, without what modules hold beside their arrays; a shared array once."""
  leaves = jax.tree.leaves(tree)
  return [leaves[place] for place in first_places(tree)]


class LeafNumber(int):
  """The number of a leaf, unlike an integer that a module holds beside its arrays."""


def leaf_numbers(tree: Any) -> list[Any]:
  """The numbers that are a tree's leaves; None for other leaves."""
  return [leaf if isinstance(leaf, LeafNumber) else None for leaf in jax.tree.leaves(tree)]


def _split_tree(tree: Any) -> tuple[list[int | None], Callable[[Iterable[Any]], Any]]:
  """A tree with its modules split.

  Returns:
    For each of `jax.tree.leaves`, its number among the arrays of split modules, several times for a shared one; None for what
    is no array. And a function from as many arrays to the tree of these.
  """
  indices = compat.nnx_ref_map()
  nodes, treedef = jax.tree.flatten(tree, is_leaf=is_module)
  split = [compat.nnx_split(node, indices) if is_module(node) else (None, [node]) for node in nodes]
  arrays, structure = jax.tree.flatten([each for _, each in split])

  def merged(values: Iterable[Any]) -> Any:
    parts = zip(
      (definition for definition, _ in split), jax.tree.unflatten(structure, values), strict=True
    )
    index = compat.nnx_index_map({})
    return jax.tree.unflatten(
      treedef,
      [
        part[0] if definition is None else compat.nnx_merge(definition, part, index)
        for definition, part in parts
      ],
    )

  return leaf_numbers(merged(map(LeafNumber, range(len(arrays))))), merged


def attributes_as_keys(tree: Any, seen: set[int] | None = None) -> Any:
  """The tree with the attributes of NNX modules as keys, and fields of Optax as fields; leaves and their order stay.

  Args:
    tree: any tree.
    seen: if given, a module that occurs again is left out, so that a module may contain itself: the ids of those so far.
  """
  return jax.tree.map(
    lambda node: _keyed(node, seen) if _is_keyed(type(node)) else node,
    tree,
    is_leaf=lambda node: _is_keyed(type(node)),
  )


def has_keyed_nodes(kinds: set[type]) -> bool:
  """Whether nodes of these types have to be read with `attributes_as_keys`."""
  return any(map(_is_keyed, kinds))


@functools.cache
def _is_keyed(cls: type) -> bool:
  return compat.is_nnx_module_type(cls) or compat.is_nnx_state_type(cls)


class _Keyed:
  """The children of a node, in its own order, under other keys.

  Attributes:
    entries: JAX's key of each child.
    children: the children.
  """

  def __init__(self, entries: tuple[Any, ...], children: Iterable[Any]):
    self.entries, self.children = entries, tuple(children)

  def __getitem__(self, key: Any) -> Any:
    return dict(zip(map(key_value, self.entries), self.children, strict=True))[key]

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__'):
      raise AttributeError(name)
    return self[name]


class _KeyedOptaxState(_Keyed, OptaxState):
  """A state of Optax whose fields `nnx.state` has made keys."""


for _cls in (_Keyed, _KeyedOptaxState):
  jax.tree_util.register_pytree_with_keys(
    _cls, lambda node: (tuple(zip(node.entries, node.children, strict=True)), node.entries), _cls
  )


def _keyed(node: Any, seen: set[int] | None) -> Any:
  """A module or a state, with the keys of its state."""
  if seen is not None:
    if id(node) in seen:
      return None
    seen.add(id(node))
  below = one_level(node)
  entries = tuple(DictKey(key_value(entry)) for entry, _ in below)
  is_optimizer = compat.is_nnx_state_type(type(node))
  return _Keyed(
    entries,
    (
      _optimizer_state(child)
      if is_optimizer and key_value(entry) == 'opt_state'
      else _below(child, seen)
      for entry, child in below
    ),
  )


def _below(child: Any, seen: set[int] | None) -> Any:
  """A child of a module or a state; nested states are plain dictionaries there."""
  return _keyed(child, seen) if isinstance(child, dict) else attributes_as_keys(child, seen)


def _optimizer_state(node: Any) -> Any:
  """The state of an optimizer as a part of an NNX state: its levels are dictionaries, down to the parameters' keys."""
  below = [] if compat.is_variable_type(type(node)) else one_level(node)
  keys = {key_value(entry) for entry, _ in below}
  if keys and all(isinstance(key, int) for key in keys):
    return _Keyed(
      tuple(DictKey(key_value(e)) for e, _ in below), (_optimizer_state(c) for _, c in below)
    )
  if keys and any(keys <= fields for fields in optax_fields()):
    entries = tuple(GetAttrKey(key_value(entry)) for entry, _ in below)
    return _KeyedOptaxState(entries, (_optimizer_state(child) for _, child in below))
  return node


def is_optimizer(node: Any) -> bool:
  """Whether a node is an `nnx.Optimizer`, whose state has the names of its parameters."""
  return compat.is_nnx_module_type(type(node)) and hasattr(node, 'opt_state')
