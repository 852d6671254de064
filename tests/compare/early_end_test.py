"""Compilations end before code is generated: beside those to the end, by each compiler that is installed."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd._src.compare import compilation
from flax_spmd._src.compare.hardware import compiler_environment, parse_target
from flax_spmd._src.compare.lowering import lower
from flax_spmd._src.hlo.counts import count
from flax_spmd.errors import TargetDeviceError
from flax_spmd.explore import TrainStep

TO_THE_END = """
import dataclasses, json, pathlib, sys
from flax_spmd._src.compare.compile_worker import devices_of
from flax_spmd._src.compare.hardware import parse_target
from flax_spmd._src.compat import _compiled

folder = pathlib.Path(sys.argv[1])
compiled = _compiled((folder / 'program.mlir').read_bytes(), devices_of(parse_target(sys.argv[2]), (8,)), {})
stats = compiled.get_compiled_memory_stats()
memory = {
  'arguments': stats.argument_size_in_bytes,
  'results': stats.output_size_in_bytes,
  'shared': stats.alias_size_in_bytes,
  'temporaries': stats.temp_size_in_bytes,
  'peak': stats.peak_memory_in_bytes,
}
(folder / 'hlo.txt').write_text(compiled.hlo_modules()[0].to_string())
(folder / 'memory.json').write_text(json.dumps(memory))
"""


def step(params, batch):
  def loss(params):
    x = batch
    for weights in params:
      x = jnp.tanh(x @ weights)
    return jnp.mean(x**2)

  value, gradients = jax.value_and_grad(loss)(params)
  return jax.tree.map(lambda one, other: one - 0.1 * other, params, gradients), value


def create():
  return [jnp.ones((1024, 1024))] * 4


@pytest.mark.slow
@pytest.mark.parametrize('name', ['cpu:8', 'h100:8', 'v5e:2x4'])
def test_the_program_and_its_memory_are_those_of_a_whole_compilation(tmp_path, monkeypatch, name):
  """A TPU's compiler reports the peak of its vector memory in the place of a smaller one, so the program is large."""
  target = parse_target(name)
  try:
    compilation.check_compiler(target)
  except TargetDeviceError as error:
    pytest.skip(str(error))
  monkeypatch.setenv('FLAX_SPMD_CACHE', str(tmp_path / 'cache'))
  layout = spmd.Layout(
    spmd.abstract_mesh({'data': 8}), (('batch', 'data'), spmd.fsdp('data', min_size=1))
  )
  program = lower(
    TrainStep(step, create, jax.ShapeDtypeStruct((65536, 1024), jnp.float32)), layout, target
  )
  [[early]] = compilation.compile_jobs([compilation.CompileJob([program], target)], parallel=1)
  (tmp_path / 'program.mlir').write_bytes(program.code)
  command = [sys.executable, '-c', TO_THE_END, str(tmp_path), name]
  subprocess.run(command, check=True, env=os.environ | compiler_environment(target), capture_output=True)
  memory = json.loads((tmp_path / 'memory.json').read_text())
  compared = ['arguments', 'results', 'shared', 'peak' if name.startswith('v5e') else 'temporaries']
  assert {kind: early.memory[kind] for kind in compared} == {kind: memory[kind] for kind in compared}
  sizes = [one.bytes for one in early.live]
  assert 0.9 * memory['temporaries'] < sum(sizes) <= 1.1 * memory['temporaries'] or name.startswith(
    'v5e'
  )
  assert sizes and all(one.source.startswith('early_end_test.py:') for one in early.live[:2])
  assert early.counts == count((tmp_path / 'hlo.txt').read_text(), {'data': 8})
