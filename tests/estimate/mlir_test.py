"""jaxlib's MLIR bindings: which versions are supported, and the simplification of modules."""

import functools
import math
import random
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir

import flax_spmd as spmd
from flax_spmd._src import compat
from flax_spmd._src.compat import mlir_context
from flax_spmd._src.estimate import mlir
from flax_spmd._src.mlir.functions import main_of, walk
from flax_spmd._src.mlir.simplification import (
  drop_copies,
  drop_selects,
  drop_uniform,
  erase_dead,
  inline_all,
  merge_unary,
  order_by_operands,
  reshape_units,
  scatter_into_sums,
  slice_before_reshapes,
  transpose_products,
)
from flax_spmd.errors import EstimatorError
from flax_spmd.explore import Estimator, TrainStep, parse_target


def test_an_unsupported_jaxlib_is_refused(monkeypatch):
  monkeypatch.setattr(mlir, 'version', lambda name: '0.99.1')
  with pytest.raises(EstimatorError) as error:
    Estimator(
      TrainStep(lambda state, x: (state, x), lambda: {'w': jnp.ones(8)}, jnp.ones(8)), platform='cpu'
    )
  assert str(error.value) == (
    'The estimator supports the MLIR bindings of jaxlib 0.10 to 0.12; this is jaxlib 0.99.1.\n'
    'Fix: install a supported version, or do without estimates: each layout is then compiled, which takes '
    'seconds instead of a fraction of a second.'
  )


def test_importing_explore_does_not_import_the_bindings():
  code = 'import sys, flax_spmd.explore; print("flax_spmd._src.estimate.mlir.module" in sys.modules)'
  output = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  ).stdout
  assert output.strip() == 'False'


def test_uniform_operands_are_dropped():
  def decayed(state, x):
    return jax.tree.map(lambda w: 0.9 * w * 0.5 + jnp.sum(x), state), jnp.float32(0)

  code = jax.jit(decayed).lower({'w': jnp.ones((64, 128))}, jnp.ones((4, 8)))
  text = code.compiler_ir().operation.get_asm(binary=False)
  assert text.count('stablehlo.multiply') == 2
  with mlir_context(), ir.Location.unknown():
    module = ir.Module.parse(text)
    inline_all(module.operation)
    drop_uniform(module.operation)
    erase_dead(module.operation)
    left = str(module)
  # the sum stays, as it reduces an array, and so does one operation for both products
  counts = {kind: left.count(f'stablehlo.{kind}') for kind in ('multiply', 'negate', 'broadcast', 'add')}
  assert counts == {'multiply': 0, 'negate': 1, 'broadcast': 1, 'add': 2}


@pytest.mark.parametrize(
  ('other', 'left', 'dtype'),
  [(jnp.zeros, 0, 'float32'), (jnp.ones, 1, 'float32'), (jnp.ones, 1, 'complex64')],
)
def test_selections_between_equal_constants_are_dropped(other, left, dtype):
  select = lambda mask: jnp.where(mask, jnp.zeros((8, 4), dtype), other((8, 4), dtype))
  text = jax.jit(lambda x: select(x > 0)).lower(jnp.ones((8, 4))).compiler_ir()
  text = text.operation.get_asm(binary=False)
  with mlir_context(), ir.Location.unknown():
    module = ir.Module.parse(text)
    inline_all(module.operation)
    drop_selects(module.operation)
    erase_dead(module.operation)
    assert str(module).count('stablehlo.select') == str(module).count('stablehlo.compare') == left


def dead_program():
  """A sum, a loop and a kernel without uses, and one with an effect."""
  return """
    func.func public @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %sum = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<8x4xf32>, tensor<f32>) -> tensor<8xf32>
      %kernel = stablehlo.custom_call @other(%sum) : (tensor<8xf32>) -> tensor<8xf32>
      %effect = stablehlo.custom_call @kept(%x) {has_side_effect = true} : (tensor<8x4xf32>) -> tensor<8x4xf32>
      %loop = stablehlo.while(%each = %zero) : tensor<f32>
       cond {
        %less = stablehlo.compare LT, %each, %zero : (tensor<f32>, tensor<f32>) -> tensor<i1>
        stablehlo.return %less : tensor<i1>
      } do {
        %next = stablehlo.add %each, %each : tensor<f32>
        stablehlo.return %next : tensor<f32>
      }
      return %x : tensor<8x4xf32>
    }
  """


def test_operations_without_uses_are_erased():
  with mlir_context(), ir.Location.unknown():
    module = ir.Module.parse(dead_program())
    erase_dead(module.operation)
    assert [op.name for op in walk(main_of(module.operation))] == [
      'stablehlo.custom_call',
      'func.return',
    ]


def with_determinant(state, x):
  h = jnp.tanh(x @ state['w'])
  loss = lambda w: jnp.mean((x @ w) ** 2) + jnp.linalg.slogdet(h.T @ h + jnp.eye(16))[1]
  return jax.tree.map(lambda w: w - 0.1 * jax.grad(loss)(w), state)


def test_an_estimate_of_a_step_whose_kernels_have_unused_results():
  """cuSOLVER's has: Shardy erased the permutation of its pivots, and the bindings crashed on it."""
  step = TrainStep(with_determinant, lambda: {'w': jnp.ones((32, 16))}, jnp.ones((8, 32)))
  layout = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))
  assert Estimator(step).estimate(layout, 'h100:8', partition=False).counts.flops


def test_a_step_of_which_shardy_erases_operations(monkeypatch):
  monkeypatch.setattr('flax_spmd._src.mlir.simplification.erase_dead', lambda module: None)
  text = dead_program().replace('func.func', 'module { func.func', 1) + '}'
  with mlir_context(), ir.Location.unknown():
    code = ir.Module.parse(text).operation.get_asm(binary=True)
  with pytest.raises(EstimatorError) as caught:
    mlir.prepare(code, 'cuda')
  assert str(caught.value) == (
    'Shardy erases operations of the step, so their shardings cannot be read.\n'
    'Fix: choose the layouts, and compile them with spmd.compare.'
  )


def looked_up(start, added, is_shared):
  """A scatter that a sum follows."""

  def function(x, rows):
    scattered = jnp.full((8, 4), start).at[jnp.arange(2)].add(rows)
    total = scattered + x if added else scattered * x
    return (total, scattered) if is_shared else total

  return function


def with_scatters_in_sums(lowered):
  """The text of a module, in which scatters that are added are onto the sum."""
  with mlir_context(), ir.Location.unknown():
    module = ir.Module.parse(lowered.compiler_ir().operation.get_asm(binary=False))
    inline_all(module.operation)
    drop_copies(module.operation)
    scatter_into_sums(module.operation)
    erase_dead(module.operation)
    assert module.operation.verify()
    return str(module)


@pytest.mark.parametrize(
  ('start', 'added', 'is_shared', 'onto'),
  [
    (0.0, True, False, '%arg0'),
    (1.0, True, False, 'add'),
    (0.0, False, False, ''),
    (0.0, True, True, ''),
  ],
)
def test_a_scatter_that_is_added_is_one_onto_the_sum(start, added, is_shared, onto):
  lowered = jax.jit(looked_up(start, added, is_shared)).lower(jnp.ones((8, 4)), jnp.ones((2, 4)))
  lines = with_scatters_in_sums(lowered).splitlines()
  operand = next(re.search(r'scatter"\((%\w+),', line)[1] for line in lines if 'scatter"' in line)
  made = next((line for line in lines if line.strip().startswith(f'{operand} =')), operand)
  assert onto in made and ('add' in made) == (onto == 'add')


@pytest.mark.parametrize('is_first', [True, False])
@pytest.mark.parametrize('is_shared', [True, False])
def test_a_constraint_between_a_scatter_and_a_sum_is_one_of_the_result(is_first, is_shared):
  """That of the batch, as where it is between logits and a lookup of labels; not if anything else reads it."""
  rows = jax.sharding.NamedSharding(spmd.abstract_mesh({'batch': 8}), jax.P('batch'))

  def function(x, updates):
    scattered = jnp.zeros((8, 4)).at[jnp.arange(2)].add(updates)
    scattered = jax.lax.with_sharding_constraint(scattered, rows)
    total = scattered + jnp.sin(x) if is_first else jnp.sin(x) + scattered
    return (total, scattered) if is_shared else total

  lowered = jax.jit(function).lower(jnp.ones((8, 4)), jnp.ones((2, 4)))
  text = with_scatters_in_sums(lowered)
  makers = dict(re.findall(r'(%\w+) = "?([\w.]+)', text))
  [scattered_onto] = re.findall(r'scatter"\((%\w+),', text)
  [constrained] = re.findall(r'sdy.sharding_constraint (%\w+)', text)
  returned = re.findall(r'  return (.*) :', text)[0].split(', ')
  assert makers[constrained] == 'stablehlo.scatter'
  assert (makers[scattered_onto] == 'stablehlo.sine') != is_shared
  assert makers[returned[0]] == ('stablehlo.add' if is_shared else 'sdy.sharding_constraint')


@pytest.mark.parametrize(
  ('shapes', 'numbers', 'permutation', 'left'),
  [
    (((8, 4), (8, 2)), (((0,), (0,)), ((), ())), (1, 0), 0),
    (((3, 8, 4), (3, 8, 2)), (((0, 1), (0, 1)), ((), ())), (1, 0), 0),
    (
      ((3, 8, 4), (4, 2)),
      (((2,), (0,)), ((), ())),
      (2, 0, 1),
      1,
    ),  # XLA replaces those of two dimensions alone
    (((8, 4), (8, 4, 2)), (((1,), (1,)), ((0,), (0,))), (1, 0), 1),
  ],
)
def test_a_transposed_product_has_its_operands_in_the_other_order(shapes, numbers, permutation, left):
  function = lambda x, y: jnp.transpose(jax.lax.dot_general(x, y, numbers), permutation)
  lowered = jax.jit(function).lower(*map(jnp.ones, shapes))
  with mlir_context(), ir.Location.unknown():
    module = ir.Module.parse(lowered.compiler_ir().operation.get_asm(binary=False))
    inline_all(module.operation)
    transpose_products(module.operation)
    assert module.operation.verify()
    assert str(module).count('stablehlo.transpose') == left


def test_dimensions_of_size_1_are_reshaped_and_others_are_not():
  def function(x):
    one = jnp.max(x[:, :, None], -1) + jax.lax.broadcast_in_dim(x, (4, 1, 4), (0, 2))[:, 0]
    return one, jax.lax.broadcast_in_dim(x, (4, 1, 4), (2, 0)), jnp.sum(x, 0)

  text = jax.jit(function).lower(jnp.ones((4, 4))).compiler_ir().operation.get_asm(binary=False)
  with mlir_context(), ir.Location.unknown():
    module = ir.Module.parse(text)
    inline_all(module.operation)
    reshape_units(module.operation)
    left = str(module)
  # a transposing broadcast and the sum over four rows stay
  assert [left.count(f'stablehlo.{kind}') for kind in ('broadcast_in_dim', 'reduce(')] == [1, 1]


def random_slice(draw):
  """The sizes of an array, those that it is reshaped to, and the first and last index of a slice per dimension."""
  sizes = [draw.choice((1, 2, 2, 3, 4)) for _ in range(draw.randint(1, 4))]
  rest, reshaped = math.prod(sizes), []
  while rest > 1:
    reshaped.append(draw.choice([each for each in range(1, rest + 1) if rest % each == 0]))
    rest //= reshaped[-1]
  edges = [(0, size) for size in reshaped or [1]]
  for dim in draw.choice(([0], [0], [0], [draw.randrange(len(edges))], range(min(2, len(edges))))):
    first, last = sorted(draw.sample(range(edges[dim][1] + 1), 2))
    edges[dim] = (first, last)
  return sizes, reshaped or [1], edges


def test_slices_of_reshaped_arrays_are_taken_first_where_the_compiler_does_so():
  draw, moved = random.Random(5), 0
  drawn = (random_slice(draw) for _ in range(80))
  for sizes, reshaped, edges in (one for one in drawn if one[2] != [(0, size) for size in one[1]]):
    starts, limits = zip(*edges)
    function = lambda x, *where: jax.lax.slice(x.reshape(where[0]), *where[1:])
    lowered = jax.jit(function, static_argnums=(1, 2, 3)).lower(
      jnp.ones(sizes), tuple(reshaped), starts, limits
    )
    compiled = re.findall(r'slice=\{(.*?)\}', lowered.compile().as_text()) or ['']
    with mlir_context(), ir.Location.unknown():
      module = ir.Module.parse(lowered.compiler_ir().operation.get_asm(binary=False))
      inline_all(module.operation)
      slice_before_reshapes(module.operation, compat.SLICES_ANY_ROWS_FIRST)
      assert module.operation.verify()
      [op] = [one for one in walk(main_of(module.operation)) if one.name == 'stablehlo.slice']
      names = ('start_indices', 'limit_indices', 'strides')
      rows = [*zip(*(ir.DenseI64ArrayAttr(op.attributes[name]) for name in names))]
      moved += isinstance(op.operands[0].owner, ir.Block)
    indices = [re.findall(r'\[(\d+):(\d+)\]', one) for one in compiled]
    expected = [(int(a), int(b), 1) for a, b in indices[0] if (a, b) != ('0', '1')]
    assert [row for row in rows if row != (0, 1, 1)] == expected, (sizes, reshaped, edges)
  assert moved > 5


def test_operations_come_after_their_operands_from_the_first_result_on():
  def function(x):
    late = jnp.sin(x)
    unused = jnp.tanh(x)
    early = jax.lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: jnp.exp(c) + jnp.cos(c), x)
    return early * 2, late, jax.lax.optimization_barrier(unused)

  text = jax.jit(function).lower(jnp.ones(8)).compiler_ir().operation.get_asm(binary=False)
  with mlir_context(), ir.Location.unknown():
    module = ir.Module.parse(text)
    inline_all(module.operation)
    order_by_operands(main_of(module.operation).regions[0].blocks[0])
    assert module.operation.verify()
    left = str(module)
  places = [left.index(f'stablehlo.{kind}') for kind in ('while', 'multiply', 'sine', 'tanh')]
  assert places == sorted(places)


UNARY = (jnp.exp, jnp.tanh, jnp.negative, jnp.square, lambda x: 2 * x, jax.nn.sigmoid, jnp.abs)


def random_step(draw):
  """A step of random elementwise operations, products, norms and constraints, with Adam's update."""
  kinds = [draw.choice(('unary', 'product', 'residual', 'norm', 'constraint')) for _ in range(9)]
  functions = [draw.choice(UNARY) for _ in kinds]
  names = draw.choice((('batch', 'embed'), ('batch', None), (None, 'embed')))

  def create():
    box = lambda *names: spmd.LogicallyPartitioned(jnp.ones((64, 64)), names)
    return {'w': box('embed', 'mlp'), 'v': box('mlp', 'embed'), 'mu': box('embed', 'mlp')}

  def model(w, v, x):
    first = x
    for kind, function in zip(kinds, functions):
      x = {
        'unary': lambda x, function=function: function(function(x)),
        'product': lambda x, function=function: function(x @ w) @ v,
        'residual': lambda x, function=function: function(x) + first,
        'norm': lambda x: x / jnp.sum(x**2, -1, keepdims=True),
        'constraint': lambda x: spmd.with_logical_constraint(x, names),
      }[kind](x)
    return jnp.sum(x**2)

  def step(state, x):
    w, v, mu = (state[name].unbox() for name in ('w', 'v', 'mu'))
    loss, (dw, dv) = jax.value_and_grad(model, (0, 1))(w, v, x)
    mu = 0.9 * mu + 0.1 * dw
    new = {'w': w - 0.1 * mu / (jnp.sqrt(mu**2) + 1), 'v': v - 0.1 * dv, 'mu': mu}
    return {name: state[name].replace_boxed(value) for name, value in new.items()}, loss

  return TrainStep(step, create, jax.ShapeDtypeStruct((64, 64), jnp.float32), placements=('batch', None))


@pytest.mark.parametrize(
  'seed', [*range(6), 35]
)  # 35: where two shardings meet, another operation is resharded
def test_merging_operations_on_one_array_changes_no_estimate(seed, monkeypatch):
  draw, target = random.Random(seed), parse_target('h100:8')
  step = random_step(draw)
  merged = Estimator(step)
  monkeypatch.setattr('flax_spmd._src.estimate.mlir.module.merge_unary', lambda *_: [])
  plain = Estimator(step)
  for _ in range(3):
    axis = functools.partial(draw.choice, (None, 'data', 'model'))
    rules = (('batch', 'data'), ('embed', axis()), ('mlp', axis()))
    layout = spmd.Layout(spmd.abstract_mesh({'data': 2, 'model': 4}), rules)
    one, other = (estimator.estimate(layout, target) for estimator in (merged, plain))
    assert one.counts.by_kind() == other.counts.by_kind()
    assert (one.counts[:2], one.memory) == (other.counts[:2], other.memory)


def test_operations_beside_arguments_results_and_constraints_are_not_merged():
  def function(w, x):
    constrained = jax.lax.with_sharding_constraint(jnp.exp(x @ w), sharding)
    return jnp.sum(jnp.tanh(jnp.abs(constrained) @ jnp.negative(w))), jnp.exp(x @ w)

  sharding = jax.sharding.NamedSharding(
    spmd.Layout({'data': 8}).mesh, jax.sharding.PartitionSpec('data')
  )
  text = jax.jit(function).lower(*2 * [jnp.ones((8, 8))]).compiler_ir().operation.get_asm(binary=False)
  with mlir_context(), ir.Location.unknown():
    module = ir.Module.parse(text)
    main = main_of(module.operation)
    values = [value for op in walk(main) for value in op.results]
    pairs = merge_unary(walk(main), {value: number for number, value in enumerate(values)})
    assert len(pairs) == 1
    left = str(module)
  kinds = ('exponential', 'tanh', 'abs', 'negate')
  assert [left.count(f'stablehlo.{kind}') for kind in kinds] == [2, 0, 1, 1]
