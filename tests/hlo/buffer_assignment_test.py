"""The memory of a program as read from XLA's dump of it, beside JAX's own memory analysis."""

import random
import secrets

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import flax_spmd as spmd
from flax_spmd._src.compat import hlo_text
from flax_spmd._src.hlo.buffer_assignment import read_dump
from flax_spmd._src.hlo.counts import count

OPERATIONS = (
  jnp.tanh,
  lambda x: x @ x.T @ x,
  lambda x: x - x.mean(0, keepdims=True),
  lambda x: jnp.sort(x, 1),
  lambda x: x[::-1],
)


def compiled(folder, operations, rows, columns, donate, scanned):
  """A compiled program and the content of its dump."""
  sharding = NamedSharding(spmd.make_mesh({'data': 8}), PartitionSpec('data'))

  def body(x, _):
    for operation in operations:
      x = operation(x)
    return x, x.sum()

  def step(x, y):
    x, sums = jax.lax.scan(body, x, None, length=3) if scanned else body(x, None)
    return x, sums, y * 2

  step.__name__ = f'step_{secrets.token_hex(4)}'  # a program from JAX's cache would not be dumped
  array = jax.ShapeDtypeStruct((8 * rows, columns), jnp.float32, sharding=sharding)
  jitted = jax.jit(step, donate_argnums=(0,) if donate else ())
  options = {'xla_dump_to': str(folder), 'xla_dump_hlo_as_proto': True}
  program = jitted.lower(array, jnp.ones(3)).compile(compiler_options=options)
  [file] = folder.glob('*after_optimizations.hlo.pb')
  return program, file.read_bytes()


@pytest.mark.parametrize('seed', range(10))
def test_memory_and_work_are_those_of_jax(tmp_path, seed):
  drawn = random.Random(seed)
  operations = drawn.choices(OPERATIONS, k=drawn.randint(1, 4))
  rows, columns = drawn.randint(1, 40), drawn.randint(1, 40)
  program, content = compiled(
    tmp_path, operations, rows, columns, drawn.random() < 0.5, drawn.random() < 0.5
  )
  module, memory, live = read_dump(content)
  stats = program.memory_analysis()
  assert memory['arguments'] == stats.argument_size_in_bytes
  assert memory['results'] == stats.output_size_in_bytes
  assert memory['shared'] == stats.alias_size_in_bytes
  assert memory['temporaries'] == stats.temp_size_in_bytes
  assert sum(size for _, size in live) <= memory['temporaries']
  text = hlo_text(module, 8)
  assert all(f'%{name} = ' in text for name, _ in live)
  whole = program.runtime_executable().hlo_modules()[0].to_string()
  assert count(text, {'data': 8}) == count(whole, {'data': 8})


def test_a_dump_without_its_end_is_not_read(tmp_path):
  _, content = compiled(tmp_path, OPERATIONS[:2], 4, 4, True, False)
  module = read_dump(content).module
  for length in (0, 1, len(module) // 2, len(module) + 5, len(content) - 1):
    assert read_dump(content[:length]) is None


def test_a_memory_space(tmp_path):
  """Buffers of another space do not count."""
  _, content = compiled(tmp_path, OPERATIONS[:1], 4, 4, False, False)
  assert read_dump(content, 0)[:2] == read_dump(content)[:2]
  assert set(read_dump(content, 7).memory.values()) == {0} and not read_dump(content, 7).live


@pytest.mark.parametrize('donate', [False, True])
def test_the_peak_is_between_the_arguments_and_the_sum(tmp_path, donate):
  _, content = compiled(tmp_path, OPERATIONS, 16, 16, donate, True)
  memory, live = read_dump(content)[1:]
  least = memory['arguments'] + memory['results'] - memory['shared']
  rest = memory['peak'] - least - sum(size for _, size in live)
  assert (
    0 <= rest < 1024 and least < memory['peak'] <= least + memory['temporaries'] + 1024
  )  # with constants
