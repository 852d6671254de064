"""jaxlib's MLIR bindings: which versions are supported, and the simplification of modules."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir

from flax_spmd._src.compat import mlir_context
from flax_spmd._src.estimate import mlir
from flax_spmd._src.estimate.mlir.inline import drop_uniform, inline_all
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
    left = str(module)
  # the sum stays, as it reduces an array, and so does one operation for both products
  counts = {kind: left.count(f'stablehlo.{kind}') for kind in ('multiply', 'negate', 'broadcast', 'add')}
  assert counts == {'multiply': 0, 'negate': 1, 'broadcast': 1, 'add': 2}
