"""Boxes: arrays that carry the names of their dimensions.

    kernel = self.param('kernel', with_logical_partitioning(init, ('embed', 'mlp')), (8, 16))

A Linen initializer returns a box instead of a bare array. The box passes through `init`, optimizers and
checkpoints, and through `nn.scan` and `nn.vmap`, which add and remove axes and their names. A layout derives
the array's sharding from the names.

`Partitioned` names mesh axes, `LogicallyPartitioned` names logical axes. Both have the names, signatures and
results of Flax's classes, and pass Flax's own `isinstance` tests. The invariant: *names are static, the value
is the only leaf*, at the pytree path `.value`.

Every training step flattens and rebuilds all boxes. Two things make that cheap: the static part is one
interned object, compared by identity, and the flatten function runs in C.
"""

from __future__ import annotations

import copy
import functools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import flax.linen as nn
import jax
import numpy as np
from flax import serialization
from flax.core import meta
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.active_layout import in_force, report_names
from flax_spmd._src.constraints import constrain_on, mesh_for_constraints, resolve_for_constraint
from flax_spmd._src.mesh import MeshLike, PortableMesh, axis_sizes, check_mesh
from flax_spmd._src.public import public
from flax_spmd._src.rules.decisions import UNCONSTRAINED, Names, Policies
from flax_spmd._src.rules.mesh_axes import resolve_axes
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.shared import shared
from flax_spmd._src.text import array_text, plain_strings, shown, value_text
from flax_spmd.errors import LayoutError, MeshAxisError, MeshError, RulesError, raise_problems

PARTITION_NAME = meta.PARTITION_NAME

AxisMetadata = meta.AxisMetadata


if TYPE_CHECKING:
  _Base = AxisMetadata[Any]
else:
  _Base = object  # registered as AxisMetadata instead: inheriting would add a `__dict__` to every box


class Static:
  """The static part of a box: names, mesh and rules. Interned, so that equal ones compare by identity.

  `stored` is the spec that the box is opened with, in the body of a transformation that has removed an axis of a
  box that is not stored as its names say (see `InForce`); else None. `or_axes` is whether a name without a rule is the
  mesh axis of that name, as in NNX.
  """

  __slots__ = ('__weakref__', 'logical', 'mesh', 'names', 'or_axes', 'rules', 'stored')

  names: Any
  logical: bool
  mesh: MeshLike | None
  rules: Rules | None
  stored: PartitionSpec | None
  or_axes: bool

  def __new__(
    cls,
    names: Any,
    logical: bool,
    mesh: MeshLike | None = None,
    rules: Rules | None = None,
    stored: PartitionSpec | None = None,
    or_axes: bool = False,
  ):
    """The interned object with this content."""
    return _interned(names, logical, mesh, rules, stored, or_axes)

  def renamed(self, names: Names | None) -> Static | None:
    """The static part with other names, and without a mesh; None for no names."""
    if names is None:
      return None
    return Static(tuple(names), self.logical, None, self.rules, or_axes=self.or_axes)

  def __repr__(self) -> str:
    return repr(self.names)

  def __copy__(self) -> Static:
    return self

  def __deepcopy__(self, memo: dict[int, Any]) -> Static:
    return self

  def __reduce__(self):
    mesh = None if self.mesh is None else PortableMesh.of(self.mesh)
    return _unpickled_static, (self.names, self.logical, mesh, self.rules, self.or_axes)


def _unpickled_static(
  names: Any, logical: bool, mesh: PortableMesh | None, rules: Rules | None, or_axes: bool = False
) -> Static:
  """The static part in this process. Without the devices of its mesh, it has none, and uses that in force."""
  if mesh is None or mesh.devices is None:
    return Static(names, logical, mesh and mesh.here(), rules, or_axes=or_axes)
  return Static(names, logical, mesh.on_devices(), rules, or_axes=or_axes)


@shared
def _interned(*content: Any) -> Static:
  static = object.__new__(Static)
  static.names, static.logical, static.mesh, static.rules, static.stored, static.or_axes = content
  return static


_READ_DIRECTLY = (
  'Fix: pass flax_spmd.unbox(variables) to a model that reads its variables directly, or create them without boxes, '
  'by layout.init(..., boxed=False).'
)


@public('flax_spmd')
class Partitioned(_Base):
  """A value and the mesh axes that its dimensions are sharded over.

  Args:
    value: an array, a tree, or a stand-in such as a ShapeDtypeStruct or a sharding.
    names: per dimension a mesh axis, a tuple of them, or None. Under a layout, a name that is no axis of its mesh follows its
      rules.
    mesh: mesh of the sharding constraint; by default the one in force when the box is opened. Boxes with
      different meshes differ in pytree structure, so leave it out if possible.

  Example:
    >>> box = Partitioned(jnp.ones((8, 16)), ('data', None))
    >>> box
    Partitioned(float32[8,16], names=('data', None))
    >>> box.get_partition_spec()
    P('data', None)
  """

  __slots__ = ('_pair',)

  def __init__(self, value: Any, names: Names, mesh: MeshLike | None = None):
    if type(value) is Static:  # unflattened: a training step does this to every box
      self._pair = (names, value)
    else:
      self._pair = ((value,), Static(_canonical(names), False, _checked(mesh)))

  if not TYPE_CHECKING:  # pyright knows `__dict__` as final

    @property
    def __dict__(self) -> dict[str, Any]:
      """The fields, for `nnx.bridge`, which reads a box by `vars(box)`."""
      return self._fields()

    def __getattr__(self, name: str) -> Any:
      """Raises: a box has few of an array's attributes. A model that reads its variables directly asks for others."""
      text = f'{type(self).__name__!r} object has no attribute {name!r}'
      if not name.startswith('_') and hasattr(jax.Array, name):
        text += f': it is a box around an array, with names {self.names!r}.\n{_READ_DIRECTLY}'
      raise AttributeError(text)

  def __jax_array__(self) -> Any:
    """Raises: a function of JAX gets a box in place of an array."""
    text = f'{self!r} is a box around an array, and no array.'
    raise TypeError(f'{text}\n{_READ_DIRECTLY}')

  @property
  def static(self) -> Static:
    """Everything but the value; one object shared by all boxes with the same names."""
    return self._pair[1]

  @property
  def value(self) -> Any:
    """The boxed value."""
    return self._pair[0][0]

  @property
  def names(self) -> Any:
    """One name per dimension."""
    return self.static.names

  @property
  def mesh(self) -> MeshLike | None:
    """The box's own mesh, if any."""
    return self.static.mesh

  @property
  def shape(self) -> tuple[int, ...]:
    """The value's shape."""
    return self.value.shape

  @property
  def ndim(self) -> int:
    """The value's rank."""
    return len(self.value.shape)

  @property
  def dtype(self) -> Any:
    """The value's dtype."""
    return self.value.dtype

  @property
  def size(self) -> int:
    """The number of the value's elements."""
    return self.value.size

  def unbox(self, apply_constraint: bool = True) -> Any:
    """The value; a traced array gets the sharding constraint of its names.

    There is no constraint without a mesh, for a value that is not traced, or if there are more names than
    dimensions: fused layers initialise their kernels flat.

    Args:
      apply_constraint: whether to apply the constraint.
    """
    return self._constrained('flax_spmd') if apply_constraint else self.value

  def _constrained(self, by: str) -> Any:
    """The value with the constraint of `unbox`, which the constraint log attributes to `by`."""
    if not isinstance(self.value, Tracer) or not self._fits():
      return self.value
    spec = self._stored_spec()
    mesh = mesh_for_constraints(self.mesh if spec is None else None)
    spec = self._spec_on(mesh) if spec is None and mesh is not None else spec
    if mesh is None or spec is None:
      return self.value
    return constrain_on(mesh, self.value, spec, self.names, by=by)

  def replace_boxed(self, val: Any) -> Self:
    """A box with the same names around another value."""
    return type(self)(self.static, (val,))

  def replace(self, **changes: Any) -> Self:
    """A box with some of `value`, `names`, `mesh` (and `rules`) changed."""
    return type(self)(**{**self._fields(), **changes})

  def add_axis(self, index: int, params: Mapping[Any, Any]) -> Self:
    """The box after a transformation has stacked its value along dimension `index`.

    The new dimension is named `params[PARTITION_NAME]`. If that is missing, its name is None and a warning is
    issued.
    """
    name = self._partition_name(params)
    names = list(self.names)
    index = self._dimension(index, len(names) + 1)
    names += [None] * (index - len(names))
    names.insert(index, name)
    return self.replace(names=tuple(names))

  def remove_axis(self, index: int, params: Mapping[Any, Any]) -> Self:
    """The box before a transformation stacks its value along dimension `index`.

    Raises:
      LayoutError: the dimension does not exist, or its name differs from `params[PARTITION_NAME]`.
    """
    name = self._partition_name(params, warn=False)
    names = list(self.names)
    index = self._dimension(index, len(names))
    if index >= len(names) or names[index] != name:
      actual = f'is {names[index]!r}' if index < len(names) else 'does not exist'
      raise LayoutError(
        f'{value_text(self)} in {compat.current_module() or "no module"}: a transformation removes '
        f'dimension {index}, named {value_text(name)} by its metadata_params, but that dimension {actual}.\n'
        f'Fix: give the transformation the axis and the {value_text(PARTITION_NAME)} that the variables were '
        'initialised with.'
      )
    del names[index]
    inner, stored = self.replace(names=tuple(names)), self._stored_spec()
    return (
      inner if stored is None else inner._opened_as(without_dimension(stored, index, len(self.names)))
    )

  def _opened_as(self, spec: PartitionSpec) -> Self:
    """The box, opened with a spec other than that of its names."""
    own = self.static
    static = Static(own.names, own.logical, own.mesh, own.rules, spec)
    return type(self)(cast(Any, static), (self.value,))

  def get_partition_spec(self) -> PartitionSpec:
    """The names as a PartitionSpec."""
    return PartitionSpec(*self.names)

  def get_sharding(self, mesh: MeshLike) -> NamedSharding:
    """The sharding of the value on `mesh`."""
    return NamedSharding(mesh, self.get_partition_spec())

  def to_nnx_metadata(self) -> dict[str, Any]:
    """The fields under the names that `nnx.Variable` uses; the box itself does not change."""
    fields = self._fields()
    return {'out_sharding': fields.pop('names'), **fields}

  @classmethod
  def from_nnx_metadata(cls, metadata: Mapping[str, Any]) -> Self:
    """The box with the fields from `to_nnx_metadata`; entries added by `nnx` are ignored."""
    return cls(metadata['value'], metadata['out_sharding'], metadata.get('mesh'))

  def _fields(self) -> dict[str, Any]:
    return {'value': self.value, 'names': self.names, 'mesh': self.mesh}

  def _fits(self) -> bool:
    return not isinstance(self.names, str) and len(self.names) <= len(self.value.shape)

  def _stored_spec(self) -> PartitionSpec | None:
    """The spec that the value is stored with, if its names do not decide that."""
    stored = in_force().stored
    spec = self.static.stored or (dict(stored).get(self.static) if stored else None)
    if spec is None:
      return None
    open_dimensions = len(getattr(self.value, 'shape', ())) - len(spec)
    return PartitionSpec(*spec, *[UNCONSTRAINED] * open_dimensions) if open_dimensions > 0 else spec

  def _spec_on(self, mesh: MeshLike) -> PartitionSpec | None:
    """The spec of the value's names on `mesh`; None for no constraint.

    Under a layout there is no constraint for names that do not fit the mesh: its planner reports them, with
    their path.
    """
    if in_force().mesh is not None:
      lenient = Policies(indivisible='replicate')
      if resolve_axes(self.names, self.value.shape, axis_sizes(mesh), lenient).problems:
        return None
    return self.get_partition_spec()

  def _dimension(self, index: int, rank: int) -> int:
    """`index` counted from the front, by the larger of `rank` and the value's rank."""
    if index >= 0:
      return index
    if hasattr(self.value, 'shape'):
      rank = max(rank, len(self.value.shape))
    if index + rank < 0:
      raise LayoutError(
        f'{value_text(self)} in {compat.current_module() or "no module"}: axis {index} of a transformation does '
        f'not exist, the rank is {rank}.\n'
        f'Fix: use an axis from {-rank} to {rank - 1} in variable_axes.'
      )
    return index + rank

  def _partition_name(self, params: Mapping[Any, Any], warn: bool = True) -> Any:
    if warn and PARTITION_NAME not in params:
      warnings.warn(
        f'{self!r} in {compat.current_module() or "no module"}: a transformation adds an '
        'axis without a name. It is None (replicated); name it with '
        f'metadata_params={{nn.PARTITION_NAME: ...}}.',
        stacklevel=2,
      )
    return params.get(PARTITION_NAME)

  def __eq__(self, other: object) -> bool:
    if self is other:
      return True
    if not isinstance(other, Partitioned) or type(self) is not type(other):
      return NotImplemented
    return self.static is other.static and _same_value(self.value, other.value)

  def __hash__(self) -> int:
    return hash((type(self), self.static))

  def __repr__(self) -> str:
    fields = {'names': self.names, 'mesh': self.mesh, 'rules': self.static.rules}
    shown = [f'{key}={value!r}' for key, value in fields.items() if value is not None]
    return f'{type(self).__name__}({", ".join([_short(self.value), *shown])})'

  def __copy__(self) -> Self:
    return self

  def __deepcopy__(self, memo: dict[int, Any]) -> Self:
    return self.replace_boxed(copy.deepcopy(self.value, memo))

  def __reduce__(self):
    return _unpickled_box, (type(self), self.static, self.value)


@public('flax_spmd')
class LogicallyPartitioned(Partitioned):
  """A value and the logical names of its dimensions.

  Args:
    value: an array, a tree, or a stand-in such as a ShapeDtypeStruct or a sharding.
    names: per dimension a logical name, or None.
    mesh: mesh of the sharding constraint; by default the one in force when the box is opened.
    rules: rules for the names; by default those in force when the box is opened.

  Example:
    >>> LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp'))
    LogicallyPartitioned(float32[8,16], names=('embed', 'mlp'))
  """

  __slots__ = ()

  def __init__(self, value: Any, names: Names, mesh: MeshLike | None = None, rules: Any = None):
    if type(value) is Static:
      self._pair = (names, value)
    else:
      own_rules = None if rules is None else _of_names_only(Rules.of(rules))
      self._pair = ((value,), Static(_canonical(names), True, _checked(mesh), own_rules))

  @property
  def rules(self) -> Rules | None:
    """The box's own rules, if any."""
    return self.static.rules

  def get_sharding(self, mesh: MeshLike) -> NamedSharding:
    """The sharding of the value on `mesh`, by the box's rules or those in force.

    Raises:
      UnmatchedNameError, ConflictError: as the table's policies demand.
    """
    check_mesh(mesh)
    rules = in_force().rules if self.rules is None else self.rules
    report_names(self.names)
    return NamedSharding(mesh, rules.spec(self.names) or PartitionSpec())

  @classmethod
  def from_nnx_metadata(cls, metadata: Mapping[str, Any]) -> Self:
    """The box with the fields from `to_nnx_metadata`; entries added by `nnx` are ignored."""
    return cls(
      metadata['value'],
      metadata['out_sharding'],
      metadata.get('mesh'),
      metadata.get('sharding_rules'),
    )

  def to_nnx_metadata(self) -> dict[str, Any]:
    """The fields under the names that `nnx.Variable` uses; the box itself does not change."""
    described = super().to_nnx_metadata()
    rules = described.pop('rules')
    return {**described, 'sharding_rules': None if rules is None else rules.pairs}

  def _fields(self) -> dict[str, Any]:
    return {**super()._fields(), 'rules': self.rules}

  def _spec_on(self, mesh: MeshLike) -> PartitionSpec | None:
    rules = in_force(tracing=True).rules if self.rules is None else self.rules
    if not rules.pairs:
      return None
    resolution = resolve_for_constraint(rules, self.names, self.value.shape, mesh)
    raise_problems([problem for problem in resolution.problems if problem.kind is MeshAxisError])
    return resolution.spec


def _of_names_only(rules: Rules) -> Rules:
  if len(rules.pairs) < len(rules):
    raise RulesError(
      f'A box has {value_text(rules)}, but a box can only have rules for logical names.\n'
      'Fix: put rules for paths, fsdp(...) and functions into the table of the layout.'
    )
  return rules


@public('flax_spmd')
def with_partitioning(
  fn: Callable[..., Any], names: Names, mesh: MeshLike | None = None
) -> Callable[..., Partitioned]:
  """Wraps an initializer so that it returns boxes with mesh axes.

  Args:
    fn: an initializer; None for one that is never called.
    names, mesh: see `Partitioned`.

  Raises:
    LayoutError: `fn` is no function.

  Example:
    >>> init = with_partitioning(nn.initializers.ones, (None, 'model'))
    >>> init(jax.random.key(0), (8, 16))
    Partitioned(float32[8,16], names=(None, 'model'))
  """
  return _boxing('with_partitioning', fn, lambda value: Partitioned(value, names, mesh))


@public('flax_spmd')
def with_logical_partitioning(
  fn: Callable[..., Any], names: Names, mesh: MeshLike | None = None, rules: Any = None
) -> Callable[..., LogicallyPartitioned]:
  """Wraps an initializer so that it returns boxes with logical names.

  Args:
    fn: an initializer; None for one that is never called.
    names: per dimension a logical name, or None.
    mesh, rules: see `LogicallyPartitioned`.

  Raises:
    LayoutError: `fn` is no function.

  Example:
    >>> init = with_logical_partitioning(nn.initializers.ones, ('embed', 'mlp'))
    >>> init(jax.random.key(0), (8, 16))
    LogicallyPartitioned(float32[8,16], names=('embed', 'mlp'))
  """
  return _boxing(
    'with_logical_partitioning', fn, lambda value: LogicallyPartitioned(value, names, mesh, rules)
  )


def _boxing(wrapper: str, fn: Any, box: Callable[[Any], Any]) -> Callable[..., Any]:
  """An initializer whose results are boxes. Modules wrap None too, and call it only where they have the parameter."""
  _check_initializer(wrapper, fn, type(None))

  @functools.wraps(fn)
  def boxed(*args, **kwargs):
    _check_initializer(wrapper, fn)
    value = fn(*args, **kwargs)
    if callable(value) and not hasattr(value, 'shape'):
      raise LayoutError(
        f'The initializer {fn.__name__} of {wrapper} returned a function.\n'
        f'Fix: call it first: {wrapper}({fn.__name__}(), names).'
      )
    return box(value)

  return boxed


def _check_initializer(wrapper: str, fn: Any, also: Any = ()) -> None:
  if not callable(fn) and not isinstance(fn, also):
    raise LayoutError(
      f'{wrapper} has a {type(fn).__name__} in place of an initializer.\n'
      f'Fix: write {wrapper}(initializer, names), such as '
      f"{wrapper}(nn.initializers.lecun_normal(), ('embed', 'mlp'))."
    )


def _unpickled_box(cls: type[Partitioned], static: Static, value: Any) -> Partitioned:
  return cls(static, (value,))


_VALUE = jax.tree_util.GetAttrKey('value')


def _register(cls: type[Partitioned], flax_cls: type) -> None:
  """Registers `cls` as a pytree, for Flax's serialization, and as a subclass of Flax's own box class.

  A box stores its children and its static part as the pair that flattening returns. Flattening therefore
  runs in C, and unflattening is one call of the class.
  """
  jax.tree_util.register_pytree_with_keys(
    cls,
    lambda box: (((_VALUE, box._pair[0][0]),), box._pair[1]),
    cast(Any, cls),
    operator.attrgetter('_pair'),
  )
  serialization.register_serialization_state(cls, _to_state_dict, _from_state_dict)
  flax_cls.register(cls)


def _to_state_dict(box: Partitioned) -> dict[str, Any]:
  return {'value': serialization.to_state_dict(box.value)}


def _from_state_dict(box: Partitioned, state: Any) -> Any:
  """Restores a box from a state that was saved with or without boxes."""
  value: Any = state['value'] if isinstance(state, Mapping) and set(state) == {'value'} else state
  return box.replace_boxed(serialization.from_state_dict(box.value, value, name='value'))


_register(Partitioned, nn.Partitioned)
_register(LogicallyPartitioned, nn.LogicallyPartitioned)


def without_dimension(spec: PartitionSpec, index: int, rank: int) -> PartitionSpec:
  """The spec of an array of a certain rank without one of its dimensions."""
  entries = [*spec, *(None,) * (rank - len(spec))]
  del entries[index]
  return PartitionSpec(*entries)


def _canonical(names: Any) -> Any:
  """Names as a tuple. A bare string stays: the planner reports it together with the path.

  Raises:
    LayoutError: they are no sequence: a set has no order, and an iterator would be empty in the next call.
  """
  if isinstance(names, str):
    return names
  if isinstance(names, (Sequence, PartitionSpec)):
    entries = plain_strings(tuple(tuple(each) if isinstance(each, list) else each for each in names))
    if all(_is_entry(each) for each in entries):
      return entries
  raise LayoutError(
    f'The names of a box in {compat.current_module() or "no module"} are {value_text(names)}.\n'
    "Fix: write a tuple with a name, a tuple of mesh axes, or None for each dimension, such as ('embed', None)."
  )


def _checked(mesh: Any) -> MeshLike | None:
  """The mesh of a box, if it is one.

  Raises:
    MeshError: it is not, but a layout, say.
  """
  if mesh is not None and not isinstance(mesh, (Mesh, AbstractMesh)):
    raise MeshError(
      f'The mesh of a box in {compat.current_module() or "no module"} is {shown(mesh)}.\n'
      'Fix: pass a mesh, such as layout.mesh, or leave it out: the mesh in force is used.'
    )
  return mesh


def _is_entry(name: Any) -> bool:
  """Whether a part of an array's names can be compared, as names and tuples of mesh axes can."""
  try:
    hash(name)
  except TypeError:
    return False
  return True


def _same_value(a: Any, b: Any) -> bool:
  """Whether two trees are equal; arrays compare by content, traced arrays by identity."""
  leaves_a, tree_a = jax.tree.flatten(a)
  leaves_b, tree_b = jax.tree.flatten(b)
  return tree_a == tree_b and all(map(_same_leaf, leaves_a, leaves_b))


def _same_leaf(a: Any, b: Any) -> bool:
  if a is b or isinstance(a, Tracer) or isinstance(b, Tracer):
    return a is b
  if isinstance(a, (jax.Array, np.ndarray)) and isinstance(b, (jax.Array, np.ndarray)):
    return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())
  return bool(a == b)


def _short(value: Any) -> str:
  """`float32[8,16]` for an array or its stand-in; the repr of any other value."""
  if not hasattr(value, 'shape') or not hasattr(value, 'dtype'):
    return repr(value)
  return array_text(value.dtype, value.shape)
