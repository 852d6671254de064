"""What a search may try: candidates, their one spelling, the space of them, and where it begins."""

import functools
import math
from textwrap import dedent

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd._src.search.candidate import Axis, Candidate, canonical, layout_of, rules_of, text_of
from flax_spmd._src.search.model_facts import Facts, PathKind, facts_of
from flax_spmd._src.search.space import Space, factorisations
from flax_spmd._src.search.starts import PRESETS, seeds
from flax_spmd._src.search.user_constraints import wishes_of
from flax_spmd.errors import SearchError
from flax_spmd.explore import parse

BATCH = frozenset({'batch'})
NAMES = {
  'batch': (64,),
  'length': (128,),
  'embed': (96,),
  'mlp': (256,),
  'act_mlp': (1, 256),
  'odd': (7,),
}
PARAMETERS = frozenset({'embed', 'mlp', 'odd'})
TOGETHER = frozenset(
  map(frozenset, [('embed', 'mlp'), ('batch', 'length'), ('batch', 'act_mlp'), ('length', 'act_mlp')])
)
FACTS = Facts(NAMES, PARAMETERS, TOGETHER, BATCH, (2**20, 1))


def space(target='h100:64', facts=FACTS, memory=None, choices=(), **wishes):
  aim = parse(target)
  given = {'mesh': None, 'pin': None, 'forbid': (), 'batch_only': (), 'tensor': None} | wishes
  return Space(facts, wishes_of(aim, facts, memory, **given), aim, dict(choices))


def one(*sizes, **fields):
  placed = tuple((name, tuple(axes)) for name, axes in fields.pop('placed', {}).items())
  return Candidate(tuple(Axis(size) for size in sizes), placed, **fields)


# -- a candidate as a layout


def test_a_candidate_as_a_layout():
  candidate = one(
    4, 8, 2, placed={'batch': (0, 1), 'mlp': (2,)}, fill=(1,), choices=(('remat', 'full'),)
  )
  layout = layout_of(candidate, BATCH)
  assert dict(layout.mesh.shape) == {'replica': 4, 'data': 8, 'model': 2}
  assert layout.rules == spmd.Rules(('batch', ('replica', 'data')), ('mlp', 'model'), spmd.fsdp('data'))
  text = 'replica 4, data 8, model 2: batch replica+data; mlp model; fsdp data; remat=full'
  assert text_of(candidate, BATCH) == text


def test_a_table_for_the_optimizer_keeps_the_names():
  candidate = one(8, 8, placed={'batch': (0,), 'mlp': (1,)}, state=(0,), least=1)
  inner = spmd.Rules(('mlp', 'model'), spmd.fsdp('data', min_size=1))
  rules = spmd.Rules(('(^|/)opt_state/', inner), ('batch', 'data'), ('mlp', 'model'))
  assert rules_of(candidate, BATCH) == rules


def test_a_candidate_with_paths():
  candidate = one(8, 8, placed={'batch': (0,)}, paths=(('(^|/)wi$', 2, 1, (1,)),))
  assert rules_of(candidate, BATCH) == spmd.Rules(('batch', 'data'), ('(^|/)wi$', P(None, 'model')))
  assert text_of(candidate, BATCH) == 'data 8, model 8: batch data; (^|/)wi$ [1] model'


def test_axes_are_named_by_what_lies_over_them():
  mesh = lambda candidate: [*layout_of(candidate, BATCH).mesh.shape]
  assert mesh(one(2, 2, 2, placed={'batch': (0,), 'expert': (1,), 'length': (2,)})) == [
    'data',
    'expert',
    'context',
  ]
  assert mesh(one(2, 2, 2, placed={'batch': (0,), 'mlp': (1,), 'heads': (2,)})) == [
    'data',
    'model',
    'model_2',
  ]
  assert mesh(one(2, 2, 2, placed={'batch': (0,)}, fill=(1,))) == ['replica', 'fsdp', 'idle']
  labelled = Candidate((Axis(2), Axis(4, 'model')), (('batch', (1,)), ('mlp', (0,))))
  assert mesh(labelled) == ['model_2', 'model']


# -- one spelling


def spelled(candidate, together=TOGETHER, per_node=8, exchange=True):
  return canonical(candidate, together, per_node, exchange)


def test_axes_that_are_used_together_are_one():
  split = one(8, 4, 2, placed={'batch': (0,), 'mlp': (1, 2)}, fill=(0,))
  assert spelled(split) == one(8, 8, placed={'batch': (0,), 'mlp': (1,)}, fill=(0,))
  turned = one(8, 4, 2, placed={'batch': (0,), 'mlp': (2, 1)})
  assert spelled(turned, exchange=False).axes == turned.axes  # in the other order they are not,
  assert spelled(turned) == spelled(split._replace(fill=()))  # unless that makes no difference
  assert spelled(one(1, 8, placed={'batch': (1,)})) == one(8, placed={'batch': (0,)})
  assert spelled(one(4, 2)) == one(8)
  assert spelled(one(1)) == one(1)


def test_order_counts_where_names_compete():
  first = one(8, 8, placed={'mlp': (1,), 'embed': (1,)})
  other = one(8, 8, placed={'embed': (1,), 'mlp': (1,)})
  assert spelled(first) != spelled(other)
  assert spelled(first, frozenset()) == spelled(other, frozenset())
  apart = one(8, 8, placed={'mlp': (1,), 'embed': (0,)})
  assert spelled(apart) == spelled(one(8, 8, placed={'embed': (0,), 'mlp': (1,)}))


def test_places_within_a_node_are_alike():
  one_way, other = (
    one(2, 4, placed={'batch': (0,), 'mlp': (1,)}),
    one(4, 2, placed={'batch': (1,), 'mlp': (0,)}),
  )
  assert spelled(one_way) == spelled(other)
  assert spelled(one_way, exchange=False) != spelled(other, exchange=False)
  across = one(8, 8, placed={'batch': (0,), 'mlp': (1,)}), one(8, 8, placed={'batch': (1,), 'mlp': (0,)})
  assert spelled(across[0]) != spelled(across[1])  # one of the two leaves the node


def test_a_fill_of_nothing_has_no_size():
  assert spelled(one(8, placed={'batch': (0,)}, least=1)) == one(8, placed={'batch': (0,)})


def axes_of(count):
  some = st.integers(1, count).flatmap(
    lambda many: st.permutations(range(count)).map(lambda p: p[:many])
  )
  return st.one_of(st.just(()), some.map(tuple))


@st.composite
def candidates(draw):
  sizes = draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3))
  over = axes_of(len(sizes))
  placed = draw(st.dictionaries(st.sampled_from(sorted(NAMES)), over.filter(bool)))
  fill, state = draw(over), draw(over)
  return one(*sizes, placed=placed, fill=fill, state=state, least=draw(st.sampled_from([1, 2**20])))


@given(candidates(), st.sampled_from([1, 4, 8, 512]), st.booleans())
@settings(max_examples=150)
def test_a_spelling_is_its_own(candidate, per_node, exchange):
  once = spelled(candidate, per_node=per_node, exchange=exchange)
  assert spelled(once, per_node=per_node, exchange=exchange) == once
  assert once.devices == candidate.devices
  pieces = lambda one: sorted((name, one.size(over)) for name, over in one.placed)
  assert [pair for pair in pieces(candidate) if pair[1] > 1] == [
    pair for pair in pieces(once) if pair[1] > 1
  ]


# -- the space


def test_meshes():
  assert (
    factorisations(8, 3) == [(2, 2, 2)] and factorisations(7, 2) == [] and factorisations(7, 1) == [(7,)]
  )
  sizes = [tuple(axis.size for axis in axes) for axes in space().meshes()]
  assert len(sizes) == 16 and sizes[0] == (64,) and all(math.prod(one) == 64 for one in sizes)
  assert space('h100:1').meshes() == [(Axis(1),)]
  fixed = space(mesh={'data': -1, 'model': 8})
  assert fixed.meshes() == [(Axis(8, 'data'), Axis(8, 'model'))]
  assert space(mesh=spmd.abstract_mesh({'data': 8, 'model': 8})).meshes() == fixed.meshes()
  pinned = space('h100:8', pin={'mlp': 'tensor'}).meshes()
  assert len(pinned) == 1 + 2 * 2 + 1 * 3
  assert all([axis.label for axis in axes].count('tensor') == 1 for axes in pinned)


def all_moves(where, candidate):
  return [one for change in where.coordinates(candidate) for one in change]


def test_moves_are_legal_and_spelled_once():
  where = space()
  start = where.legal(one(8, 8, placed={'batch': (0,), 'mlp': (1,)}, fill=(0,)))
  moves = all_moves(where, start)
  assert len(moves) > 40
  for candidate in moves:
    assert candidate.devices == 64 and where.legal(candidate) == candidate != start
    layout_of(candidate, BATCH)
  assert any(len(one.axes) == 3 for one in moves) and any(one.state for one in moves)
  assert not any(one.over('odd') for one in moves)  # 7 is not divided by anything
  swapped = where.legal(one(8, 8, placed={'batch': (1,), 'mlp': (0,)}, fill=(1,)))
  assert swapped != start and swapped in moves


def test_names_that_belong_together_move_together():
  where = space()
  start = where.legal(one(8, 8, placed={'batch': (0,)}, fill=(1,)))
  assert any(
    c.over('length') == c.over('embed') == () != c.over('batch') for c in all_moves(where, start)
  )
  both = where.legal(one(8, 8, placed={'batch': (0,), 'mlp': (1,), 'act_mlp': (1,)}, fill=(0,)))
  assert any(not c.over('mlp') and not c.over('act_mlp') for c in all_moves(where, both))


def test_first_choice_moves():
  where = space('h100:8')
  start = where.legal(one(8, placed={'embed': (0,), 'mlp': (0,)}))
  assert where.legal(one(8, placed={'mlp': (0,), 'embed': (0,)})) in all_moves(where, start)


def test_choices_are_tried():
  where = space('h100:8', choices={'remat': ('none', 'full')})
  start = where.legal(one(8, placed={'batch': (0,)}))
  assert start.choices == (('remat', 'none'),)
  assert start._replace(choices=(('remat', 'full'),)) in all_moves(where, start)


def test_a_fill_that_takes_nothing_is_none():
  where = space('h100:8', FACTS._replace(leasts=(1,)))
  assert not where.legal(one(8, placed={'batch': (0,)}, fill=(0,))).fill
  assert where.legal(one(8, placed={'batch': (0,)}, fill=(0,), least=1)).fill == (0,)


def test_products_are_cut_within_a_node():
  wide = one(4, 16, placed={'batch': (0,), 'mlp': (1,)})
  assert space().legal(wide) is None
  assert space(tensor=16).legal(wide) and space(tensor=0).legal(wide)
  assert space('v5e:8x8').legal(wide)  # a torus has no nodes
  assert space(pin={'mlp': 'model'}).legal(Candidate((Axis(4), Axis(16, 'model')), (('batch', (0,)),)))
  assert space().legal(one(64, placed={'batch': (0,), 'embed': ()}, fill=(0,)))


def test_wishes_are_kept():
  only = space(batch_only='data')
  axes = Axis(8, 'data'), Axis(8)
  assert only.legal(Candidate(axes, (('batch', (0,)), ('mlp', (1,)))))
  for wrong in (
    Candidate(axes, (('mlp', (0,)),)),
    Candidate(axes, fill=(0,)),
    Candidate(axes, state=(0, 1)),
  ):
    assert only.legal(wrong) is None
  assert space(forbid=['mlp']).legal(one(8, 8, placed={'mlp': (1,)})) is None
  some = space(forbid={'mlp': 'data'})
  assert some.legal(Candidate(axes, (('mlp', (1,)),))) and not some.legal(
    Candidate(axes, (('mlp', (0,)),))
  )
  pinned = space(pin={'mlp': 'model', 'embed': None})
  found = pinned.legal(Candidate((Axis(8), Axis(8, 'model')), (('batch', (0,)), ('mlp', (0,)))))
  assert (found.over('mlp'), found.over('embed')) == ((1,), ())
  assert all(one.over('mlp') for one in all_moves(pinned, found))
  assert not any(one.over('embed') for one in all_moves(pinned, found))


# -- where it begins


def test_presets_are_tables_of_the_space():
  names = dict.fromkeys(('batch', 'length', 'vocab', 'mlp', 'heads', 'expert'), (64,))
  facts = FACTS._replace(names=names, parameters=frozenset({'mlp'}))
  found = {
    seed.preset: rules_of(seed.candidate, BATCH) for seed in seeds(space(facts=facts, tensor=0), 10**6)
  }
  assert {*found} == {*PRESETS, ''}
  tables = [rules_of(seed.candidate, BATCH) for seed in seeds(space(facts=facts, tensor=0), 10**6)]
  same = lambda rules: lambda table: sorted(map(repr, table)) == sorted(map(repr, rules))
  for rules in (
    spmd.presets.fsdp(),
    spmd.presets.fsdp_tensor_parallel(),
    spmd.presets.zero1(),
    spmd.presets.hybrid_fsdp(shard='data'),
    spmd.presets.sequence_parallel(),
    spmd.presets.context_parallel(),
  ):
    assert any(map(same(rules), tables)), rules


def test_seeds_speak_the_models_words():
  found = [seed.candidate for seed in seeds(space(), 10**6)]
  assert any(one.over('mlp') == one.over('act_mlp') != () for one in found)
  assert len(seeds(space(), 5)) == 5


def test_seeds_where_the_batch_is_too_small():
  facts = FACTS._replace(names=NAMES | {'batch': (4,)})
  found = [seed.candidate for seed in seeds(space('h100:4096', facts), 50)]
  assert found and all(one.size(one.over('batch')) <= 4 for one in found)


def unnamed():
  return {'params': {'wi': jnp.ones((64, 128)), 'wo': jnp.ones((128, 64)), 'bias': jnp.ones(8)}}


def test_a_model_without_names_has_paths():
  facts = facts_of(unnamed, (), None, jax.ShapeDtypeStruct((16, 64), jnp.float32))
  assert facts.paths == (PathKind('(^|/)wi$', ((64, 128),)), PathKind('(^|/)wo$', ((128, 64),)))
  assert (facts.names, facts.batch, facts.leasts) == ({'batch': (16,)}, BATCH, (1,))
  where = space('h100:8', facts)
  moves = all_moves(where, where.legal(one(8, placed={'batch': (0,)})))
  assert any(c.paths == (('(^|/)wo$', 2, 0, (0,)),) for c in moves) and any(c.fill for c in moves)


def many():
  return {'params': {f'block_{n}': {'w': jnp.ones((8, 8))} for n in range(20)}}


def test_many_paths_are_few_kinds():
  facts = facts_of(many, (), None, jax.ShapeDtypeStruct((16, 8), jnp.float32))
  assert [kind.pattern for kind in facts.paths] == [r'(^|/)block_\d+/w$']


def test_names_are_read_off_a_state():
  def create(x):
    return {'w': spmd.LogicallyPartitioned(jnp.ones((x.shape[0], 256)), ('embed', 'mlp'))}

  facts = facts_of(create, (jnp.ones(64),), ('rows', None), jax.ShapeDtypeStruct((16, 64), jnp.float32))
  assert facts.names == {'embed': (64,), 'mlp': (256,), 'rows': (16,)}
  assert facts.batch == {'rows'} and facts.together == {frozenset({'embed', 'mlp'})}
  assert facts.leasts == (2**14, 1)[:1]


# -- wishes that cannot be met


def wrong(text, **wishes):
  with pytest.raises(SearchError) as caught:
    space(**wishes)
  assert str(caught.value) == dedent(text).strip()


def test_a_budget_larger_than_the_chip():
  wrong(
    """
    The budget of 100 GiB is larger than the memory of a h100, 79.1 GiB.
    Fix: ask for less, or leave memory out.
    """,
    memory='100GiB',
  )
  wrong(
    """
    memory='much' is not a size.
    Fix: write bytes, or '14GiB'.
    """,
    memory='much',
  )


def test_a_name_that_the_model_lacks():
  wrong(
    """
    pin: the model has no name 'embd'. Did you mean 'embed'?
    forbid: the model has no name 'heads'.
    Fix: its names are act_mlp, batch, embed, length, mlp, odd.
    """,
    pin={'embd': None},
    forbid=['heads'],
  )


def test_a_name_with_no_legal_axis():
  wrong(
    """
    The name 'odd' has no legal place: its sizes (7) are not divided by 'model' of any mesh of 64 devices.
    Fix: pin it to other axes, or pad it.
    """,
    pin={'odd': 'model'},
  )


def test_contradictory_pins():
  wrong(
    """
    pin lays 'mlp' over 'model', and forbid keeps it off there.
    pin lays 'mlp' over 'data', and batch_only keeps that for the batch.
    pin lays 'mlp' and 'embed' over 'model', and one array has both.
    Fix: take one of the two back.
    """,
    pin={'mlp': ('data', 'model'), 'embed': 'model'},
    forbid={'mlp': 'model'},
    batch_only='data',
  )


def test_meshes_that_cannot_be():
  wrong(
    """
    The mesh {'data': 4, 'model': 8} has 32 devices, h100:64 has 64.
    There is no axis 'modle' in the mesh {'data': 4, 'model': 8}. Did you mean 'model'?
    Fix: choose sizes whose product is 64; one may be -1.
    Fix: its axes are data, model.
    """,
    mesh={'data': 4, 'model': 8},
    pin={'mlp': 'modle'},
  )
  wrong(
    """
    The axes 'a', 'b', 'c', 'd' are 4, and meshes of up to 3 are tried.
    Fix: name fewer axes, or fix the mesh.
    """,
    batch_only=('a', 'b', 'c', 'd'),
  )
  wrong(
    """
    h100:2 has 2 devices, which do not make the axes 'a', 'b'.
    Fix: name fewer axes, or fix the mesh; there, an axis may have one device.
    """,
    target='h100:2',
    batch_only=('a', 'b'),
  )


def test_bytes():
  parsed = functools.partial(space, 'h100:8')
  assert parsed(memory='60GiB').wishes.memory == 60 * 2**30 == parsed(memory=60 * 2**30).wishes.memory
