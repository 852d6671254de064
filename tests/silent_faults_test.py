"""Ways in which whole-array rules, places and jit could go wrong in silence, each seen once."""

import pickle
import re
import subprocess
import sys
import threading
from textwrap import dedent

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors
from flax_spmd._src.rules.path_patterns import plain_text

DATA = spmd.fsdp('data', min_size=1)
BOTH = {'data': 2, 'model': 4}
ADAFACTOR = optax.adafactor(1e-3, min_dim_size_to_factor=8)


def on(rules, mesh=None, **policies):
  return spmd.Layout(spmd.make_mesh(mesh or {'data': 8}), rules, **policies)


def state_of(params, tx):
  return TrainState.create(apply_fn=None, params=params, tx=tx)


def text_of(kind, fn, *args, **kwargs):
  with pytest.raises(kind) as caught:
    fn(*args, **kwargs)
  return str(caught.value)


def test_lazy_quantifiers_are_searched_for_like_any():
  assert plain_text(re.compile('l/.*?/kernel$')) == '/kernel'
  layout = on((('layers/.*?/kernel$', P('data')),))
  assert layout.spec({'layers': {'0': {'kernel': jnp.ones(8)}}}) == {
    'layers': {'0': {'kernel': P('data')}}
  }


def test_what_is_wrong_with_a_copy_only_is_said():
  """A table for the optimizer's state objects to moments, and not to the parameters."""
  layout = on((('^opt_state/', spmd.Rules(('w$', P('data')))),))
  text = text_of(errors.LayoutError, layout.spec, state_of({'w': jnp.ones(6)}, optax.adam(1e-3)))
  assert [line.split(': ')[0] for line in text.splitlines()] == [
    'opt_state/0/mu/w',
    'opt_state/0/nu/w',
    'Fix',
  ]


def test_a_table_without_names_constrains_no_names():
  layout, x = on(DATA), np.ones((16, 4), np.float32)
  placed = layout.shard(x, P('data'))
  ours, flaxs = (
    layout.jit(lambda x, f=f: f(2 * x, ('batch', 'embed')))(placed).sharding.spec
    for f in (spmd.with_logical_constraint, nn.with_logical_constraint)
  )
  assert ours == flaxs == P('data')


def test_a_state_in_parts_stays_where_init_put_it():
  """Parameters and optimizer state as two results, and path rules that tell them apart."""
  for rules in ((('^1/', spmd.Rules(DATA)),), (('kernel', P('data', 'model')),)):
    layout = on(rules, BOTH)

    def create():
      params = {'kernel': jnp.ones((16, 32))}
      return params, ADAFACTOR.init(params)

    params, opt_state = layout.init(create)
    before = jax.tree.map(lambda x: x.sharding, (params, opt_state))
    step = layout.jit(lambda params, opt_state: (params, opt_state, 0.0))
    params, opt_state, _ = step(params, opt_state)
    assert jax.tree.map(lambda x: x.sharding, (params, opt_state)) == before


def test_a_bias_of_the_same_size_changes_no_other_array():
  layout = on((('.', P('model')),), BOTH)
  for params in ({'kernel': jnp.ones((16, 16))}, {'kernel': jnp.ones((16, 16)), 'bias': jnp.ones(16)}):
    specs = layout.spec(state_of(params, ADAFACTOR)).opt_state
    assert (specs[0].v_row['kernel'], specs[0].v_col['kernel']) == (P('model'), P(None))


def test_a_rule_for_the_state_itself_means_its_own_shape():
  layout = on((('v_col/', P('model')), ('v_row/', P('model'))), BOTH)
  specs = layout.spec(state_of({'kernel': jnp.ones((16, 32))}, ADAFACTOR)).opt_state[0]
  assert (specs.v_row['kernel'], specs.v_col['kernel']) == (P('model'), P('model'))
  layout = on((('_memory/', P(None, 'data', 'model')),), BOTH)
  memory = optax.scale_by_lbfgs(memory_size=4).init({'w': jnp.ones((8, 16))})
  assert P(None, 'data', 'model') in jax.tree.leaves(
    layout.spec({'w': jnp.ones((8, 16)), 'opt': memory})
  )


def test_path_rules_over_boxes_read_factored_moments_too():
  layout = on((('kernel', P('data', 'model')),), BOTH)
  box = spmd.LogicallyPartitioned(jnp.ones((16, 32)), ('embed', 'mlp'))
  specs = layout.spec(state_of({'kernel': box}, ADAFACTOR)).opt_state[0]
  assert (specs.v_row['kernel'], specs.v_col['kernel']) == (P('data'), P('model'))


def test_many_policies_on_the_spot_do_not_make_a_layout_forget():
  rules = (('embed', 'data'),)
  layout = on(rules)
  plain = layout.init(
    lambda: {'w': spmd.LogicallyPartitioned(jnp.ones((8, 8)), ('embed', None)), 'b': jnp.ones(3)},
    boxed=False,
  )
  for _ in range(300):
    layout.shard(np.ones(8), lambda leaf: P('data'))
  assert on(rules).spec(plain)['w'] == P('data', None)


def test_static_arguments_that_are_equal_and_not_the_same():
  fn = on(()).jit(lambda m, x: x if isinstance(m, bool) else {'a': x, 'b': x}, static_argnums=0)
  assert set(fn(1, np.ones(8))) == {'a', 'b'}
  assert fn(True, np.ones(8)).shape == (8,)


def test_a_static_argument_without_a_hash_is_named():
  fn = on(()).jit(lambda sizes, x: x, static_argnums=0)
  assert text_of(TypeError, fn, [1], np.ones(8)) == dedent("""\
    Static argument 0 is a list, which has no hash: [1].
    Fix: pass a tuple, a frozen dataclass or another hashable value.""")


def test_rules_of_keyword_only_arguments_hold_when_lowering_and_calling():
  layout = on(())

  def total(*, x):
    return x.sum()

  fn = layout.jit(total, in_rules={'x': P('data')})
  lowered = fn.lower(x=jax.ShapeDtypeStruct((8,), jnp.float32)).compile()
  assert lowered.input_shardings[1]['x'].is_equivalent_to(jax.NamedSharding(layout.mesh, P('data')), 1)
  assert float(fn(x=np.ones(8))) == 8
  text = text_of(errors.LayoutError, fn, x=layout.replicate(np.ones(8)))
  assert text.startswith(
    "argument 1/x lies as P() on {'data': 8}, but in_rules ask for P('data',) on {'data': 8}."
  )


def test_each_of_any_number_of_arguments_has_the_place():
  fn = on(()).jit(lambda *xs: xs, in_rules={'xs': P('data')}, out_rules=P('data'))
  assert [x.sharding.spec for x in fn(np.ones(8), np.ones(16))] == [P('data'), P('data')]
  lowered = fn.lower(*[jax.ShapeDtypeStruct((8,), jnp.float32)] * 2).compile()
  assert {sharding.spec for sharding in lowered.input_shardings[0]} == {P('data')}


def test_threads_that_share_a_function_each_get_their_plan():
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


def test_a_table_from_another_process_is_the_same_table():
  rules = spmd.Rules(('batch', 'data'), DATA, unmatched='error')
  code = (
    'import pickle, sys, flax_spmd as spmd; sys.stdout.buffer.write(pickle.dumps('
    "spmd.Rules(('batch', 'data'), spmd.fsdp('data', min_size=1), unmatched='error')))"
  )
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, check=True, env={'PYTHONHASHSEED': '7'}
  )
  other = pickle.loads(done.stdout)
  assert other == rules and hash(other) == hash(rules)


def test_what_fsdp_takes():
  assert spmd.fsdp('data', skip='blocks').skip == ('blocks',)
  assert (
    text_of(errors.RulesError, spmd.fsdp, 3, min_size='big', skip=3)
    == dedent("""\
    fsdp(...) does not take axes=3, min_size='big', skip=3.
    Fix: axes is a mesh axis or a tuple of them, min_size a number of elements, skip a tuple of names.""")
  )


def test_a_box_takes_rules_for_names_only():
  text = text_of(errors.RulesError, spmd.LogicallyPartitioned, 1, ('a',), None, spmd.Rules(DATA))
  assert text == dedent("""\
    A box has Rules(fsdp('data', min_size=1)), but a box can only have rules for logical names.
    Fix: put rules for paths, fsdp(...) and functions into the table of the layout.""")
  box = spmd.LogicallyPartitioned(jnp.ones((8, 8)), ('e', 'f'), None, (('x', None), ('e', 'data')))
  why = spmd.explain(on(()), {'w': box}).why('w')
  assert "dim 0, 'e' (8): data, from the box" in why


def test_each_table_has_its_own_word_about_missing_axes():
  lenient = spmd.Rules(spmd.fsdp('pod', min_size=1), missing_axis='drop')
  assert on((('^opt/', lenient),)).spec({'opt': {'w': jnp.ones(8)}}) == {'opt': {'w': P()}}
  strict = spmd.Rules(('^opt/', spmd.Rules(spmd.fsdp('pod'))), missing_axis='drop')
  text = text_of(errors.MeshAxisError, on, strict)
  assert text.startswith("Rule 0.0 fsdp('pod') uses mesh axis 'pod', but the mesh has axes ('data',).")


def test_mesh_axes_of_a_box_are_no_logical_names():
  box = spmd.Partitioned(jnp.ones((8, 8)), ('data', None))
  for rules in ((('w', P(None, 'data')),), (('data', 'model'), ('w', P(None, 'data')))):
    assert on(rules, BOTH).spec({'w': box}) == {'w': P(None, 'data')}


def test_a_policy_that_fails_says_where():
  with pytest.raises(TypeError) as caught:
    on(lambda leaf: P('data') if leaf.names[0] == 'a' else None).spec({'w': jnp.ones(8)})
  assert "called with Leaf(path='w', shape=(8,)" in caught.value.__notes__[0]


def test_numbers_in_a_constrained_tree_stay():
  layout = on(())
  out = layout.jit(lambda x: spmd.with_sharding_constraint({'x': x, 'n': 3}, P('data')))(np.ones(8))
  assert out['n'] == 3 and out['x'].shape == (8,)


def test_every_offender_of_every_part_is_listed():
  rules = spmd.Rules(('w$', P('data')))
  tree = {'a': {'w': np.ones(6)}, 'b': {'w': np.ones(6)}, 'c': np.ones(7)}
  text = text_of(errors.LayoutError, on(()).shard, tree, {'a': rules, 'b': rules, 'c': P('data')})
  assert [line.split(', dim')[0] for line in text.splitlines() if not line.startswith('Fix')] == [
    'a: w',
    'b: w',
    'c',
  ]


def test_an_inner_function_that_was_traced_before_makes_no_warning():
  layout = on((('@a', P('data')), ('@b', P('data'))))
  inner = jax.jit(lambda w: spmd.with_sharding_annotation(w, 'b'))
  fn = layout.jit(lambda x, w: (spmd.with_sharding_annotation(x, 'a'), inner(w)))
  fn(np.ones(8), np.ones(8))
  fn(np.ones(16), np.ones(8))
