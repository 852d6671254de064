"""`host(...)` around clauses: the arrays that it concerns, its forms, TOML, and bad input."""

import pickle
from textwrap import dedent

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import fsdp, host, optimizer_over
from flax_spmd._src import host_memory
from flax_spmd.errors import LayoutError, MeshAxisError, MeshError, RulesError

FSDP = fsdp('data', min_size=1)
TREE = {
  'opt_state': {'count': np.ones(()), 'key': jax.random.key(0), 'mu': np.ones((8, 6)), 'w': np.ones(6)},
  'params': {'mu': np.ones((8, 6)), 'w': spmd.LogicallyPartitioned(np.ones((8, 8)), ('embed', None))},
}


def on(*rules, **policies):
  return spmd.Layout({'data': 8}, rules, **policies)


def hosted(layout):
  """The paths of the arrays in the host's memory, and all specs."""
  rows = layout.rows(TREE)
  shardings = [sharding.memory_kind for sharding in jax.tree.leaves(layout.sharding(TREE))]
  assert shardings == [row.memory or 'device' for row in rows]
  return [row.path for row in rows if row.memory == 'pinned_host']


@pytest.mark.parametrize(
  'rules, plain, paths',
  [
    (
      [('^opt_state/', host(FSDP))],
      [('^opt_state/', spmd.Rules(FSDP))],
      ['opt_state/mu', 'opt_state/w'],
    ),
    (
      [('^opt_state/', spmd.Rules(host(FSDP)))],
      [('^opt_state/', spmd.Rules(FSDP))],
      ['opt_state/mu'],  # w has no dimension that fsdp could shard
    ),
    ([host(('mu$', P('data')))], [('mu$', P('data'))], ['opt_state/mu', 'params/mu']),
    ([('mu$', host(P('data')))], [('mu$', P('data'))], ['opt_state/mu', 'params/mu']),
    ([host(('embed', 'data')), FSDP], [('embed', 'data'), FSDP], ['params/w']),
    ([('embed', host('data'))], [('embed', 'data')], ['params/w']),
    ([('embed', 'data'), host(FSDP)], [('embed', 'data'), FSDP], ['opt_state/mu', 'params/mu']),
    ([FSDP, host(optimizer_over('data', min_size=1))], [FSDP, optimizer_over('data', min_size=1)], []),
    (
      [host(optimizer_over('data', min_size=1)), FSDP],
      [optimizer_over('data', min_size=1), FSDP],
      [],  # fsdp has the axis already
    ),
    ([host(optimizer_over('data', min_size=1))], [optimizer_over('data', min_size=1)], ['opt_state/mu']),
    (
      [host(spmd.Rules(('embed', 'data'), FSDP))],
      [('embed', 'data'), FSDP],
      ['opt_state/mu', 'params/mu', 'params/w'],
    ),
    (
      [host(lambda leaf: P('data') if leaf.names else None)],
      [lambda leaf: P('data') if leaf.names else None],
      ['params/w'],
    ),
  ],
)
def test_host_changes_the_memory_and_nothing_else(rules, plain, paths):
  layout = on(*rules)
  assert hosted(layout) == paths
  assert layout.spec(TREE) == on(*plain).spec(TREE) and hosted(on(*plain)) == []
  if not callable(getattr(rules[0], 'inner', None)):
    assert spmd.Layout.from_toml(layout.to_toml()) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout != on(*plain)
    assert repr(layout.rules) != repr(on(*plain).rules)


def test_one_spelling_and_its_text():
  layout = on(('^opt_state/', host(FSDP)), host(('embed', 'data')))
  assert layout.rules == spmd.Rules(host(('^opt_state/', spmd.Rules(FSDP))), ('embed', host('data')))
  assert layout.rules.at((0, 0)) == FSDP and layout.rules.at(1) == host(('embed', 'data'))
  assert layout.to_toml().partition('[rules]\n')[2] == dedent("""\
    clauses = [
      {host = {path = "^opt_state/", rules = {clauses = [
        {fsdp = "data", min_size = 1},
      ]}}},
      {host = ["embed", "data"]},
    ]
    """)


def test_host_around_no_rule():
  with pytest.raises(RulesError) as caught:
    spmd.Rules(host(3), host('data'), host(P('data')), ('@grads', host(FSDP)))
  around = 'and host(...) is around no rule.'
  assert (
    str(caught.value)
    == dedent(f"""\
    Rule 0 is host(3), {around}
    Rule 1 is host('data'), {around}
    Rule 2 is host({P('data')!r}), {around}
    Rule 3 ('@grads', host(fsdp('data', min_size=1))) has host(...) for an annotation, whose values are in a program, not in memory.
    Fix: write host(fsdp('data')), host(('embed', 'data')), or ('^opt_state/', host(...)) with a PartitionSpec, a table or a rule.
    Fix: remove host; a policy of jax.checkpoint moves activations, such as save_and_offload_only_these_names.""")
  )


def test_errors_inside_of_host():
  with pytest.raises(MeshAxisError, match=r"Rule 0 fsdp\('dta'\) uses mesh axis 'dta'"):
    on(host(fsdp('dta')))
  with pytest.raises(RulesError, match=r"Rule 0: '\(' is not a regular expression"):
    on(host(('(', P())))
  for entry in ('3', '"data"', '["a"]', '{}', '{host = 3}', '{path = "a"}'):
    with pytest.raises(RulesError, match=r'a rule rules.clauses\[0\] that means nothing'):
      spmd.Layout.from_toml(f'format = 1\n[mesh]\ndata = 8\n[rules]\nclauses = [{{host = {entry}}}]')


def test_a_backend_without_the_memory_of_the_host(monkeypatch):
  monkeypatch.setattr(host_memory, 'memory_kinds', lambda device: ['device', 'unpinned_host'])
  on(FSDP)
  with pytest.raises(MeshError) as caught:
    on(host(('embed', 'data')), ('^opt_state/', spmd.Rules(host(FSDP))))
  assert (
    str(caught.value)
    == dedent("""\
    rule 0 host(('embed', 'data')): cpu devices have no memory 'pinned_host', only 'device', 'unpinned_host'.
    rule 1.0 host(fsdp('data', min_size=1)): cpu devices have no memory 'pinned_host', only 'device', 'unpinned_host'.
    Fix: remove host(...) from the rules, or use a backend with this memory: GPUs, TPUs, and CPUs since JAX 0.4.31.""")
  )


def test_pipelines_move_no_arrays():
  with pytest.raises(LayoutError) as caught:
    spmd.Layout({'stage': 8}, (host(('embed', None)),)).pipeline_jit(lambda x: x)
  assert str(caught.value) == dedent("""\
    rule 0 host(('embed', None)): layout.pipeline_jit moves no arrays out of the memory of the host.
    Fix: use layout.jit, or rules without host(...).""")


def test_a_checkpoint_of_recorded_rules_for_a_backend_without_the_memory_of_the_host(
  tmp_path, monkeypatch
):
  saved, without = on(host(('embed', 'data'))), on(('embed', 'data'))
  w = spmd.LogicallyPartitioned(np.ones((8, 4), np.float32), ('embed', None))
  spmd.checkpoint.save(tmp_path / 'a', saved.shard({'w': w}), saved)
  monkeypatch.setattr(host_memory, 'memory_kinds', lambda device: ['device', 'unpinned_host'])
  with pytest.raises(MeshError) as caught:
    spmd.checkpoint.restore(tmp_path / 'a')
  assert (
    str(caught.value)
    == dedent("""\
    rule 0 host(('embed', 'data')): cpu devices have no memory 'pinned_host', only 'device', 'unpinned_host'.
    Fix: these are the recorded rules; pass layout=, rules= or a target without host(...), or use a backend with this memory: GPUs, TPUs, and CPUs since JAX 0.4.31.""")
  )
  for options in (
    {'layout': without},
    {'rules': without.rules},
    {'target': without.abstract(lambda: {'w': w})},
  ):
    restored = spmd.checkpoint.restore(tmp_path / 'a', **options)
    assert jax.tree.leaves(restored)[0].sharding.memory_kind == 'device'
