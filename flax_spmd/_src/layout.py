"""Layout: a mesh and a rule table, and everything that follows from the pair.

    layout = Layout({'data': 2, 'model': 4}, rules=(('batch', 'data'), ('hidden', 'model')))
    state  = layout.init(create_state, key, x)         # born sharded, never whole on one device
    step   = layout.jit(train_step, donate_argnums=0)  # constraints and outputs follow the layout
    batch  = layout.shard(batch, ('batch', None))
    target = layout.abstract(create_state, key, x)     # what a checkpoint is restored into

A layout is a value: frozen, hashable, equal by content, written to TOML and read from it. Trying
another one is making another one; models and training steps stay as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.active_layout import InForce, check_in_step, scope
from flax_spmd._src.data.gather import gather
from flax_spmd._src.data.global_batches import Check, local_indices, local_to_global
from flax_spmd._src.jit.arguments import Arguments, closed_over
from flax_spmd._src.jit.jitted import Jitted
from flax_spmd._src.mesh import MeshLike, abstract_mesh, axis_sizes, axis_types, describe, make_mesh
from flax_spmd._src.multihost import check_same_on_every_process
from flax_spmd._src.names import box_trees as trees
from flax_spmd._src.plan import findings as report
from flax_spmd._src.plan import placement_shardings as placement
from flax_spmd._src.plan.planner import Planner, leaf_names, planner_for
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.plan.unboxed_states import Memory
from flax_spmd._src.public_module import set_module
from flax_spmd._src.rules import toml_format as toml
from flax_spmd._src.rules.decisions import rule_text
from flax_spmd._src.rules.table import Rules

if TYPE_CHECKING:
  from flax_spmd._src.pipeline.schedules.schedule import Schedule

_NOT_PARTITIONABLE = (
  'jax_threefry_partitionable is off: a sharded random array is drawn with communication, or drawn whole on '
  "every device. Turn it on with jax.config.update('jax_threefry_partitionable', True); the numbers "
  'will be others.'
)
_ADDRESS = re.compile(' at 0x[0-9a-f]+')  # of a function, which differs between processes
_open_blocks: ContextVar[tuple[ExitStack, ...]] = ContextVar('flax_spmd_open_blocks', default=())


@set_module('flax_spmd')
class Layout:
  """A mesh and a rule table.

  Args:
    mesh: a mesh (concrete or abstract), or size per axis name for `make_mesh`.
    rules: a rule table: `Rules`, or a tuple or list of `(logical name, mesh axes)`.
    **policies: `unmatched`, `conflict`, `indivisible`, `missing_axis`; see `Policies`.

  Raises:
    MeshError: the mesh cannot be made.
    RulesError: `rules` is no rule table.
    MeshAxisError: a rule uses an axis that the mesh lacks.

  Example:
    >>> layout = Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('hidden', 'model')))
    >>> layout
    Layout({'data': 2, 'model': 4}, Rules(('batch', 'data'), ('hidden', 'model')))
    >>> layout.shard(jnp.ones((8, 16)), ('batch', 'hidden')).sharding.spec
    P('data', 'model')
  """

  def __init__(self, mesh: MeshLike | Mapping[str, int], rules: Any = (), **policies: Any):
    self._mesh = mesh if isinstance(mesh, (Mesh, AbstractMesh)) else make_mesh(mesh)
    self._rules = Rules.of(rules, **policies)
    self._rules.check_axes(axis_sizes(self._mesh))
    self._planner = planner_for(self._mesh, self._rules)
    self._memory = _memory_of(self._planner)

  @property
  def mesh(self) -> MeshLike:
    """The mesh."""
    return self._mesh

  @property
  def rules(self) -> Rules:
    """The rule table."""
    return self._rules

  def replace(self, *, mesh: Any = None, rules: Any = None, **policies: Any) -> Layout:
    """A layout with another mesh, other rules or other policies; what is not named stays.

    A plain tuple of rules says nothing about policies, so it takes on this layout's.

    Example:
      >>> layout = Layout({'data': 2, 'model': 4}, (('hidden', 'model'),))
      >>> layout.replace(mesh={'model': 8}, conflict='error')
      Layout({'model': 8}, Rules(('hidden', 'model'), conflict='error'))
    """
    if rules is None:
      rules = self._rules
    elif not isinstance(rules, Rules):
      rules = Rules.of(rules, **dataclasses.asdict(self._rules.policies))
    return Layout(mesh or self._mesh, rules, **policies)

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, Layout):
      return NotImplemented
    return self._mesh == other._mesh and self._rules == other._rules

  def __hash__(self) -> int:
    return hash((self._mesh, self._rules))

  def __repr__(self) -> str:
    return f'Layout({describe(self._mesh)}, {self._rules!r})'

  # -- planning: nothing is allocated, nothing runs

  def spec(self, tree: Any) -> Any:
    """The PartitionSpec of every array of a tree, in the place of boxes and bare leaves.

    Args:
      tree: any tree, concrete or abstract.

    Raises:
      LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: all leaves that do not fit.

    Example:
      >>> layout = Layout({'data': 2, 'model': 4}, (('hidden', 'model'),))
      >>> layout.spec({'w': LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'hidden'))})
      {'w': P(None, 'model')}
    """
    return jax.tree.map(lambda sharding: sharding.spec, self.sharding(tree))

  def sharding(self, tree: Any, places: Any = None) -> Any:
    """`spec`, as NamedShardings on the layout's mesh: what `jax.jit` takes.

    Args:
      tree: any tree, concrete or abstract.
      places: where its arrays go, as of `shard`; None: where the rules say.

    Example:
      >>> layout = Layout({'data': 2, 'model': 4}, (('hidden', 'model'),))
      >>> w = LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'hidden'))
      >>> jax.device_put(w.value, layout.sharding({'w': w})['w']).addressable_shards[0].data.shape
      (8, 4)
    """
    if places is not None:
      return jax.tree.structure(tree).unflatten(self._places(tree, places))
    return self._planner.shardings(self._memory.reboxed(tree))

  def names(self, tree: Any, *, logical_only: bool = False) -> list[Any]:
    """The names of each leaf, in the order of `jax.tree.leaves(tree)`; None for a leaf without.

    A state that the layout planned without its boxes has the names that its boxes had. With
    `logical_only`, names of mesh axes are left out.

    Example:
      >>> layout = Layout({'model': 8}, (('hidden', 'model'),))
      >>> w = LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'hidden'))
      >>> layout.names({'b': jnp.ones(16), 'w': w})
      [None, ('embed', 'hidden')]
    """
    return leaf_names(self._memory.reboxed(tree), logical_only=logical_only)

  def check(self, tree: Any) -> report.Findings:
    """What deserves a look: names without a rule (and what was meant), idle rules and axes, guesses.

    Args:
      tree: any tree, concrete or abstract.

    Returns:
      Findings, empty (and false) if there are none; printing them lists one a line.

    Raises:
      LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: as `sharding`.

    Example:
      >>> layout = Layout({'model': 8}, (('embed', 'model'),))
      >>> print(layout.check({'w': LogicallyPartitioned(jnp.ones((8,)), ('embd',))}))
      name 'embd' has no rule and is replicated (1 array: w). Did you mean 'embed'?
      rules that decided nothing in this tree: 0 ('embed', 'model').
      mesh axis 'model' (8) is not used by this tree.
    """
    self.sharding(tree)
    return report.find(self._planner, self.rows(tree))

  def rows(self, tree: Any) -> list[Row]:
    """One `Row` per array of a tree: path, shape, names, spec, decisions, bytes. Raises nothing.

    Example:
      >>> layout = Layout({'model': 8}, (('hidden', 'model'),))
      >>> w = LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'hidden'))
      >>> [row] = layout.rows({'w': w})
      >>> row.path, row.spec, row.bytes, row.bytes_per_device, row.copies
      ('w', P(None, 'model'), 512, 64, 1)
    """
    return self._planner.rows(self._memory.reboxed(tree))

  def abstract(self, fn: Callable[..., Any], *args: Any, boxed: bool = True, **kwargs: Any) -> Any:
    """What `init` would return, without making it: shapes, dtypes and shardings.

    Args:
      fn: makes a state; nothing of it runs.
      *args, **kwargs: its arguments. Arrays may be abstract; what is neither array nor number (a
        model, an optimizer) is passed on as it is.
      boxed: whether boxes stay; without them, the layout remembers the names.

    Returns:
      The state, with a `jax.ShapeDtypeStruct` that has a sharding for every array: the target of a
      restore.

    Raises:
      LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: all leaves that do not fit.

    Example:
      >>> layout = Layout(abstract_mesh({'data': 64, 'model': 8}), (('hidden', 'model'),))
      >>> init = with_logical_partitioning(nn.initializers.ones, ('embed', 'hidden'))
      >>> dense = nn.Dense(4096, kernel_init=init)
      >>> state = layout.abstract(dense.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1024), 'float32'))
      >>> kernel = state['params']['kernel'].value
      >>> kernel.shape, kernel.sharding.spec
      ((1024, 4096), P(None, 'model'))
    """
    fn, arrays = closed_over(fn, args, kwargs)
    with self:
      state = jax.eval_shape(fn, arrays)
    shardings = self._planner.leaf_shardings(state)
    state = self._note(state) if boxed else self._memory.unboxed(state)
    leaves, treedef = jax.tree.flatten(state)
    return treedef.unflatten(
      jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(leaf, 'weak_type', False)
      )
      for leaf, sharding in zip(leaves, shardings, strict=True)
    )

  # -- running

  def init(self, fn: Callable[..., Any], *args: Any, boxed: bool = True, **kwargs: Any) -> Any:
    """Runs `fn` so that its result is born sharded: no device ever holds a whole parameter.

    Args:
      fn: makes a state from keys and arrays: variables, a TrainState, any tree.
      *args, **kwargs: its arguments; what is neither array nor number (a model, an optimizer) is
        passed on as it is.
      boxed: whether the state keeps its boxes. Without them steps cost nothing extra, and the
        layout remembers where the arrays go.

    Returns:
      The state, every array of it on the layout's mesh; what has no names is replicated.

    Warns:
      UserWarning: random numbers are drawn in JAX's old way, which does not divide between devices.

    Raises:
      MeshError: the mesh is abstract.
      LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: all leaves that do not fit,
        before anything is compiled.

    Example:
      >>> layout = Layout({'data': 2, 'model': 4}, (('hidden', 'model'),))
      >>> init = with_logical_partitioning(nn.initializers.ones, ('embed', 'hidden'))
      >>> variables = layout.init(nn.Dense(16, kernel_init=init).init, jax.random.key(0), jnp.ones((1, 8)))
      >>> variables['params']['kernel'].value.sharding.spec
      P(None, 'model')
    """
    placement.check_concrete(self._mesh)
    if self._mesh.size > 1 and not compat.random_numbers_divide():
      warnings.warn(_NOT_PARTITIONABLE, stacklevel=2)
    if jax.process_count() > 1:
      self.check_processes(self.abstract(fn, *args, **kwargs))
    fn, arrays = closed_over(fn, args, kwargs)
    finish = self._note if boxed else self._memory.unboxed
    return Jitted(fn, self._mesh, self._rules, self._planner.leaf_shardings, {}, finish)(arrays)

  def jit(
    self,
    fn: Callable[..., Any] | None = None,
    *,
    in_rules: Any = None,
    out_rules: Any = None,
    in_constraints: Any = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
  ) -> Any:
    """`jax.jit` under the layout: constraints follow its rules, results lie as it says.

    A result that is a state (it has names in it, or the layout's `init` or `abstract` has planned one of
    its form before this function was first called) gets the layout's shardings; other results are the
    compiler's choice. Of a tuple, each element is a result of its own. Arguments are taken as they lie.

    Where that is not what is wanted, arguments and results are given *places*: logical names (a
    tuple), a PartitionSpec of mesh axes, a sharding, a rule table (`Rules`, `fsdp(...)`, a policy) or
    None (as above); or a tree of places that is a prefix of the argument or result. The paths that a
    table sees are those within the part that it is given for.

    Args:
      fn: the function; without it, a decorator is returned. Keep what you get: each call of `jit`
        compiles anew.
      in_rules: a place for all arguments, a tuple with one for each, or a dict by parameter; static
        arguments are left out. Arrays of the host are put there; an array that was put elsewhere is
        an error.
      out_rules: a place for the result, or a tree of places.
      in_constraints: as `in_rules`; arguments are taken as they lie and constrained on entry.
      donate_argnums, donate_argnames, static_argnums, static_argnames: as in `jax.jit`.
      keep_unused, inline, compiler_options: as in `jax.jit`.

    Returns:
      A function with `.lower`, `.trace` and `.eval_shape`, which take abstract arguments too. It
      raises `LayoutError` for arguments that do not fit their places, before anything is compiled.

    Example:
      >>> layout = Layout({'data': 8}, (('batch', 'data'),))
      >>> double = layout.jit(lambda x: with_logical_constraint(2 * x, ('batch',)))
      >>> double(jnp.ones(16)).sharding.spec
      P('data',)
      >>> total = layout.jit(lambda w, x: x @ w, in_rules=(fsdp('data', min_size=1), ('batch', None)))
      >>> total(jnp.ones((4, 16)), np.ones((8, 4))).shape
      (8, 16)
    """
    options = {
      'donate_argnums': donate_argnums,
      'donate_argnames': donate_argnames,
      'static_argnums': static_argnums,
      'static_argnames': static_argnames,
      'keep_unused': keep_unused,
      'inline': inline,
      'compiler_options': compiler_options,
    }
    placed = {'in_rules': in_rules, 'out_rules': out_rules, 'in_constraints': in_constraints}
    if fn is None:
      return functools.partial(self.jit, **placed, **options)
    arguments = Arguments.of(fn, options)
    if in_constraints is not None:
      fn = arguments.constrained(fn, in_constraints)
    plan_inputs = None
    if in_rules is not None:
      plan_inputs = functools.partial(self._inputs, arguments=arguments, places=in_rules)
    plan_outputs = functools.partial(self._outputs, places=out_rules)
    return Jitted(fn, self._mesh, self._rules, plan_outputs, options, plan_inputs=plan_inputs)

  def pipeline_jit(
    self,
    fn: Callable[..., Any] | None = None,
    *,
    axis: str = 'stage',
    schedule: Schedule | None = None,
    in_rules: Any = None,
    out_rules: Any = None,
    stages: int | None = None,
    threads: bool = False,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
  ) -> Any:
    """`jit`, with the stages of the model laid over a mesh axis: one program per stage.

    The model ends its stages by `pipeline.stage_end`; the function calls `pipeline.accumulate` once and
    updates its state as ever, or has no gradients and no loop. Every stage is partitioned by the
    layout's rules over the other axes. Arrays that a stage owns lie on its devices alone, as plain
    `jax.Array`s; arguments are taken from wherever they are.

    Args:
      fn: the function; without it, a decorator is returned.
      axis: the mesh axis that stages are laid over.
      schedule: used where `accumulate` is given none; where there is no loop, it says where stages are.
      in_rules, out_rules: as of `jit`.
      stages: into how many stages a model that ends none is cut, as equal in work as its Linen modules
        allow; the schedule has to have as many.
      threads: whether each rank's programs are dispatched by a thread of its own. That pays where a
        program runs while it is dispatched: small ones on CPUs, and those that call back into Python.
      donate_argnums, donate_argnames, static_argnums, static_argnames: as of `jax.jit`.

    Returns:
      A function with `.trace`, `.lower` and `.compile`, which take abstract arguments too.

    Raises:
      PipelineError: the mesh has no such axis, or rules use it; when called, before anything is
        compiled: stages, schedule and mesh do not fit each other, or the function cannot be cut.

    Example:
      >>> layout = Layout({'stage': 2, 'data': 4}, (('batch', 'data'),))
      >>> def step(w, batch):
      ...   def loss(w, x):
      ...     x = pipeline.stage_end(jnp.tanh(x @ w['first']))
      ...     return jnp.mean((x @ w['second']) ** 2)
      ...   grads = pipeline.accumulate(lambda x: jax.grad(loss)(w, x), batch, pipeline.OneFOneB(2))
      ...   return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads)
      >>> w = {'first': jnp.ones((4, 4)), 'second': jnp.ones((4, 4))}
      >>> new = layout.pipeline_jit(step)(w, layout.shard(jnp.ones((3, 8, 4)), (None, 'batch', None)))
      >>> sorted(device.id for device in new['second'].devices())
      [4, 5, 6, 7]
    """
    options = {
      'donate_argnums': donate_argnums,
      'donate_argnames': donate_argnames,
      'static_argnums': static_argnums,
      'static_argnames': static_argnames,
    }
    placed = {'axis': axis, 'schedule': schedule, 'in_rules': in_rules, 'out_rules': out_rules}
    if fn is None:
      return functools.partial(self.pipeline_jit, stages=stages, threads=threads, **placed, **options)
    plan_inputs = None
    if in_rules is not None:
      arguments = Arguments.of(fn, options)
      plan_inputs = functools.partial(self._inputs, arguments=arguments, places=in_rules)
    plan_outputs = functools.partial(self._outputs, places=out_rules)
    from flax_spmd._src.pipeline.pipelined import Pipelined  # it and SciPy's graphs take 0.4 s

    return Pipelined(
      fn, self._mesh, self._rules, axis, schedule, plan_outputs, plan_inputs, threads, stages, options
    )

  def shard(self, tree: Any, places: Any = None) -> Any:
    """Places arrays that exist, in one transfer: a batch by names, a tree of boxes by its own.

    Args:
      tree: arrays (numpy or JAX, boxed or not) and numbers.
      places: one array's logical names for all leaves, a PartitionSpec of mesh axes, a sharding, or a
        rule table (`Rules`, `fsdp(...)`, a policy; it sees the paths within its part); a tree of these
        that is a prefix of `tree`; or None for what the layout's rules say (what they say nothing of is
        replicated).

    Warns:
      UserWarning: a name has no rule, but is nearly one that has.

    Raises:
      MeshError: the mesh is abstract.
      LayoutError: places that do not fit the tree or a leaf's rank, a size that does not divide, a
        mesh axis in the place of a name.

    Example:
      >>> layout = Layout({'data': 8}, (('batch', 'data'),))
      >>> batch = layout.shard({'x': np.ones((16, 4)), 'y': np.ones(16)}, {'x': ('batch', None), 'y': ('batch',)})
      >>> batch['x'].sharding.spec
      P('data', None)
    """
    placement.check_concrete(self._mesh)
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(jax.device_put(leaves, self._places(tree, places)))

  def replicate(self, tree: Any) -> Any:
    """Places every array of a tree whole on every device of the mesh, in one transfer.

    Raises:
      MeshError: the mesh is abstract.

    Example:
      >>> Layout({'data': 8}).replicate({'scale': np.ones(3)})['scale'].sharding.spec
      P()
    """
    return self.shard(tree, PartitionSpec())

  def gather(self, tree: Any) -> Any:
    """Every array of a tree as a whole numpy array, on every process; see `flax_spmd.gather`.

    Example:
      >>> layout = Layout({'data': 8}, (('batch', 'data'),))
      >>> layout.gather(layout.shard(np.arange(8), ('batch',)))
      array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """
    return gather(tree)

  def local_to_global(self, tree: Any, places: Any = None, *, check: Check = 'new') -> Any:
    """Global arrays from the part of a batch that each process has loaded.

    A process's part is what its devices hold, in the order of the global array, whatever the order of
    the mesh; `flax_spmd.batches` says it in full.

    Args:
      tree: this process's part: numpy arrays, or JAX arrays of this process.
      places: one array's logical names, a PartitionSpec of mesh axes or a sharding; None is replicated;
        or a tree of these that is a prefix of `tree`.
      check: when processes compare what they pass: for a 'new' form of batch, 'always', or 'never'.

    Raises:
      MeshError: the mesh is abstract.
      LayoutError: places that do not fit; processes whose batches differ (on each of them, before
        anything is transferred); a process that does not come.

    Example:
      >>> layout = Layout({'data': 8}, (('batch', 'data'),))
      >>> layout.local_to_global(np.ones((16, 4)), ('batch', None)).sharding.spec
      P('data', None)
    """
    placement.check_concrete(self._mesh)
    shardings = placement.shardings_of_parts(tree, places, self._planner)
    return local_to_global(tree, jax.tree.structure(tree).unflatten(shardings), check=check)

  def local_indices(self, tree: Any, places: Any = None) -> Any:
    """Which part of a batch this process has to load for `local_to_global`.

    It is what its devices hold, and so it follows from the mesh: processes may have other rows, the same
    rows (where tensor parallelism goes over processes), or some of each.

    Args:
      tree: the global arrays, or `jax.ShapeDtypeStruct`s of their shapes.
      places: as of `local_to_global`.

    Returns:
      For each array a tuple: per dimension, the indices in order, as an int64 array. `x[np.ix_(*indices)]` is
      the part of `x`.

    Raises:
      MeshError: the mesh is abstract.
      LayoutError: places that do not fit.

    Example:
      >>> layout = Layout({'data': 8}, (('batch', 'data'),))
      >>> rows, columns = layout.local_indices(jax.ShapeDtypeStruct((16, 4), jnp.float32), ('batch', None))
      >>> rows  # one process has all of them
      array([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 12, 13, 14, 15])
    """
    placement.check_concrete(self._mesh)
    leaves, treedef = jax.tree.flatten(tree)
    held = zip(leaves, self._places(tree, places), strict=True)
    return treedef.unflatten(local_indices(leaf.shape, sharding) for leaf, sharding in held)

  def check_processes(self, tree: Any = None) -> None:
    """Raises on every process unless all of them have this layout, and lay out `tree` alike.

    `init` does it by itself. It asks the coordination service of `jax.distributed`, not the devices;
    in a job of one process it does nothing.

    Raises:
      LayoutError: the first lines in which processes differ, and which do; a process that does not come.

    Example:
      >>> Layout({'data': 8}).check_processes({'w': jnp.ones((8, 16))})
    """
    rules = self._rules.all_rules(annotations=True)
    rows = [] if tree is None else self.rows(tree)
    lines = [
      f'mesh {describe(self._mesh)}',
      *(f'rule {rule_text(rule)} {_ADDRESS.sub("", repr(clause))}' for rule, clause in rules),
      repr(self._rules.policies),
      *(f'{row.path}: {row.dtype}{list(row.shape)} as {row.spec}' for row in rows),
    ]
    check_same_on_every_process('the layout', '\n'.join(lines))

  def __enter__(self) -> Self:
    check_in_step()
    with ExitStack() as stack:
      stack.enter_context(compat.mesh_scope(self._mesh))
      stack.enter_context(scope(InForce(self._mesh, self._rules)))
      _open_blocks.set((*_open_blocks.get(), stack.pop_all()))
    return self

  def __exit__(self, *exc_info: Any) -> None:
    *outer, stack = _open_blocks.get()
    _open_blocks.set(tuple(outer))
    stack.__exit__(*exc_info)

  # -- text

  def to_toml(self) -> str:
    """The layout as a TOML text that a person can edit; `from_toml` reads it back.

    Example:
      >>> print(Layout({'data': 8}, (('batch', 'data'), ('embed', None))).to_toml())
      format = 1
      <BLANKLINE>
      [mesh]
      data = 8
      <BLANKLINE>
      [rules]
      clauses = [
        ["batch", "data"],
        ["embed", []],
      ]
      <BLANKLINE>
    """
    return toml.write(axis_sizes(self._mesh), axis_types(self._mesh), self._rules)

  @classmethod
  def from_toml(cls, text: str, *, mesh: MeshLike | None = None, devices: int | None = None) -> Layout:
    """The layout that a TOML text describes.

    Args:
      text: as written by `to_toml`.
      mesh: a mesh to use in place of one made of the devices at hand (an abstract one, say); its
        axes have to be the text's.
      devices: how many devices an abstract mesh is to have, where `mesh` is not given; an axis of size -1
        takes what the others leave.

    Raises:
      RulesError: the text is no layout; names the line or the entry.
      MeshError: there are not enough devices, the sizes do not fit them, or `mesh` has other axes.

    Example:
      >>> text = Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('hidden', 'model'))).to_toml()
      >>> Layout.from_toml(text)
      Layout({'data': 2, 'model': 4}, Rules(('batch', 'data'), ('hidden', 'model')))
      >>> Layout.from_toml(text, mesh=abstract_mesh({'data': 2, 'model': 4})).mesh.size
      8
      >>> dict(Layout.from_toml(text.replace('data = 2', 'data = -1'), devices=64).mesh.shape)
      {'data': 16, 'model': 4}
    """
    parsed = toml.read(text)
    if devices is not None and mesh is None:
      mesh = abstract_mesh(parsed.axes, devices=devices, axis_types=parsed.types)
    elif mesh is None:
      mesh = make_mesh(parsed.axes, axis_types=parsed.types)
    toml.check_same_axes(parsed, axis_sizes(mesh))
    return cls(mesh, parsed.rules)

  # -- inside

  def _places(self, tree: Any, places: Any) -> list[Any]:
    """A sharding for each leaf of a tree; where no place is given, what the rules say."""
    if places is None:
      return self._by_rules(tree)
    return placement.shardings_by(tree, places, self._planner, self._by_rules)

  def _by_rules(self, tree: Any) -> list[NamedSharding]:
    return self._planner.leaf_shardings(self._memory.reboxed(tree))

  def _inputs(self, dynamic: Any, arguments: Arguments, places: Any) -> list[Any]:
    """A sharding for each leaf of the arguments; None where they may lie anywhere."""
    spread = arguments.spread(places, dynamic)
    return placement.shardings_by(dynamic, spread, self._planner, _anywhere)

  def _outputs(self, result: Any, places: Any = None) -> list[Any]:
    """A sharding for each leaf of a jitted function's result; None where the compiler is free."""
    if places is None:
      return self._states(result)
    return placement.shardings_by(result, places, self._planner, self._states)

  def _states(self, result: Any) -> list[NamedSharding | None]:
    """Of the results (a tuple is several) those with names in them, and those that the layout made, are
    states, and laid out whole.
    """
    result = self._memory.reboxed(result)
    each = jax.tree.leaves(
      result,
      is_leaf=lambda node: type(node) not in (tuple, list) or self._memory.places_of(node) is not None,
    )
    if self._planner.looks_at_paths:  # an array's path is the one in its own state
      return [sharding for part in each for sharding in self._state(part)]
    states: list[bool] = []
    for part in each:
      whole = self._memory.places_of(part) is not None or _has_names(part)
      states += [whole] * len(jax.tree.leaves(part))
    planned = self._planner.leaf_shardings(result)
    return [sharding if state else None for sharding, state in zip(planned, states, strict=True)]

  def _state(self, part: Any) -> Sequence[NamedSharding | None]:
    """Where one result goes: where it was planned before, by its names, or anywhere."""
    places = self._memory.places_of(part)
    if places is not None:
      return places
    return self._planner.leaf_shardings(part) if _has_names(part) else _anywhere(part)

  def _note(self, state: Any) -> Any:
    """Remembers a state, if rules for whole arrays lay it out: it may have no names to be known by."""
    return self._memory.noted(state) if self._planner.needs_no_names else state


def _anywhere(tree: Any) -> list[None]:
  return [None] * len(jax.tree.leaves(tree))


def _has_names(tree: Any) -> bool:
  is_box = trees.is_axis_metadata
  return any(map(is_box, jax.tree.leaves(tree, is_leaf=is_box)))


@functools.lru_cache(maxsize=256)
def _memory_of(planner: Planner) -> Memory:
  """Equal layouts remember the same states."""
  return Memory(planner.leaf_shardings)
