"""Random nests of Linen's transformations: names, values, gradients and constraints are Flax's.

Each seed stands for one nest, which is built with our functions and with Flax's. `nox -s exhaustive` runs a thousand.
"""

import contextlib
import dataclasses
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import flax_spmd as spmd
from tests.names.nests import MESH, STATE, Draw, Flax, Nest, RepairedFlax, nodes_in

KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.5, 64).reshape(8, 8)


@dataclasses.dataclass(frozen=True)
class Refusal:
  """An error in the place of a result; all are equal."""

  error: Exception = dataclasses.field(compare=False)


def outcome(fn, *args):
  """The result of a call, or its error. Our warning is where Flax raises."""
  try:
    with warnings.catch_warnings():
      warnings.filterwarnings('ignore', '.*adds an axis without a name')
      return fn(*args)
  except Exception as error:
    return Refusal(error)


class Case:
  """The nest of a seed as a program of either library, and rules."""

  def __init__(self, seed):
    draw = Draw(seed)
    self.node, self.rules = draw.nest(draw.randint(1, 4)), draw.rules()
    self.flax = RepairedFlax if any(node.repaired for node in nodes_in(self.node)) else Flax

  def init(self, lib):
    return lambda key: Nest(self.node, lib).init(key, X)

  def step(self, lib):
    """The output, updated state and gradients of a training step."""

    def step(variables, x):
      state = {name: tree for name, tree in variables.items() if name != 'params'}

      def loss_fn(params):
        y, updated = Nest(self.node, lib).apply({'params': params, **state}, x, mutable=list(STATE))
        return jnp.mean(y**2), (y, updated)

      grads, (y, updated) = jax.grad(loss_fn, has_aux=True)(variables['params'])
      return y, updated, grads

    return step

  def traced(self, lib):
    """The abstract variables and results, and both programs as text."""
    init, variables = jax.make_jaxpr(self.init(lib), return_shape=True)(KEY)
    step, results = jax.make_jaxpr(self.step(lib), return_shape=True)(variables, X)
    return (variables, results), (str(init), str(step))

  def traced_on_mesh(self, lib):
    """The same with the constraints of the rules."""
    with jax.set_mesh(MESH), spmd.logical_axis_rules(self.rules):
      return self.traced(lib)

  def run(self, lib, key):
    variables = self.init(lib)(key)
    return variables, self.step(lib)(variables, X)

  def on_one_device(self):
    return jax.jit(lambda key: self.run(self.flax, key))(KEY)

  def on_mesh(self):
    """The results of both libraries, from one compilation."""
    with jax.set_mesh(MESH), spmd.logical_axis_rules(self.rules):
      return jax.jit(lambda key: (self.run(spmd, key), self.run(self.flax, key)))(KEY)

  def by_hand(self):
    """Flax's results for sharded variables. XLA for CPUs fails internally on some programs, whoever wrote them."""
    with jax.set_mesh(MESH), nn.logical_axis_rules(self.rules):
      specs = nn.get_partition_spec(jax.eval_shape(self.init(self.flax), KEY))
      shardings = nn.logical_to_mesh_sharding(specs, MESH, self.rules)
      variables = jax.jit(self.init(self.flax), out_shardings=shardings)(KEY)
      return jax.jit(self.step(self.flax))(variables, X)

  def under_layout(self):
    layout = spmd.Layout(MESH, self.rules)
    variables = layout.init(self.init(spmd), KEY)
    return variables, layout.jit(self.step(spmd))(variables, X)


def boxes_as_data(tree):
  """A tree with kind, names, mesh and rules of each box in its place, equal for both libraries."""

  def describe(leaf):
    if not spmd.is_axis_metadata(leaf):
      return jnp.shape(leaf), str(jnp.result_type(leaf))
    rules = getattr(leaf, 'rules', None)
    pairs = getattr(rules, 'pairs', rules)
    return isinstance(leaf, nn.LogicallyPartitioned), leaf.names, leaf.mesh, pairs, describe(leaf.value)

  return jax.tree.map(describe, tree, is_leaf=spmd.is_axis_metadata)


def paths(tree):
  return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def specs(tree, rules, lib):
  """Logical specs of a tree, specs of mesh axes, and shardings."""
  logical = lib.get_partition_spec(tree)
  return (
    logical,
    outcome(lib.logical_to_mesh, logical, rules),
    outcome(lib.logical_to_mesh_sharding, logical, MESH, rules),
  )


def fits(variables, rules):
  """Whether no box of Flax has more names than dimensions, and all names can be resolved to axes that divide the size."""
  boxes = [
    leaf
    for leaf in jax.tree.leaves(variables, is_leaf=spmd.is_axis_metadata)
    if spmd.is_axis_metadata(leaf)
  ]
  return not any(
    (len(box.names) > box.value.ndim and uses(box, rules))
    or isinstance(outcome(shard_shape, box, rules), Refusal)
    for box in boxes
  )


def uses(box, rules):
  """Whether the names of a box decide anything: by a rule, or as mesh axes."""
  logical = isinstance(box, nn.LogicallyPartitioned)
  return not logical or any(name in dict(box.rules or rules) for name in box.names)


def shard_shape(box, rules):
  spec = box.get_partition_spec()
  if not uses(box, rules):
    return box.value.shape
  if isinstance(box, nn.LogicallyPartitioned):
    spec = nn.logical_to_mesh_axes(spec, box.rules or rules)
  return NamedSharding(MESH, spec).shard_shape(box.value.shape)


def assert_equal(ours, flaxs):
  """The same numbers in the same shards."""
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(flaxs), strict=True):
    assert a.sharding == b.sharding
    np.testing.assert_array_equal(a, b)


def assert_close(ours, flaxs):
  """The same numbers up to rounding, which is coarse if any array is."""
  pairs = [
    (np.float32(a), np.float32(b))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(flaxs), strict=True)
  ]
  low = any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(flaxs))
  for a, b in pairs:
    tolerance = (5e-2 if low else 2e-3) * max(1e-2, np.max(np.abs(b), initial=0))
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


@contextlib.contextmanager
def about(seed):
  try:
    yield Case(seed)
  except BaseException as error:
    error.add_note(f'seed {seed}: {Case(seed).node}, {Case(seed).rules}')
    raise


def parts(size, quick):
  """A thousand seeds in parts of `size`; those from `quick` on are exhaustive."""
  return [
    pytest.param(
      range(first, first + size), id=str(first), marks=[] if first < quick else [pytest.mark.exhaustive]
    )
    for first in range(0, 1000, size)
  ]


@pytest.mark.parametrize('seeds', parts(20, 40))
def test_names_and_programs_are_those_of_flax(seeds):
  for seed in seeds:
    with about(seed) as case:
      if not same_trace(case, case.traced_on_mesh):
        same_trace(case, case.traced)


def same_trace(case, trace):
  """Compares a trace with Flax's; False if both are refused."""
  flaxs, ours = outcome(trace, case.flax), outcome(trace, spmd)
  if isinstance(flaxs, Refusal):
    assert isinstance(ours, Refusal)
    return False
  if isinstance(ours, Refusal):
    raise ours.error
  (arrays, program), (flax_arrays, flax_program) = ours, flaxs
  assert boxes_as_data(arrays) == boxes_as_data(flax_arrays)
  assert paths(arrays) == paths(flax_arrays)
  assert specs(arrays, case.rules, spmd) == specs(flax_arrays, case.rules, nn)
  assert program == flax_program
  return True


@pytest.mark.parametrize('seeds', parts(10, 10))
def test_results_are_those_of_flax(seeds):
  for seed in seeds:
    with about(seed) as case:
      flaxs, ours = outcome(case.on_one_device), outcome(case.under_layout)
      if isinstance(flaxs, Refusal):
        assert isinstance(ours, Refusal)
      elif not isinstance(ours, Refusal):
        assert fits(flaxs[0], case.rules)
        assert boxes_as_data(ours) == boxes_as_data(flaxs)
        assert_close(ours, flaxs)
      elif fits(flaxs[0], case.rules):
        assert isinstance(outcome(case.by_hand), Refusal)
      else:
        assert isinstance(ours.error, spmd.errors.FlaxSpmdError)


@pytest.mark.parametrize('seeds', parts(100, 0))
def test_compiled_programs_shard_as_with_flax(seeds):
  for seed in seeds[::4]:
    with about(seed) as case:
      both = outcome(case.on_mesh)
      if not isinstance(both, Refusal):
        assert_equal(*both)
