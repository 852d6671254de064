"""Static, keyword-only and variadic arguments of `layout.jit`, and calls from several threads."""

import sys
import threading
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors

DATA = spmd.fsdp('data', min_size=1)


def on(rules, mesh=None, **policies):
  return spmd.Layout(spmd.make_mesh(mesh or {'data': 8}), rules, **policies)


def text_of(kind, fn, *args, **kwargs):
  with pytest.raises(kind) as caught:
    fn(*args, **kwargs)
  return str(caught.value)


def test_equal_static_arguments_of_different_types():
  fn = on(()).jit(lambda m, x: x if isinstance(m, bool) else {'a': x, 'b': x}, static_argnums=0)
  assert set(fn(1, np.ones(8))) == {'a', 'b'}
  assert fn(True, np.ones(8)).shape == (8,)


def test_an_unhashable_static_argument_is_named():
  fn = on(()).jit(lambda sizes, x: x, static_argnums=0)
  assert text_of(TypeError, fn, [1], np.ones(8)) == dedent("""\
    Static argument 0 is a list, which is not hashable: [1].
    Fix: pass a tuple, a frozen dataclass or another hashable value.""")


def test_in_rules_for_keyword_only_arguments():
  layout = on(())

  def total(*, x):
    return x.sum()

  fn = layout.jit(total, in_rules={'x': P('data')})
  lowered = fn.lower(x=jax.ShapeDtypeStruct((8,), jnp.float32)).compile()
  assert lowered.input_shardings[1]['x'].is_equivalent_to(jax.NamedSharding(layout.mesh, P('data')), 1)
  assert float(fn(x=np.ones(8))) == 8
  text = text_of(errors.LayoutError, fn, x=layout.replicate(np.ones(8)))
  assert text.startswith(
    "argument 1/x is sharded as P() on {'data': 8}, but in_rules require P('data',) on {'data': 8}."
  )


def test_in_rules_for_variadic_arguments():
  fn = on(()).jit(lambda *xs: xs, in_rules={'xs': P('data')}, out_rules=P('data'))
  assert [x.sharding.spec for x in fn(np.ones(8), np.ones(16))] == [P('data'), P('data')]
  lowered = fn.lower(*[jax.ShapeDtypeStruct((8,), jnp.float32)] * 2).compile()
  assert {sharding.spec for sharding in lowered.input_shardings[0]} == {P('data')}


def test_threads_that_share_a_function_get_the_right_shardings():
  layout = on(DATA)
  shapes = [(16, 8), (8, 16), (24, 8), (8, 24)]
  wrong = []
  old = sys.getswitchinterval()
  sys.setswitchinterval(1e-6)
  try:
    for _ in range(5):
      fn = layout.jit(lambda x: x + 1, in_rules=DATA, out_rules=DATA)

      def work(shape, fn=fn):
        expected = P('data', None) if shape[0] > shape[1] else P(None, 'data')
        for _ in range(3):
          if fn(np.ones(shape)).sharding.spec != expected:
            wrong.append(shape)

      threads = [threading.Thread(target=work, args=(shape,)) for shape in shapes]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()
  finally:
    sys.setswitchinterval(old)
  assert not wrong
