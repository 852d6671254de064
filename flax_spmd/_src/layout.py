"""Layout: a mesh and a rule table, and everything derived from the pair.

    layout = Layout({'data': 2, 'model': 4}, rules=(('batch', 'data'), ('hidden', 'model')))
    state  = layout.init(create_state, key, x)         # sharded from the start
    step   = layout.jit(train_step, donate_argnums=0)  # constraints and outputs follow the rules
    batch  = layout.shard(batch, ('batch', None))
    target = layout.abstract(create_state, key, x)     # restore target of a checkpoint

A layout is a value: immutable, hashable, equal by content, stored as TOML, and pickled. To try another
layout, create one; the model and the training step do not change.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flax_spmd._src.active_layout import InForce, check_function, is_module
from flax_spmd._src.data.common_values import check_arguments, check_choice, check_values
from flax_spmd._src.data.data_shard import DataShard, data_shard_of
from flax_spmd._src.data.gather import gather
from flax_spmd._src.data.global_batches import Check, local_indices, local_to_global
from flax_spmd._src.data.key_arrays import put_all
from flax_spmd._src.data.unusable_leaves import check_usable
from flax_spmd._src.host_memory import check_memories, check_no_host
from flax_spmd._src.jit.arguments import Arguments, argument_options, check_no_others, closed_over
from flax_spmd._src.jit.batch_leaves import BatchLeaves, batch_leaves
from flax_spmd._src.jit.jitted import Jitted, P, Result
from flax_spmd._src.jit.named_axis import NamedAxis
from flax_spmd._src.mesh import (
  MeshLike,
  PortableMesh,
  abstract_mesh,
  axis_sizes,
  axis_types,
  describe,
  make_mesh,
  with_auto_axes,
)
from flax_spmd._src.multihost import TIMEOUT, check_same_on_every_process, processes_that_compare
from flax_spmd._src.names.box_trees import rebuilt
from flax_spmd._src.names.boxes import Static
from flax_spmd._src.names.tree_names import leaf_names
from flax_spmd._src.names.unit_paths import leaves_with_paths
from flax_spmd._src.notebook_html import safe
from flax_spmd._src.open_blocks import close_layout, open_layout
from flax_spmd._src.plan import findings, placement_shardings
from flax_spmd._src.plan.planner import check_is_tree, common_spec, planner_for
from flax_spmd._src.plan.result_shardings import plan_results, same_forms, states_in
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.public import public
from flax_spmd._src.reshard.reshard_plan import (
  ReshardPlan,
  cast_dtype,
  check_dtypes,
  check_leaves,
  check_limit,
  plan_transfers,
)
from flax_spmd._src.rules import toml_format
from flax_spmd._src.rules.placements import PlannedResult, parts
from flax_spmd._src.rules.table import Rules, layout_lines
from flax_spmd._src.state_plan import Plan, State
from flax_spmd._src.strictness import check_call, check_state
from flax_spmd.errors import LayoutError

if TYPE_CHECKING:
  from flax_spmd._src.jit.jit_options import JitOptions
  from flax_spmd._src.pipeline.pipelined import Pipelined
  from flax_spmd._src.pipeline.run.request import PipelineOptions
  from flax_spmd._src.pipeline.schedules.schedule import Schedule

Key = TypeVar('Key')
Tree = TypeVar('Tree')
HostArray = np.ndarray | np.generic | complex  # and bool, int, float


@public('flax_spmd', unchecked=['text'])
class Layout:
  """A mesh and a rule table: they determine the sharding of every array of a model.

  `with layout:` puts both in force for a block; `init`, `abstract` and `jit` need no such block. An unpickled
  layout is on the same devices if its process has them, and on an abstract mesh otherwise.

  Args:
    mesh: a mesh (concrete or abstract), or the size of each axis, for `make_mesh`.
    rules: a rule table: `Rules`, or a sequence of pairs `(logical name, mesh axes)`.
    strict: whether surprises are errors, raised before anything runs: a large array without names or a rule in a
      state; a large replicated array in a result, if neither its names, nor an argument, nor `out_rules` ask for it;
      a result that has the form of an argument, but another sharding; a function without anything on the mesh; and
      rules of Flax's `logical_axis_rules` that are not those of the layout. Concerns `plan`, `init`, `abstract`,
      `shard`, and calls of `jit`; large means 1 MiB.
    **policies: `unmatched`, `conflict`, `indivisible`, `missing_axis`, `short_names`; see `Policies`.

  Raises:
    MeshError: the mesh cannot be created.
    RulesError: `rules` is not a rule table.
    MeshAxisError: a rule uses an axis that the mesh lacks.

  Example:
    >>> layout = Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('hidden', 'model')))
    >>> layout
    Layout({'data': 2, 'model': 4}, Rules(('batch', 'data'), ('hidden', 'model')))
    >>> layout.shard(jnp.ones((8, 16)), ('batch', 'hidden')).sharding.spec
    P('data', 'model')
  """

  def __init__(
    self, mesh: MeshLike | Mapping[str, int], rules: Any = (), *, strict: bool = False, **policies: Any
  ):
    self._mesh = mesh if isinstance(mesh, (Mesh, AbstractMesh)) else make_mesh(mesh)
    self._rules = Rules.of(rules, **policies)
    self._rules.check_axes(axis_sizes(self._mesh))
    check_memories(self._mesh, self._rules)
    self._strict = bool(strict)
    self._planner = planner_for(self._mesh, self._rules)
    self._in_force = InForce(self._mesh, self._rules, strict=self._strict)

  @property
  def mesh(self) -> MeshLike:
    """The mesh, concrete or abstract."""
    return self._mesh

  @property
  def rules(self) -> Rules:
    """The rule table."""
    return self._rules

  @property
  def strict(self) -> bool:
    """Whether surprises are errors."""
    return self._strict

  def replace(
    self, *, mesh: Any = None, rules: Any = None, strict: bool | None = None, **policies: Any
  ) -> Layout:
    """A copy of this layout with another mesh, other rules, other strictness or other policies.

    A plain tuple of rules keeps this layout's policies; a `Rules` brings its own.

    Example:
      >>> layout = Layout({'data': 2, 'model': 4}, (('hidden', 'model'),))
      >>> layout.replace(mesh={'model': 8}, conflict='error')
      Layout({'model': 8}, Rules(('hidden', 'model'), conflict='error'))
    """
    if rules is None:
      rules = self._rules
    elif not isinstance(rules, Rules):
      rules = Rules.of(rules, **dataclasses.asdict(self._rules.policies))
    strict = self.strict if strict is None else strict
    return Layout(self._mesh if mesh is None else mesh, rules, strict=strict, **policies)

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, Layout):
      return NotImplemented
    return (self._mesh, self._rules, self._strict) == (other._mesh, other._rules, other._strict)

  def __hash__(self) -> int:
    return hash((self._mesh, self._rules, self._strict))

  def __repr__(self) -> str:
    strict = ', strict=True' if self.strict else ''
    return f'Layout({describe(self._mesh)}, {self._rules!r}{strict})'

  def _repr_html_(self) -> str:
    strict = ', strict' if self.strict else ''
    return (
      f'<p>Layout on <code>{safe(describe(self._mesh))}</code>{strict}</p>{self._rules._repr_html_()}'
    )

  def __copy__(self) -> Self:
    return self

  def __deepcopy__(self, memo: dict[int, Any]) -> Self:
    return self

  def __reduce__(self):
    pickled = self.__dict__.get('_pickled_mesh')
    return _unpickled, (pickled or PortableMesh.of(self._mesh), self._rules, self._strict)

  if not TYPE_CHECKING:  # type checkers would accept any attribute

    def __getattr__(self, name: str) -> Any:
      """Finds the devices of an unpickled layout when they are first needed.

      Looking for devices starts JAX's backend, which takes memory on them or fails where another process
      has them. A data-loading process that only reads the rules does not need it.
      """
      mesh = self.__dict__.get('_pickled_mesh')
      if mesh is not None and name.startswith('_') and not name.startswith('__'):
        self.__init__(mesh.here(), self._rules, strict=self._strict)
        self.__dict__.pop('_pickled_mesh', None)
      return object.__getattribute__(self, name)

  # -- planning: allocates nothing, runs nothing

  def spec(self, tree: Any) -> Any:
    """The PartitionSpec of every array: a tree with one spec for each box or bare leaf of `tree`.

    Args:
      tree: any tree, concrete or abstract.

    Raises:
      LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: arrays that do not fit the rules or
        the mesh. The message lists all of them.

    Example:
      >>> layout = Layout({'data': 2, 'model': 4}, (('hidden', 'model'),))
      >>> layout.spec({'w': LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'hidden'))})
      {'w': P(None, 'model')}
    """
    return jax.tree.map(lambda sharding: sharding.spec, self.sharding(tree))

  def sharding(self, tree: Any, placements: Any = None) -> Any:
    """The NamedSharding of every array: `spec` on the layout's mesh, as `jax.jit` accepts it.

    Args:
      tree: any tree, concrete or abstract.
      placements: a placement or a prefix tree of placements, as in `shard`. None: by the rules.

    Raises:
      LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: as for `spec`.

    Example:
      >>> layout = Layout({'data': 2, 'model': 4}, (('hidden', 'model'),))
      >>> w = LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'hidden'))
      >>> jax.device_put(w.value, layout.sharding({'w': w})['w']).addressable_shards[0].data.shape
      (8, 4)
    """
    check_is_tree(tree)
    if placements is not None:
      shardings = self._shardings(tree, placements)
      return jax.tree.unflatten(jax.tree.structure(tree), shardings)
    return self._planner.shardings(tree)

  def names(self, tree: Any, *, logical_only: bool = False) -> list[Any]:
    """The axis names of each leaf, in the order of `jax.tree.leaves(tree)`; None for a leaf without names.

    For a state without boxes, use `plan`.

    Args:
      tree: any tree, concrete or abstract.
      logical_only: whether to omit mesh axes (the names of `Partitioned` boxes).

    Example:
      >>> layout = Layout({'model': 8}, (('hidden', 'model'),))
      >>> w = LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'hidden'))
      >>> layout.names({'b': jnp.ones(16), 'w': w})
      [None, ('embed', 'hidden')]
    """
    check_is_tree(tree)
    return leaf_names(tree, logical_only=logical_only)

  def check(self, tree: Any) -> findings.Findings:
    """Likely mistakes: arrays not stored as planned, misspelt names, idle rules and mesh axes, large replicated arrays.

    Args:
      tree: any tree, concrete or abstract.

    Returns:
      Findings; printed one per line, and falsy if empty.

    Raises:
      LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: as for `spec`.

    Example:
      >>> layout = Layout({'model': 8}, (('embed', 'model'),))
      >>> print(layout.check({'w': LogicallyPartitioned(jnp.ones((8,)), ('embd',))}))
      name 'embd' has no rule and is replicated (1 array: w). Did you mean 'embed'?
      mesh axis 'model' (8) is not used by this tree.
    """
    rows = self._planner.checked_rows(tree)
    return findings.find(self._planner, rows)

  def rows(self, tree: Any) -> list[Row]:
    """One `Row` per array: path, shape, names, spec, decisions, bytes, and its own sharding. Never raises.

    Example:
      >>> layout = Layout({'model': 8}, (('hidden', 'model'),))
      >>> w = LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'hidden'))
      >>> [row] = layout.rows({'w': w})
      >>> row.path, row.spec, row.bytes, row.bytes_per_device, row.copies
      ('w', P(None, 'model'), 512, 64, 1)
    """
    return self._planner.rows(tree)

  def plan(self, fn: Callable[..., State], *args: Any, boxed: bool = True, **kwargs: Any) -> Plan[State]:
    """The plan of a state: its structure, shapes, dtypes, names and shardings. Nothing runs.

    A plan creates the state, restores it, and gives its names where the state itself has none (`boxed=False`).

    Args:
      fn: function that creates a state (variables, a TrainState, any tree) from keys and arrays.
      *args, **kwargs: arguments of `fn`. Arrays may be abstract. All other objects, such as a model, an optimizer or
        a number, are passed to `fn` as they are.
      boxed: whether the state has boxes. Without boxes a step has no cost for opening them; the plan has the names.

    Returns:
      A plan: `init()`, `abstract()`, `shard(tree)`, `explain()`, `shardings`, `names`.

    Raises:
      LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: as for `spec`.
      RulesError: the table has rules that shard by path, but none matches, and no array is sharded.

    Example:
      >>> layout = Layout({'data': 2, 'model': 4}, (('hidden', 'model'),))
      >>> init = with_logical_partitioning(nn.initializers.ones, ('embed', 'hidden'))
      >>> plan = layout.plan(nn.Dense(16, kernel_init=init).init, jax.random.key(0), jnp.ones((1, 8)), boxed=False)
      >>> plan.shardings['params']['kernel'].spec
      P(None, 'model')
      >>> plan.init()['params']['kernel'].shape
      (8, 16)
    """
    return self._planned(fn, args, kwargs, boxed)

  def abstract(self, fn: Callable[..., State], *args: Any, boxed: bool = True, **kwargs: Any) -> State:
    """The result of `init` as shapes, dtypes and shardings; nothing runs. Used as a restore target.

    Args:
      fn, *args, boxed, **kwargs: see `plan`.

    Returns:
      The state, with a `jax.ShapeDtypeStruct` (shape, dtype and sharding) for every array.

    Raises:
      LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: as for `spec`.

    Example:
      >>> layout = Layout(abstract_mesh({'data': 64, 'model': 8}), (('hidden', 'model'),))
      >>> init = with_logical_partitioning(nn.initializers.ones, ('embed', 'hidden'))
      >>> dense = nn.Dense(4096, kernel_init=init)
      >>> state = layout.abstract(dense.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1024), 'float32'))
      >>> kernel = state['params']['kernel'].value
      >>> kernel.shape, kernel.sharding.spec
      ((1024, 4096), P(None, 'model'))
    """
    return self.plan(fn, *args, boxed=boxed, **kwargs).abstract()

  # -- running

  def init(self, fn: Callable[..., State], *args: Any, boxed: bool = True, **kwargs: Any) -> State:
    """Creates a sharded state: runs `fn` such that no device ever holds a whole sharded parameter.

    Args:
      fn, *args, boxed, **kwargs: see `plan`, whose `init` this is.

    Returns:
      The state, with every array on the layout's mesh. Arrays that no rule applies to are replicated.

    Warns:
      UserWarning: `jax_threefry_partitionable` is off, so random arrays are not generated shard by shard.

    Raises:
      MeshError: the mesh is abstract, or the function constrains arrays on another mesh.
      LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: as for `spec`; raised before anything
        is compiled. In a job of several processes also: arguments differ between processes in value (a
        key of another seed, say), or layouts do. Every process raises it.

    Example:
      >>> layout = Layout({'data': 2, 'model': 4}, (('hidden', 'model'),))
      >>> init = with_logical_partitioning(nn.initializers.ones, ('embed', 'hidden'))
      >>> variables = layout.init(nn.Dense(16, kernel_init=init).init, jax.random.key(0), jnp.ones((1, 8)))
      >>> variables['params']['kernel'].value.sharding.spec
      P(None, 'model')
    """
    placement_shardings.check_concrete(self._mesh)
    check_arguments(args, kwargs, processes_that_compare(self._mesh))
    return self._planned(fn, args, kwargs, boxed, compared=True).init()

  @overload
  def jit(self, fn: Callable[P, Result], **options: Unpack[JitOptions]) -> Jitted[P, Result]: ...
  @overload
  def jit(self, **options: Unpack[JitOptions]) -> Callable[[Callable[P, Result]], Jitted[P, Result]]: ...
  def jit(
    self,
    fn: Callable[..., Any] | None = None,
    *,
    in_rules: Any = None,
    out_rules: Any = None,
    in_constraints: Any = None,
    axis_name: str | None = None,
    in_axes: Any = None,
    out_axes: Any = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    constrain_batch: bool = True,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
    **others: Any,
  ) -> Any:
    """`jax.jit` under this layout: constraints follow its rules, and states keep its shardings.

    Arguments keep their shardings. For every part of a result, at any depth: arrays with names are sharded by the
    rules; a part that has the structure and shapes of an argument, or of a part of one, comes out as that came in;
    the compiler chooses the rest.

    Arguments that are neither arrays nor numbers (functions, enums, configurations) are static. They have to be
    hashable. `static_argnames` does the same in less time per call.

    `in_rules`, `out_rules` and `in_constraints` override this with *placements*. A placement is logical
    names (a tuple), a PartitionSpec of mesh axes, a sharding, a rule table (`Rules`, `fsdp(...)`, a
    function) or None (the behaviour above). A tree of placements may be a prefix of the argument or result.
    A rule table sees paths relative to its part of the tree.

    `axis_name` is for a function that was written for `jax.pmap`: it reduces over that axis (`lax.pmean`,
    `BatchNorm(axis_name=...)`), and computes one part of the batch. The rules give the name its mesh axes, as they do
    for a dimension of the batch, and there is one part for each index along these. Batches have no dimension for
    devices; states may be sharded by any rules.

    Args:
      fn: function to compile; if omitted, `jit` returns a decorator. Keep the returned function: every
        call of `jit` compiles again.
      in_rules: one placement for all arguments, a tuple with one per argument, or a dict by parameter
        name, without the static arguments. Host arrays are transferred there; arrays that are committed
        to another sharding are an error.
      out_rules: placement or prefix tree of placements for the result.
      in_constraints: as `in_rules`, but arguments keep their shardings and are resharded inside the
        program.
      axis_name: axis name to bind inside the function: a name with a rule, or a mesh axis. Not on a mesh with
        Explicit axes.
      in_axes: with `axis_name`, one entry per argument: the dimension that its arrays are split along, None for an
        argument that every part gets whole, or a tree of these that is a prefix of the argument. An integer is for
        all arguments, a dict goes by parameter name. Default: `(None, 0)`, for a state and a batch.
      out_axes: with `axis_name`, None for a result that is equal in all parts, the dimension along which the parts
        of a result are joined, or a tree of these that is a prefix of the result. Single numbers are joined to one
        array of them. Default: None; results that differ are an error.
      constrain_batch: whether a step that does not constrain its batch keeps it sharded. The batch is an argument that
        is sharded over dimension 0, or that is on no mesh yet, such as an array of NumPy. If the step returns arrays like
        those of an argument, it is taken for a state, unless no other argument can be the batch. A batch on no
        mesh is sharded by the rule for `batch`, if there is one; where that is impossible, a warning names its arrays.
        Where the state is sharded over the axes of the batch (FSDP) and no activation is constrained, the batch stays
        sharded throughout: the step is then traced three times, the second time with twice the batch. Left as they are,
        if parameters have names: experts over these axes, and steps that do not return all parameters.
      donate_argnums, donate_argnames, static_argnums, static_argnames: as in `jax.jit`.
      keep_unused, inline, compiler_options: as in `jax.jit`.

    Returns:
      A function with `.lower`, `.trace` and `.eval_shape`, which accept abstract arguments too. It raises
      `LayoutError` if arguments do not fit their placements, and `MeshError` if the function constrains arrays on
      another mesh (unless that is a view of the same devices with axis names of its own), before anything is
      compiled. `.explain` reports the shardings and the communication of the compiled program as a
      `ProgramExplanation`.
      A function of a strict layout raises it for every surprise too, before it runs; `lower` and `explain` do not.

    Example:
      >>> layout = Layout({'data': 8}, (('batch', 'data'),))
      >>> double = layout.jit(lambda x: with_logical_constraint(2 * x, ('batch',)))
      >>> double(jnp.ones(16)).sharding.spec
      P('data',)
      >>> total = layout.jit(lambda w, x: x @ w, in_rules=(fsdp('data', min_size=1), ('batch', None)))
      >>> total(jnp.ones((4, 16)), np.ones((8, 4))).shape
      (8, 16)
      >>> mean = layout.jit(lambda w, x: jax.lax.pmean(jnp.mean(w * x), 'batch'), axis_name='batch')
      >>> mean(2.0, jnp.arange(16.0))
      Array(15., dtype=float32)
    """
    check_no_others(Layout.jit, others)
    options = {
      **argument_options(
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
      ),
      'keep_unused': keep_unused,
      'inline': inline,
      'compiler_options': compiler_options,
    }
    placements = {'in_rules': in_rules, 'out_rules': out_rules, 'in_constraints': in_constraints}
    axis = NamedAxis.of(axis_name, in_axes, out_axes)
    if fn is None:
      axes = {'axis_name': axis_name, 'in_axes': in_axes, 'out_axes': out_axes}
      return functools.partial(
        self.jit, **placements, **axes, constrain_batch=constrain_batch, **options
      )
    check_function(fn, self._in_force)
    arguments = Arguments.of(fn, options)
    if axis is not None:
      fn = axis.bound(fn, arguments, self._mesh, self._rules)
    if in_constraints is not None:
      fn = arguments.constrained(fn, in_constraints)
    plan_inputs = None
    if in_rules is not None:
      plan_inputs = functools.partial(self._input_shardings, arguments=arguments, placements=in_rules)
    plan_results = functools.partial(self._plan_results, placements=out_rules)
    return Jitted(
      fn,
      self._in_force,
      plan_results,
      options,
      plan_inputs,
      self._stored_specs,
      functools.partial(check_call, mesh=self._mesh) if self.strict and self._mesh.size > 1 else None,
      self._plan_results,
      self._batch_of if constrain_batch and self._mesh.size > 1 else None,
    )

  @overload
  def pipeline_jit(
    self, fn: Callable[P, Result], **options: Unpack[PipelineOptions]
  ) -> Pipelined[P, Result]: ...
  @overload
  def pipeline_jit(
    self, **options: Unpack[PipelineOptions]
  ) -> Callable[[Callable[P, Result]], Pipelined[P, Result]]: ...
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
    timeout: float = TIMEOUT,
    host_after: int | None = None,
    constrain_batch: bool = True,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    **others: Any,
  ) -> Any:
    """`jit` with pipeline parallelism: the model's stages are distributed over a mesh axis.

    The model marks the end of each stage with `pipeline.stage_end`. The function calls
    `pipeline.accumulate` once and updates its state as usual, or it has neither gradients nor a loop. Each
    stage is compiled as its own program, sharded by the layout's rules over the other mesh axes. Arrays
    that a stage owns are plain `jax.Array`s on the devices of that stage; arguments may be on any devices.
    Within stages, Explicit axes of the mesh are Auto: names decide, and types have no shardings.
    Ranks of different processes exchange arrays by collectives, or by JAX's own copies between hosts if
    `jax_cross_host_transfer_socket_address` is set on every process before JAX is first used.
    Results of up to 512 bytes are sent to all processes, so that each can print its loss; of a state the scalars.

    Args:
      fn: function to compile; if omitted, `pipeline_jit` returns a decorator.
      axis: mesh axis of the stages.
      schedule: the schedule, if `accumulate` has none of its own. In a function without a loop, it only
        assigns stages to ranks.
      in_rules, out_rules: as in `jit`.
      stages: number of stages to cut an unmarked model into, at boundaries between Linen modules, with
        the work balanced as well as these allow. Has to equal the schedule's number of stages.
      threads: whether each rank has its own dispatch thread. Useful if dispatch blocks: small programs on
        CPUs, and programs that call back into Python. A mesh of several processes is dispatched by one
        thread per process in any case; so are ranks of several CPUs with JAX before 0.12, whose collectives
        may otherwise wait for each other without end.
      timeout: seconds that a transfer between processes may take, with the time for which one waits for the
        other. Then all processes end the step with an error that names the rank. If the step has returned, as on
        GPUs, the error is on stderr and the next step raises it; a process that makes none within 5 s ends. The
        default suits ranks that load data for minutes; pass 30, say, if they don't.
      host_after: number of tasks, at least 1. Residuals and other arrays of a microbatch that are not used for more
        tasks of their rank than this wait in the memory of the host (`pinned_host`), and are back one task before
        their use. Results are the same; devices need less memory, and transfers compete with others for the bus.
        The compiled pipeline has the peaks of both: `.memory` and `.host_memory`. None: all stay on the devices.
      constrain_batch: as in `jit`, for microbatches of several examples, which are dimension 0 of an array of the batch,
        or 1 after that of microbatches. Without a loop, a batch on no mesh is sharded only if the state is.
      donate_argnums, donate_argnames, static_argnums, static_argnames: as in `jax.jit`.

    Returns:
      A function with `.trace`, `.lower` and `.compile`, which accept abstract arguments too.

    Raises:
      PipelineError: the mesh lacks the axis, or a rule uses it. A call raises it too, before anything is
        compiled: stages, schedule and mesh do not match, or the function cannot be cut. In a job of several
        processes a call also raises it if a rank of another process has ended or is stalled.
      MeshError: devices have no memory for `host_after`.
      LayoutError: processes have other layouts, schedules or programs, pass or close over other values, or call
        pipelines in another order; raised by all, before arrays are sent. The guide "Pipelines" lists what is compared.
        A process may pass zeros for the parts of the batch that it does not use.

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
    check_no_others(Layout.pipeline_jit, others)
    check_no_host(self._rules, 'layout.pipeline_jit')
    settings: dict[str, Any] = {
      'axis': axis,
      'schedule': schedule,
      'threads': threads,
      'stages': stages,
      'timeout': timeout,
      'host_after': host_after,
      'constrain_batch': constrain_batch,
    }
    options = argument_options(
      donate_argnums=donate_argnums,
      donate_argnames=donate_argnames,
      static_argnums=static_argnums,
      static_argnames=static_argnames,
    )
    if fn is None:
      return functools.partial(
        self.pipeline_jit, in_rules=in_rules, out_rules=out_rules, **settings, **options
      )
    layout = self.replace(mesh=with_auto_axes(self._mesh))
    plan_inputs = None
    if in_rules is not None:
      arguments = Arguments.of(fn, options)
      plan_inputs = functools.partial(layout._input_shardings, arguments=arguments, placements=in_rules)
    plan_results = functools.partial(layout._plan_results, placements=out_rules)
    from flax_spmd._src.pipeline.pipelined import Pipelined  # with SciPy's graphs, 0.4 s to import

    return Pipelined(
      fn,
      layout._mesh,
      layout._rules,
      plan_results,
      plan_inputs,
      options,
      **settings,
    )

  @overload
  def shard(self, tree: HostArray, placements: Any = None) -> jax.Array: ...
  @overload
  def shard(self, tree: dict[Key, np.ndarray], placements: Any = None) -> dict[Key, jax.Array]: ...
  @overload
  def shard(self, tree: tuple[np.ndarray, ...], placements: Any = None) -> tuple[jax.Array, ...]: ...
  @overload
  def shard(self, tree: Tree, placements: Any = None) -> Tree: ...
  def shard(self, tree: Any, placements: Any = None) -> Any:
    """Transfers existing arrays to the mesh, all in one `jax.device_put`.

    Args:
      tree: arrays (numpy or JAX, boxed or not) and numbers.
      placements: a placement for all leaves, or a tree of placements that is a prefix of `tree`. A
        placement is logical names (a tuple), a PartitionSpec of mesh axes, a sharding, or a rule table
        (`Rules`, `fsdp(...)`, a function), which sees paths relative to its part of the tree. None: by the
        layout's rules; arrays that no rule applies to are replicated.

    Returns:
      The tree, with every leaf as a `jax.Array`.

    Warns:
      UserWarning: a name has no rule but resembles a name that has one.

    Raises:
      MeshError: the mesh is abstract.
      LayoutError: a placement does not fit the tree or a leaf's rank, a size is not divisible, a mesh axis is used
        as a logical name, or a leaf is neither an array nor a number.

    Example:
      >>> layout = Layout({'data': 8}, (('batch', 'data'),))
      >>> batch = layout.shard({'x': np.ones((16, 4)), 'y': np.ones(16)}, {'x': ('batch', None), 'y': ('batch',)})
      >>> batch['x'].sharding.spec
      P('data', None)
    """
    placement_shardings.check_concrete(self._mesh)
    try:
      shardings = self._shardings(tree, placements)
      if self.strict:
        by_rules = (
          tree if placements is None else placement_shardings.unplaced(*parts(tree, placements))[0]
        )
        check_state(self._planner, by_rules)
      return rebuilt(tree, put_all(jax.tree.leaves(tree), shardings))
    except Exception:
      check_usable(leaves_with_paths(tree))
      raise

  @overload
  def replicate(self, tree: HostArray) -> jax.Array: ...
  @overload
  def replicate(self, tree: dict[Key, np.ndarray]) -> dict[Key, jax.Array]: ...
  @overload
  def replicate(self, tree: tuple[np.ndarray, ...]) -> tuple[jax.Array, ...]: ...
  @overload
  def replicate(self, tree: Tree) -> Tree: ...
  def replicate(self, tree: Any) -> Any:
    """Copies every array of a tree to every device of the mesh, all in one `jax.device_put`.

    Raises:
      MeshError: the mesh is abstract.

    Example:
      >>> Layout({'data': 8}).replicate({'scale': np.ones(3)})['scale'].sharding.spec
      P()
    """
    return self.shard(tree, PartitionSpec())

  def reshard(
    self,
    state: Tree,
    to: Layout | Plan[Tree],
    *,
    dtype: Any = None,
    donate: bool = False,
    limit: int | None = None,
  ) -> Tree:
    """Transfers a state of this layout to another one: other rules, mesh, devices or dtype. Values stay equal to the bit.

    Arrays move one after the other, over the interconnect where both meshes have equally many devices, otherwise
    through the host. With `donate`, a device holds at most the larger of its two sides, the result of one array, and
    temporary memory of 1/32 of the larger side or 4 MiB: 1.1 times the larger side, if no array is more than 6 % of it.
    `plan_reshard` has the exact figures.

    Args:
      state: arrays with or without boxes, NNX variables or modules; leaves may be numpy arrays and numbers.
      to: the other layout. Or the plan of the state there, for a state without boxes, which has no names.
      dtype: dtype of the floating-point arrays of the result; default: their own.
      donate: whether to free every array when its result is complete. Otherwise the result shares no memory with
        the state.
      limit: bytes that one device may hold; default: its free memory, where the device reports it.

    Returns:
      The state, with every leaf as a `jax.Array` on the other mesh.

    Warns:
      UserWarning: a state without names that is sharded now will be replicated on every device.

    Raises:
      MeshError: the other mesh is abstract.
      LayoutError: a device lacks memory, in any process; a process cannot read its part of the result; an array is on
        no device of this layout; a leaf is deleted, abstract, traced, or no number; the state is not one of the plan;
        `dtype` is no floating-point one. Nothing has moved then.
      MeshAxisError, UnmatchedNameError, ConflictError: the other layout cannot shard an array.

    Example:
      >>> layout, serving = Layout({'data': 8}, (('embed', 'data'),)), Layout({'model': 4}, (('mlp', 'model'),))
      >>> state = layout.shard({'w': LogicallyPartitioned(np.ones((8, 16), 'float32'), ('embed', 'mlp'))})
      >>> w = layout.reshard(state, serving, dtype='bfloat16')['w'].value
      >>> w.dtype, w.sharding.spec, w.sharding.num_devices
      (dtype(bfloat16), P(None, 'model'), 4)
    """
    plan = self.plan_reshard(state, to, dtype=dtype, donate=donate, limit=limit)
    made = plan.run(jax.tree.leaves(state))
    return rebuilt(to.abstract() if isinstance(to, Plan) else state, made)

  def plan_reshard(
    self,
    state: Any,
    to: Layout | Plan[Any],
    *,
    dtype: Any = None,
    donate: bool = False,
    limit: int | None = None,
  ) -> ReshardPlan:
    """The plan of a `reshard`: bytes on the wire, and the peak of each device. Compiles programs; moves nothing.

    A lack of memory is returned in the result, not raised. So are arrays that cannot reach a process.

    Args:
      state, to, dtype, donate, limit: see `reshard`; the arrays may be abstract, with shardings.

    Raises:
      MeshError, LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: see `reshard`.

    Example:
      >>> layout, serving = Layout({'data': 8}, (('embed', 'data'),)), Layout({'model': 4}, (('mlp', 'model'),))
      >>> state = layout.shard({'w': LogicallyPartitioned(np.ones((8, 16), 'float32'), ('embed', 'mlp'))})
      >>> plan = layout.plan_reshard(state, serving, donate=True)
      >>> print(str(plan).splitlines()[-1])
      Peak of 192 B on device 0: state 64 B (freed on the way), result 128 B.
      >>> plan.wire_bytes, [row.way for row in plan.rows]
      (1024, ['host'])
    """
    if not isinstance(to, (Layout, Plan)):
      raise LayoutError(
        f'A {type(to).__name__} is no layout.\nFix: pass a Layout, or a plan of one, as `to`.'
      )
    other = to.layout if isinstance(to, Plan) else to
    placement_shardings.check_concrete(other.mesh)
    check_limit(limit)
    shardings = to.shardings_of(state) if isinstance(to, Plan) else other._shardings_by_rules(state)
    paths, leaves = zip(*leaves_with_paths(state), strict=True) if jax.tree.leaves(state) else ((), ())
    check_leaves(paths, leaves, self._mesh)
    dtypes = [cast_dtype(leaf, dtype) for leaf in leaves]
    if isinstance(to, Plan):
      check_dtypes(paths, dtypes, [leaf.dtype for leaf in jax.tree.leaves(to.abstract())])
    has_names = isinstance(to, Plan) or any(leaf_names(state))
    return plan_transfers(
      paths, leaves, shardings, dtypes, donate=donate, limit=limit, has_names=has_names
    )

  def gather(self, tree: Any) -> Any:
    """Every array of a tree as a full numpy array, on every process; see `flax_spmd.gather`.

    Example:
      >>> layout = Layout({'data': 8}, (('batch', 'data'),))
      >>> layout.gather(layout.shard(np.arange(8), ('batch',)))
      array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """
    return gather(tree)

  def local_to_global(self, tree: Any, placements: Any = None, *, check: Check = 'new') -> Any:
    """Global arrays from the part of a batch that each process has loaded.

    A process's part is the union of the slices on its devices, in the order of the global array, whatever
    the device order of the mesh. `local_indices` computes it.

    Args:
      tree: this process's part: numpy arrays, or JAX arrays of this process.
      placements: logical names, a PartitionSpec of mesh axes, a sharding, or None (replicated); or a tree
        of these that is a prefix of `tree`.
      check: when processes compare paths, shapes, dtypes, shardings and, by hash, the values that several
        of them hold (rows, if a tensor-parallel axis spans processes): for a batch with a 'new' structure,
        'always', or 'never'.

    Returns:
      The tree, with a global `jax.Array` for every leaf.

    Raises:
      MeshError: the mesh is abstract.
      LayoutError: a placement does not fit, the batches of two processes differ, or a process does not
        arrive in time. Every process that compares raises it, before anything is transferred.

    Example:
      >>> layout = Layout({'data': 8}, (('batch', 'data'),))
      >>> layout.local_to_global(np.ones((16, 4)), ('batch', None)).sharding.spec
      P('data', None)
    """
    placement_shardings.check_concrete(self._mesh)
    shardings = placement_shardings.shardings_of_parts(tree, placements, self._planner)
    return local_to_global(tree, jax.tree.unflatten(jax.tree.structure(tree), shardings), check=check)

  def local_indices(self, tree: Any, placements: Any = None) -> Any:
    """The part of a batch that this process has to load for `local_to_global`.

    The mesh determines it: two processes may need different rows, the same rows (if a tensor-parallel
    axis spans processes), or overlapping rows.

    Args:
      tree: the global arrays, or `jax.ShapeDtypeStruct`s of their shapes.
      placements: as in `local_to_global`.

    Returns:
      For each array, a tuple with one sorted int64 array of indices per dimension; the part of `x` is
      `x[np.ix_(*indices)]`.

    Raises:
      MeshError: the mesh is abstract.
      LayoutError: a placement does not fit.

    Example:
      >>> layout = Layout({'data': 8}, (('batch', 'data'),))
      >>> rows, columns = layout.local_indices(jax.ShapeDtypeStruct((16, 4), jnp.float32), ('batch', None))
      >>> rows  # all of them, in a job of one process
      array([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 12, 13, 14, 15])
    """
    placement_shardings.check_concrete(self._mesh)
    shardings = self._shardings(tree, placements)
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(
      treedef,
      [local_indices(leaf.shape, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)],
    )

  def data_shard(self, placement: Any = 'batch') -> DataShard:
    """The part of a data set that this process reads, as index and count for Grain, tf.data or Hugging Face's datasets.

    `local_indices` serves every mesh; an index and a count only those in which every process holds one block of
    rows, as it does by default. Processes that hold the same rows have the same index.

    Args:
      placement: logical name of the rows, or the placement of a whole batch: logical names or a PartitionSpec. Rows
        are the first dimension.

    Returns:
      A `DataShard`: `index`, `count`, `processes`, and `local_size(rows)`, this process's rows of a batch.

    Raises:
      MeshError: the mesh is abstract.
      LayoutError: a name has no rule, or the rows of a process are no block; the message lists the rows of all processes.

    Example:
      >>> layout = Layout({'data': 8}, (('batch', 'data'),))
      >>> shard = layout.data_shard('batch')
      >>> shard.index, shard.count, shard.local_size(256)
      (0, 1, 256)
      >>> records = range(1000)[shard.index :: shard.count]  # without a loader
    """
    placement_shardings.check_concrete(self._mesh)
    placement = (placement,) if isinstance(placement, str) else placement
    placement_shardings.check_row_placement(placement, self._planner)
    rank = max(1, len(placement))
    [sharding] = self._shardings(jax.ShapeDtypeStruct((self._mesh.size,) * rank, np.float32), placement)
    return data_shard_of(sharding, rank, repr(placement))

  def check_processes(self, tree: Any = None, *, values: bool | Literal['part'] = False) -> None:
    """Checks that all processes have the same layout, shard `tree` alike and hold the same values in common.

    The processes are those with devices of the mesh. `init` calls it, without values. The processes communicate
    through the coordination service of `jax.distributed`, not through devices. On a mesh of one process it does
    nothing.

    Values are compared by hash: replicated arrays, host arrays, numbers and keys between all processes, a
    shard between those that hold it. Of several equal shards on one process, one is read. An array that is
    committed to devices of one process is its own. Call it every so many steps, on every process at the
    same ones; it waits for the step. Accelerators add up the bits of an array of more than 4 KiB to 32
    bits; smaller arrays are transferred.

    Args:
      tree: a tree to compare; None: only the layout. Concrete or abstract, but concrete with `values`.
      values: whether to compare the values and the actual shardings of `tree`, instead of the shardings
        that the layout plans for it. True: every bit. 'part': numbers, and arrays whose shards have at most
        4 KiB; of larger shards a sixteenth, others at each call, so that 16 calls read all of them.

    Raises:
      LayoutError: layouts, shardings or values differ (the message shows the first lines that differ, or
        all paths, and on which processes), a process does not arrive in time, or `values` is no choice.
        Every process raises it.

    Example:
      >>> layout = Layout({'data': 8})
      >>> layout.check_processes({'w': jnp.ones((8, 16))})
      >>> for step in range(1000):  # the loop of a training run
      ...   state = {'w': jnp.ones((8, 16)), 'step': step}
      ...   layout.check_processes(state, values=True if step % 100 == 0 else 'part')
    """
    check_choice(values)
    members = processes_that_compare(self._mesh)
    if not members:
      return
    rows = [] if tree is None or values else self.rows(tree)
    lines = [
      *layout_lines(self._mesh, self._rules),
      *(['strict'] if self.strict else []),
      *(f'{row.path}: {row.dtype}{list(row.shape)} as {row.spec}' for row in rows),
    ]
    text = '\n'.join(lines)
    if values:
      check_values(leaves_with_paths(tree), 'the layout', text, members, in_turns=values == 'part')
    else:
      check_same_on_every_process('the layout', text, members=members)

  def __enter__(self) -> Self:
    open_layout(self._in_force, id(sys._getframe(1)))
    return self

  def __exit__(self, *exc_info: Any) -> None:
    if not sys.is_finalizing():  # the modules of a suspended generator may be gone by then
      close_layout(self._in_force, id(sys._getframe(1)))

  # -- text

  def to_toml(self) -> str:
    """The layout as TOML, for people to edit and for `from_toml` to read.

    Raises:
      RulesError: the table contains a function.

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
    return toml_format.write(
      axis_sizes(self._mesh), axis_types(self._mesh), self._rules, strict=self.strict
    )

  @classmethod
  def from_toml(cls, text: str, *, mesh: MeshLike | None = None, devices: int | None = None) -> Layout:
    """A layout from the TOML that `to_toml` writes.

    Args:
      text: the TOML text.
      mesh: mesh with the same axes to use instead of one over the available devices.
      devices: number of devices of an abstract mesh to create instead. An axis of size -1 takes the
        remaining factor.

    Raises:
      RulesError: the text is not a layout. The message names the line or the entry.
      MeshError: there are too few devices, the sizes do not fit them, or `mesh` has other axes.

    Example:
      >>> text = Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('hidden', 'model'))).to_toml()
      >>> Layout.from_toml(text)
      Layout({'data': 2, 'model': 4}, Rules(('batch', 'data'), ('hidden', 'model')))
      >>> Layout.from_toml(text, mesh=abstract_mesh({'data': 2, 'model': 4})).mesh.size
      8
      >>> dict(Layout.from_toml(text.replace('data = 2', 'data = -1'), devices=64).mesh.shape)
      {'data': 16, 'model': 4}
    """
    parsed = toml_format.read(text)
    if devices is not None and mesh is None:
      mesh = abstract_mesh(parsed.axes, devices=devices, axis_types=parsed.types)
    elif mesh is None:
      mesh = make_mesh(parsed.axes, axis_types=parsed.types)
    toml_format.check_same_axes(parsed, axis_sizes(mesh))
    return cls(mesh, parsed.rules, strict=parsed.strict)

  # -- internals

  def _planned(self, fn: Any, args: Any, kwargs: Any, boxed: bool, *, compared: bool = False) -> Plan:
    """The plan of a state. `compared`: whether its arguments have been compared between the processes."""
    if not callable(fn) or is_module(fn):
      fix = (
        'its init, such as layout.init(model.init, key, x).'
        if is_module(fn)
        else 'the function and its arguments; layout.shard transfers a state that exists.'
      )
      raise LayoutError(
        f'A {type(fn).__name__} is not a function that creates a state.\nFix: pass {fix}'
      )
    of_arrays, arrays = closed_over(fn, args, kwargs)

    def planned(result: Any, *_: Any) -> list[PlannedResult]:
      return [PlannedResult(sharding, 'names') for sharding in self._planner.leaf_shardings(result)]

    create = Jitted(of_arrays, self._in_force, planned, {}, plan_updates=self._plan_results)
    return Plan(self, self._planner, create, arrays, None if compared else (args, kwargs), boxed)

  def _shardings(self, tree: Any, placements: Any) -> list[Any]:
    """The sharding of each leaf of a tree: by its placement or, without one, by the rules."""
    if placements is None:
      return self._shardings_by_rules(tree)
    placed, _ = parts(tree, placements)
    return placement_shardings.shardings_by(placed, self._planner, self._shardings_by_rules)

  def _shardings_by_rules(self, tree: Any) -> list[NamedSharding]:
    return self._planner.leaf_shardings(tree)

  def _input_shardings(self, dynamic: Any, arguments: Arguments, placements: Any) -> list[Any]:
    """The required sharding of each leaf of the arguments; None accepts any."""
    placed = (
      each
      for path, placement, argument in arguments.placed(placements, dynamic)
      for each in parts(argument, placement, path)[0]
    )
    return placement_shardings.shardings_by(placed, self._planner, _unspecified)

  def _plan_results(
    self, result: Any, dynamic: Any, constrained: Sequence[bool], placements: Any = None
  ) -> list[PlannedResult]:
    """The plan of each leaf of a jitted function's result."""
    if placements is None or _is_of_nones(placements, result):
      return plan_results(result, dynamic, constrained, self._planner)
    placed, treedef = parts(result, placements)
    shardings = placement_shardings.shardings_by(placed, self._planner, _unspecified)
    rest, is_in_rest = placement_shardings.unplaced(placed, treedef)
    marks = list(itertools.compress(constrained, is_in_rest))
    planned = iter(plan_results(rest, dynamic, marks, self._planner))
    return [
      next(planned) if unplaced else PlannedResult(sharding, 'placement')
      for sharding, unplaced in zip(shardings, is_in_rest, strict=True)
    ]

  def _batch_of(
    self, dynamic: Any, result: Any, jaxpr: Any, updated: Callable[[], set[int]] | None = None
  ) -> BatchLeaves | None:
    """The batch of a call of a step; see `batch_leaves`. With NNX modules that have names, `updated` is given."""

    def returned() -> set[int]:
      found = same_forms(result, dynamic, self._mesh)
      return {position for each in found for position in each}.union(updated() if updated else ())

    is_named = None if updated is None else True
    return batch_leaves(dynamic, returned, jaxpr, self._mesh, self._rules, is_named)

  def _stored_specs(self, dynamic: Any) -> tuple[tuple[Any, Any], ...]:
    """The specs that a step opens boxes with; see `Planner.stored_specs`. Each argument is a state of its own."""
    args, kwargs = dynamic
    specs: dict[Static, set[PartitionSpec]] = defaultdict(set)
    for state in states_in([*args, *kwargs.values()]):
      for static, spec in self._planner.stored_specs(state).items():
        specs[static].add(spec)
    return tuple((static, common_spec(static, each)) for static, each in specs.items())


def _unpickled(mesh: PortableMesh, rules: Rules, strict: bool) -> Layout:
  layout = object.__new__(Layout)
  layout.__dict__.update(_pickled_mesh=mesh, _rules=rules, _strict=strict)
  return layout


def _is_of_nones(placements: Any, result: Any) -> bool:
  """Whether placements are one None for each entry of a result, rather than the names of one array."""
  same_form = type(placements) is type(result) in (tuple, list) and len(placements) == len(result)
  return same_form and all(each is None for each in placements)


def _unspecified(tree: Any) -> list[None]:
  return [None] * len(jax.tree.leaves(tree))
