"""Plans: the structure, shapes, names and shardings of a state under a layout, as a value.

    plan = layout.plan(create_state, key, x)   # nothing runs
    state = plan.init()
    target = plan.abstract()                   # or give the plan itself to checkpoint.restore
    state = plan.shard(host_state)
    print(plan.explain(state))

A state without boxes has no names. Its plan has them, so whoever needs them takes the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from flax_spmd._src import compat
from flax_spmd._src.cycles import check_no_cycles
from flax_spmd._src.data.common_values import check_arguments
from flax_spmd._src.data.key_arrays import put_all
from flax_spmd._src.data.unusable_leaves import check_usable
from flax_spmd._src.explanation import Explanation, explain_plan
from flax_spmd._src.jit.jitted import Jitted
from flax_spmd._src.mesh import describe
from flax_spmd._src.multihost import processes_that_compare
from flax_spmd._src.names import box_trees
from flax_spmd._src.names.tree_names import leaf_names
from flax_spmd._src.names.unit_paths import leaves_with_paths
from flax_spmd._src.plan.deviations import planned_memory
from flax_spmd._src.plan.placement_shardings import check_concrete
from flax_spmd._src.plan.planner import Planner
from flax_spmd._src.plan.unmatched_paths import check_some_path_matches
from flax_spmd._src.public import public
from flax_spmd._src.source_lines import warn
from flax_spmd._src.strictness import check_state
from flax_spmd._src.text import array_text
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import LayoutError, Problem, raise_problems

if TYPE_CHECKING:
  from flax_spmd._src.layout import Layout

State = TypeVar('State')

_NOT_PARTITIONABLE = (
  'jax_threefry_partitionable is off: generating a sharded random array needs communication, or generates '
  "the whole array on every device. Turn it on with jax.config.update('jax_threefry_partitionable', True); "
  'this changes the random numbers.'
)


@public('flax_spmd')
class Plan(Generic[State]):
  """The plan of a state under a layout; made by `Layout.plan`.

  Attributes:
    layout: the layout.
    boxed: whether the state has boxes.

  Example:
    >>> layout = Layout({'data': 2, 'model': 4}, (('mlp', 'model'),))
    >>> create = lambda: {'w': LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp'))}
    >>> plan = layout.plan(create, boxed=False)
    >>> plan.names, plan.shardings['w'].spec
    ([('embed', 'mlp')], P(None, 'model'))
    >>> plan.shard({'w': np.zeros((8, 16))})['w'].sharding.spec
    P(None, 'model')
  """

  def __init__(
    self,
    layout: Layout,
    planner: Planner,
    create: Jitted[..., State],
    arrays: dict[str, Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None,
    boxed: bool,
  ):
    self.layout = layout
    self.boxed = boxed
    self._planner = planner
    self._create = create
    self._arrays, self._uncompared = arrays, arguments
    state = create.eval_shape(**arrays)
    check_no_cycles(state)
    leaves = jax.tree.leaves(state)
    self._shardings = list(map(_in_planned_memory, planner.leaf_shardings(state), leaves))
    check_some_path_matches(layout.rules, state, self._shardings)
    self._state = _with_shardings(state, self._shardings)
    if layout.strict:
      check_state(planner, self._state)

  def __repr__(self) -> str:
    count = len(self._shardings)
    return (
      f'<plan of a state of {count} array{"" if count == 1 else "s"} on {describe(self.layout.mesh)}>'
    )

  @property
  def names(self) -> list[Any]:
    """The axis names of each leaf, in the order of `jax.tree.leaves(state)`; None for a leaf without names."""
    return leaf_names(self._state)

  @property
  def shardings(self) -> Any:
    """The sharding of every array: a tree like the state without boxes, as `jax.jit` accepts it."""
    return self._plain(self._state, self._shardings)

  def abstract(self) -> State:
    """The state with a `jax.ShapeDtypeStruct` (shape, dtype and sharding) for every array."""
    return self._state if self.boxed else box_trees.unbox(self._state, apply_constraint=False)

  def init(self) -> State:
    """Creates the state, sharded from the start; see `Layout.init`.

    Raises:
      MeshError: the mesh is abstract.
      LayoutError: the plan was made with abstract arguments; or, in a job of several processes, their layouts or
        arguments differ.
    """
    mesh = self.layout.mesh
    check_concrete(mesh)
    abstract = [array for array in self._arrays.values() if isinstance(array, jax.ShapeDtypeStruct)]
    if abstract:
      kinds = ', '.join(dict.fromkeys(array_text(array.dtype, array.shape) for array in abstract))
      raise LayoutError(
        f'The plan was made with abstract arguments ({kinds}), so it cannot create a state.\n'
        'Fix: pass arrays in their place. One that the function takes abstract too, as lazy_init does, goes into it: '
        'lambda key: model.lazy_init(key, x).'
      )
    if mesh.size > 1 and not compat.threefry_partitionable():
      warn(_NOT_PARTITIONABLE)
    if self._uncompared is not None:
      check_arguments(*self._uncompared, processes_that_compare(mesh))
    self.layout.check_processes(self._state)
    state = self._create(**self._arrays)
    return state if self.boxed else box_trees.unbox(state, apply_constraint=False)

  def shard(self, tree: Any) -> State:
    """Transfers existing arrays, such as a state on the host, to the planned shardings.

    Args:
      tree: arrays in the structure of the state, with or without boxes.

    Returns:
      The state, with every leaf as a `jax.Array`, and with boxes if the plan has them.

    Raises:
      MeshError: the mesh is abstract.
      LayoutError: the tree is not a state of this plan (lists every leaf that differs).
    """
    check_concrete(self.layout.mesh)
    leaves = self._leaves(tree)
    try:
      return box_trees.rebuilt(self.abstract(), put_all(leaves, self._shardings))
    except Exception:
      check_usable(leaves_with_paths(tree))
      raise

  def box(self, state: Any) -> State:
    """The state with the boxes of the plan; it may have them already.

    Raises:
      LayoutError: this is not a state of this plan (lists every leaf that differs).
    """
    return box_trees.rebuilt(self._state, self._leaves(state))

  def shardings_of(self, state: Any) -> list[NamedSharding]:
    """The planned sharding of each leaf of a state of this plan.

    Raises:
      LayoutError: this is not a state of this plan (lists every leaf that differs).
    """
    self._leaves(state)
    return list(self._shardings)

  def fits(self, state: Any) -> bool:
    """Whether this is a state of this plan, by its structure and shapes, with or without boxes."""
    return _shapes(state) == _shapes(self._state)

  def explain(self, state: Any = None) -> Explanation:
    """Explains the planned shardings, and how the arrays of an existing state deviate from them.

    Args:
      state: a state of this plan, with or without boxes; None: only the plan.

    Raises:
      LayoutError: this is not a state of this plan (lists every leaf that differs).
    """
    return explain_plan(self.layout, self._state, None if state is None else self._leaves(state))

  def _plain(self, tree: Any, leaves: Sequence[Any]) -> Any:
    plain = box_trees.unbox(tree, apply_constraint=False)
    return jax.tree.unflatten(jax.tree.structure(plain), leaves)

  def _leaves(self, tree: Any) -> list[Any]:
    """The leaves of a state of this plan."""
    shapes, given = _shapes(self._state), _shapes(tree)
    if list(given) != list(shapes) or any(given[path] != shape for path, shape in shapes.items()):
      raise_problems(_differences(shapes, given))
    return jax.tree.leaves(tree)


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  """The shape of each leaf by its path, without boxes."""
  leaves = jax.tree_util.tree_leaves_with_path(box_trees.plain(tree))
  return {path_string(path): np.shape(leaf) for path, leaf in leaves}


def _differences(
  planned: dict[str, tuple[int, ...]], given: dict[str, tuple[int, ...]]
) -> list[Problem]:
  fix = 'pass a state of this plan, or plan the function that created this one.'
  missing = [
    Problem(f'{path}: planned, but not in the tree.', fix) for path in planned if path not in given
  ]
  more = [
    Problem(f'{path}: in the tree, but not planned.', fix) for path in given if path not in planned
  ]
  other = [
    Problem(f'{path}: planned with shape {planned[path]}, but it has shape {given[path]}.', fix)
    for path in planned
    if path in given and planned[path] != given[path]
  ]
  return missing + more + other


def _in_planned_memory(sharding: NamedSharding, leaf: Any) -> NamedSharding:
  memory = planned_memory(leaf)
  return sharding if memory is None else sharding.with_memory_kind(memory)


def _with_shardings(state: Any, shardings: Sequence[NamedSharding]) -> Any:
  """The abstract state; modules keep what they hold beside their arrays, such as the dtypes of gradients."""
  abstract = (
    jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(leaf, 'weak_type', False)
    )
    if hasattr(leaf, 'dtype')
    else leaf
    for leaf, sharding in zip(jax.tree.leaves(state), shardings, strict=True)
  )
  return box_trees.rebuilt(state, abstract)
