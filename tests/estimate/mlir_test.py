"""jaxlib's MLIR bindings: which versions are supported, and the simplification of modules."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir

from flax_spmd._src.compat import mlir_context
from flax_spmd._src.estimate import mlir
from flax_spmd._src.estimate.mlir.inline import (
  drop_selects,
  drop_uniform,
  erase_dead,
  inline_all,
  order_by_operands,
  reshape_units,
)
from flax_spmd._src.estimate.mlir.read_graph import main_of
from flax_spmd.errors import EstimatorError
from flax_spmd.explore import Estimator, TrainStep


def test_an_unsupported_jaxlib_is_refused(monkeypatch):
  monkeypatch.setattr(mlir, 'jaxlib_version', lambda: '0.99.1')
  with pytest.raises(EstimatorError) as error:
    Estimator(TrainStep(lambda state, x: (state, x), lambda: {'w': jnp.ones(8)}, jnp.ones(8)))
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
    inline_all(module)
    drop_uniform(module.operation)
    erase_dead(module.operation)
    left = str(module)
  # the sum stays, as it reduces an array, and so does one operation for both products
  counts = {kind: left.count(f'stablehlo.{kind}') for kind in ('multiply', 'negate', 'broadcast', 'add')}
  assert counts == {'multiply': 0, 'negate': 1, 'broadcast': 1, 'add': 2}


@pytest.mark.parametrize(('other', 'left'), [(jnp.zeros, 0), (jnp.ones, 1)])
def test_selections_between_equal_constants_are_dropped(other, left):
  select = lambda mask: jnp.where(mask, jnp.zeros((8, 4)), other((8, 4)))
  text = jax.jit(lambda x: select(x > 0)).lower(jnp.ones((8, 4))).compiler_ir()
  text = text.operation.get_asm(binary=False)
  with mlir_context(), ir.Location.unknown():
    module = ir.Module.parse(text)
    inline_all(module)
    drop_selects(module.operation)
    erase_dead(module.operation)
    assert str(module).count('stablehlo.select') == str(module).count('stablehlo.compare') == left


def test_dimensions_of_size_1_are_reshaped_and_others_are_not():
  def function(x):
    one = jnp.max(x[:, :, None], -1) + jax.lax.broadcast_in_dim(x, (4, 1, 4), (0, 2))[:, 0]
    return one, jax.lax.broadcast_in_dim(x, (4, 1, 4), (2, 0)), jnp.sum(x, 0)

  text = jax.jit(function).lower(jnp.ones((4, 4))).compiler_ir().operation.get_asm(binary=False)
  with mlir_context(), ir.Location.unknown():
    module = ir.Module.parse(text)
    inline_all(module)
    reshape_units(module.operation)
    left = str(module)
  # a transposing broadcast and the sum over four rows stay
  assert [left.count(f'stablehlo.{kind}') for kind in ('broadcast_in_dim', 'reduce(')] == [1, 1]


def test_operations_come_after_their_operands_from_the_first_result_on():
  def function(x):
    late = jnp.sin(x)
    unused = jnp.tanh(x)
    early = jax.lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: jnp.exp(c) + jnp.cos(c), x)
    return early * 2, late, jax.lax.optimization_barrier(unused)

  text = jax.jit(function).lower(jnp.ones(8)).compiler_ir().operation.get_asm(binary=False)
  with mlir_context(), ir.Location.unknown():
    module = ir.Module.parse(text)
    inline_all(module)
    order_by_operands(main_of(module.operation).regions[0].blocks[0])
    assert module.operation.verify()
    left = str(module)
  places = [left.index(f'stablehlo.{kind}') for kind in ('while', 'multiply', 'sine', 'tanh')]
  assert places == sorted(places)
