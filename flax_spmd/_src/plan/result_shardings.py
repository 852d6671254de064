"""Result shardings: the sharding of each array of a jitted function's result, from names and arguments.

    plan_results(result, (args, kwargs), constrained, planner)   # a PlannedResult per leaf of the result

In this order, for every part of a result at any depth:

* a part with names is sharded by the layout's rules;
* a part without names that has the structure and shapes of an argument, or of a part of one, comes out as that
  came in;
* the compiler chooses the rest.

A single array says less than a structure: activations may have the shape of a weight. So it comes out as an argument
that is itself one array of its shape and dtype, or as a part of an argument with the same key; and if the function
constrains values of its shape, the constraints decide.

The memory of a result, the device's or the host's, is the one that the program puts it into; see `jitted`. Under rules
with `host`, it is that of the arguments above, also where a constraint or the compiler decides the sharding.

Nothing else is remembered: neither other calls nor other models matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.tree_util import DictKey, GetAttrKey, KeyPath

from flax_spmd._src.mesh import MeshLike, placed_sharding
from flax_spmd._src.names import box_trees
from flax_spmd._src.plan.planner import Planner
from flax_spmd._src.rules.clauses import HOST_MEMORY
from flax_spmd._src.rules.placements import PlannedResult
from flax_spmd._src.tree_paths import key_value


def plan_results(
  result: Any, arguments: Any, constrained: Sequence[bool], planner: Planner
) -> list[PlannedResult]:
  """The plan of every leaf of a result.

  Args:
    result: the abstract result.
    arguments: the dynamic arguments, a pair `(args, kwargs)`; leaves may be abstract.
    constrained: per leaf of the result, whether the function constrains values of its shape.
    planner: the planner of the layout.

  Raises:
    LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: names of the result do not fit the rules or the
      mesh.
  """
  inputs = _placed(arguments, planner.mesh)
  typed = _is_typed(planner.mesh)
  found = (
    []
    if typed and not planner.rules.uses_host
    else _match(_Subtrees(result), _Subtrees(arguments), inputs)
  )
  matches = [
    (part, sources[0])
    for part, sources in found
    if len(sources) == 1 and not (part.is_array and constrained[part.start])
  ]
  named = _by_names(result, arguments, matches, planner)
  kept = _kept(matches, inputs)
  kept = _kept_on_host(kept, result) if typed else kept
  on_host = _from_the_host(found, inputs) if planner.rules.uses_host else ()
  return [
    PlannedResult(named[index], 'names')
    if named[index] is not None
    else kept.get(index, PlannedResult(None, on_host=index in on_host))
    for index in range(len(named))
  ]


def same_forms(result: Any, arguments: Any, mesh: MeshLike) -> list[tuple[int, ...]]:
  """For each leaf of a result, the leaves of the arguments that it has the form of.

  Several if it is ambiguous which one it comes from, none if it has the form of no argument. The arguments are
  those of `plan_results`.
  """
  found: list[tuple[int, ...]] = [()] * len(jax.tree.leaves(result))
  for part, sources in _match(_Subtrees(result), _Subtrees(arguments), _placed(arguments, mesh)):
    for offset in range(part.stop - part.start):
      found[part.start + offset] = tuple(each.start + offset for each in sources)
  return found


def successors(result: Any, arguments: Any) -> list[int | None]:
  """For each leaf of a result, the leaf of the arguments whose place it takes in the next call.

  None if it has the form of no argument, or of several. The arguments are those of `plan_results`.
  """
  found: list[int | None] = [None] * len(jax.tree.leaves(result))
  each_of_its_own = range(len(jax.tree.leaves(arguments)))
  for part, sources in _match(_Subtrees(result), _Subtrees(arguments), each_of_its_own):
    if len(sources) == 1:
      found[part.start : part.stop] = range(sources[0].start, sources[0].stop)
  return found


def _placed(arguments: Any, mesh: MeshLike) -> list[NamedSharding | None]:
  return [placed_sharding(leaf, mesh) for leaf in jax.tree.leaves(arguments)]


def _is_typed(mesh: MeshLike) -> bool:
  """Whether shardings are part of the types of values, so that the program itself decides them."""
  return AxisType.Explicit in mesh.axis_types


class _Subtree(NamedTuple):
  """A part of a tree: any node, or a leaf. Boxes do not count as nodes.

  Attributes:
    form: its structure without boxes, and the shapes of its arrays; for a single array also its dtype.
    boxed: its structure with boxes.
    start, stop: its leaves among those of the tree.
    depth: number of nodes above it.
    key: the key or field name that leads to it; None for an element of a sequence.
  """

  form: Any
  boxed: Any
  start: int
  stop: int
  depth: int
  key: Any

  @property
  def is_array(self) -> bool:
    """Whether this is a single array, not in a container."""
    return len(self.form) == 3


class _Subtrees:
  """The parts of one tree."""

  def __init__(self, tree: Any):
    paths, self.boxed = jax.tree_util.tree_flatten_with_path(tree)
    self.plain = jax.tree.structure(box_trees.unbox(tree, apply_constraint=False))
    self._paths: list[KeyPath] = [path for path, _ in paths]
    self._shapes = [tuple(getattr(leaf, 'shape', ())) for _, leaf in paths]
    self._dtypes = [_dtype(leaf) for _, leaf in paths]

  def root(self) -> _Subtree:
    """The whole tree."""
    return self._part(self.plain, self.boxed, 0, 0)

  def children(self, part: _Subtree) -> Iterator[_Subtree]:
    """The parts directly below a part."""
    plain, start = part.form[0], part.start
    for child, boxed in zip(plain.children(), _without_box(part.boxed).children(), strict=True):
      if child.num_leaves:
        yield self._part(child, boxed, start, part.depth + 1)
      start += child.num_leaves

  def all(self, part: _Subtree | None = None) -> Iterator[_Subtree]:
    """All parts, outer ones first."""
    part = part or self.root()
    yield part
    for child in self.children(part):
      yield from self.all(child)

  def _part(self, plain: Any, boxed: Any, start: int, depth: int) -> _Subtree:
    stop = start + plain.num_leaves
    form: Any = plain, tuple(self._shapes[start:stop])
    if plain.num_nodes == plain.num_leaves == 1:
      form += (self._dtypes[start],)
    return _Subtree(form, boxed, start, stop, depth, self._key(start, depth))

  def _key(self, leaf: int, depth: int) -> Any:
    """The last key of the first `depth` nodes above a leaf."""
    path = self._paths[leaf][:depth] if leaf < len(self._paths) else ()
    return key_value(path[-1]) if path and isinstance(path[-1], (DictKey, GetAttrKey)) else None


def _dtype(leaf: Any) -> Any:
  """The dtype of an array as a program has it: those of NumPy may have 64 bits."""
  dtype = getattr(leaf, 'dtype', None)
  return jax.dtypes.canonicalize_dtype(dtype) if isinstance(leaf, (np.ndarray, np.generic)) else dtype


def _without_box(boxed: Any) -> Any:
  """The structure of a box's value, for a structure that is a box."""
  data = boxed.node_data()
  while data is not None and box_trees.is_box_type(data[0]):
    [boxed] = boxed.children()
    data = boxed.node_data()
  return boxed


_ARGUMENT_DEPTH = 2  # below the pair `(args, kwargs)` and the tuple or dict of arguments


def _match(
  results: _Subtrees, arguments: _Subtrees, inputs: Sequence[Any]
) -> list[tuple[_Subtree, list[_Subtree]]]:
  """The parts of a result that have the form of a part of the arguments, each with that part; see `_sources`."""
  by_form: dict[Any, list[_Subtree]] = defaultdict(list)
  for part in arguments.all():
    if part.depth >= _ARGUMENT_DEPTH and part.stop > part.start:
      by_form[part.form].append(part)
  matched: dict[Any, list[_Subtree]] = defaultdict(list)
  for part in _matching(results, results.root(), by_form):
    matched[part.form].append(part)
  return [
    (part, sources)
    for form, parts in matched.items()
    for part, sources in zip(parts, _sources(parts, by_form[form], inputs), strict=True)
  ]


def _matching(results: _Subtrees, part: _Subtree, forms: Any) -> Iterator[_Subtree]:
  """The outermost parts that have one of the forms."""
  if part.form in forms:
    yield part
    return
  for child in results.children(part):
    yield from _matching(results, child, forms)


def _sources(
  parts: Sequence[_Subtree], candidates: Sequence[_Subtree], inputs: Sequence[Any]
) -> list[list[_Subtree]]:
  """The argument that each of several parts of one form comes from; several or none where that is ambiguous.

  A part of an argument with the same key comes first, then the outermost. Arguments that are sharded alike are
  equivalent. As many results as arguments of one form correspond in order, as in JAX's donation.
  """
  sources = []
  for number, part in enumerate(parts):
    outer = [one for one in candidates if one.depth == _ARGUMENT_DEPTH or not part.is_array]
    closest = [one for one in candidates if one.key == part.key is not None] or _outermost_of(outer)
    distinct = {tuple(inputs[one.start : one.stop]) for one in closest}
    if len(distinct) == 1:
      sources.append(closest[:1])
    else:
      sources.append([outer[number]] if len(parts) == len(outer) else closest)
  return sources


def _outermost_of(candidates: Sequence[_Subtree]) -> list[_Subtree]:
  depth = min((part.depth for part in candidates), default=0)
  return [part for part in candidates if part.depth == depth]


def _kept(
  matches: Iterable[tuple[_Subtree, _Subtree]], inputs: Sequence[Any]
) -> dict[int, PlannedResult]:
  """The plan of the leaves of a result that come out as they came in, by index."""
  return {
    part.start + offset: PlannedResult(inputs[source.start + offset], source.start + offset)
    for part, source in matches
    for offset in range(part.stop - part.start)
    if inputs[source.start + offset] is not None
  }


def _kept_on_host(kept: Mapping[int, PlannedResult], result: Any) -> dict[int, PlannedResult]:
  """The plans of those leaves that come out in the host's memory, sharded as their types."""
  leaves = jax.tree.leaves(result)
  return {
    index: planned._replace(sharding=_as_typed(planned.sharding, leaves[index].sharding))
    for index, planned in kept.items()
    if planned.sharding is not None and planned.sharding.memory_kind == HOST_MEMORY
  }


def _as_typed(sharding: Any, of_type: Any) -> Any:
  """A sharding with the spec of a type, which has Explicit axes only: if others exist, the sharding as it is."""
  if {*sharding.mesh.axis_types} != {AxisType.Explicit}:
    return sharding
  return NamedSharding(sharding.mesh, of_type.spec, memory_kind=sharding.memory_kind)


def _from_the_host(
  found: Iterable[tuple[_Subtree, Sequence[_Subtree]]], inputs: Sequence[NamedSharding | None]
) -> set[int]:
  """The leaves of a result whose arguments are all in the host's memory, whatever decides about their sharding."""
  hosted = [sharding is not None and sharding.memory_kind == HOST_MEMORY for sharding in inputs]
  return {
    part.start + offset
    for part, sources in found
    for offset in range(part.stop - part.start)
    if sources and all(hosted[source.start + offset] for source in sources)
  }


def _by_names(
  result: Any, arguments: Any, matches: Iterable[tuple[_Subtree, _Subtree]], planner: Planner
) -> list[NamedSharding | None]:
  """The sharding of every named leaf of a result; None for leaves without names.

  A part of a result that an argument had already is planned as that part of the argument: with its path, and the
  names of its neighbours.
  """
  shardings = _named_leaves(result, planner)
  if any(sharding is not None for sharding in shardings):
    of_arguments = None
    for part, source in matches:
      if part.boxed == source.boxed:
        of_arguments = of_arguments or _named_leaves(_in_order(arguments), planner)
        shardings[part.start : part.stop] = of_arguments[source.start : source.stop]
  return shardings


def _in_order(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
  """Every argument, in the order of the leaves."""
  args, kwargs = arguments
  return [*args, *(kwargs[name] for name in sorted(kwargs))]


def _named_leaves(tree: Any, planner: Planner) -> list[NamedSharding | None]:
  """The sharding of every named leaf.

  Paths begin in the elements of tuples and lists: each is a state. But optimizer state beside its parameters gets
  its names from them, so several states with names are planned together, unless rules read paths.
  """
  by_state = [planner.named_leaf_shardings(state) for state in states_in(tree)]
  if not planner.looks_at_paths and sum(any(each) for each in by_state) > 1:
    return planner.named_leaf_shardings(tree)
  return [sharding for each in by_state for sharding in each]


def states_in(tree: Any) -> list[Any]:
  """The states in the arguments or the result of a function: the elements of its tuples and lists."""
  return jax.tree.leaves(tree, is_leaf=lambda node: type(node) not in (tuple, list))
