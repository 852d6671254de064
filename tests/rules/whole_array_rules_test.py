"""Rules for whole arrays: path rules, `fsdp`, functions, and tables within tables."""

import pickle
import re
import subprocess
import sys
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors
from flax_spmd._src.rules.path_patterns import plain_text
from tests.texts import text_of

DATA = spmd.fsdp('data', min_size=1)
LAYOUT = spmd.Layout(spmd.abstract_mesh({'data': 2, 'model': 4}), (('embed', 'data'), ('mlp', 'model')))


def on(rules, mesh=None, **policies):
  return spmd.Layout(spmd.make_mesh(mesh or {'data': 8}), rules, **policies)


def test_lazy_quantifiers_in_path_rules():
  assert plain_text(re.compile('l/.*?/kernel$')) == '/kernel'
  layout = on((('layers/.*?/kernel$', P('data')),))
  assert layout.spec({'layers': {'0': {'kernel': jnp.ones(8)}}}) == {
    'layers': {'0': {'kernel': P('data')}}
  }


def test_arguments_of_fsdp():
  assert spmd.fsdp('data', skip='blocks').skip == ('blocks',)
  for clause in (spmd.fsdp, spmd.optimizer_over):  # a number of NumPy is written as an integer
    assert (
      repr(spmd.Rules(clause('data', min_size=np.prod((2, 8)))))
      == f"Rules({clause.__name__}('data', min_size=16))"
    )
  assert (
    text_of(errors.RulesError, spmd.fsdp, 3, skip=3)
    == dedent("""\
    fsdp(...) does not take axes=3, skip=3.
    Fix: axes is a mesh axis or a tuple of them, min_size a number of elements, skip a tuple of names.""")
  )


def test_an_indivisible_path_rule_is_skipped_for_fsdp():
  """With indivisible='next': the path rule cannot shard 6 rows over 4 devices."""
  rules = (('w$', P('model', None)), spmd.fsdp('data', min_size=1))
  array = jax.ShapeDtypeStruct((6, 5), jnp.float32)
  left = LAYOUT.replace(rules=spmd.Rules(*rules, indivisible='next'))
  assert left.spec({'w': array}) == {'w': P('data', None)}
  assert text_of(errors.LayoutError, LAYOUT.replace(rules=rules).spec, {'w': array})


def test_an_error_in_a_function_names_the_array():
  with pytest.raises(TypeError) as caught:
    on(lambda leaf: P('data') if leaf.names[0] == 'a' else None).spec({'w': jnp.ones(8)})
  assert "called with Leaf(path='w', shape=(8,)" in caught.value.__notes__[0]


def test_each_table_has_its_own_missing_axis_policy():
  lenient = spmd.Rules(spmd.fsdp('pod', min_size=1), missing_axis='drop')
  assert on((('^opt/', lenient),)).spec({'opt': {'w': jnp.ones(8)}}) == {'opt': {'w': P()}}
  strict = spmd.Rules(('^opt/', spmd.Rules(spmd.fsdp('pod'))), missing_axis='drop')
  text = text_of(errors.MeshAxisError, on, strict)
  assert text.startswith("Rule 0.0 fsdp('pod') uses mesh axis 'pod', but the mesh has axes ('data',).")


def test_a_pickled_table_is_equal_in_another_process():
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


def test_the_spec_of_no_names_is_none():
  assert LAYOUT.rules.spec(None) is None


def test_a_layout_differs_from_its_table():
  assert LAYOUT.rules != LAYOUT
  assert spmd.Layout(LAYOUT.mesh, LAYOUT.rules) == LAYOUT
