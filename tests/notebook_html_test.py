"""The HTML that notebooks show for values: whole, well-formed, escaped, and with everything that the text has."""

import dataclasses
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint, explore

VOID = {'br', 'meta', 'input', 'line', 'rect', 'circle', 'path'}


class Elements(HTMLParser):
  """The texts and tags of well-formed HTML; of a frame, also those of its page."""

  def __init__(self, page):
    super().__init__()
    self.open, self.tags, self.texts = [], [], []
    self.feed(page)
    self.close()
    assert not self.open, self.open

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    if tag not in VOID:
      self.open.append(tag)
    for name, value in attrs:
      if name == 'srcdoc':
        self.page = value

  def handle_startendtag(self, tag, attrs):
    self.tags.append(tag)

  def handle_endtag(self, tag):
    if tag not in VOID:
      assert self.open.pop() == tag

  def handle_data(self, data):
    self.texts.append(data)

  @property
  def text(self):
    return '\n'.join(self.texts)


def shown(value):
  return Elements(value._repr_html_())


LAYOUT = spmd.Layout(
  {'data': 2, 'model': 4}, (('mlp', 'model'), ('<b>$', P('data'))), conflict='error', strict=True
)


def test_layouts_and_rules():
  for value in (LAYOUT, LAYOUT.rules):
    found = shown(value)
    assert found.tags.count('tr') == 3 and "('mlp', 'model')" in found.texts
    assert f"('<b>$', {P('data')!r})" in found.text and "conflict='error'" in found.texts
  assert "{'data': 2, 'model': 4}" in shown(LAYOUT).texts and ', strict' in shown(LAYOUT).texts


def test_an_explanation_folds_its_rows():
  w = spmd.LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp'))
  tree = {'layers': [{'w': w}, {'w': w}, {'w': w}], 'one': jnp.ones(3)}
  explanation = spmd.explain(LAYOUT, tree)
  found = shown(explanation)
  assert found.tags.count('details') == 2  # the layout, and the layers
  for row in explanation.rows:
    assert row.path in found.texts
  assert '3 x float32[8,16]' in found.texts and 'embed, mlp → model (0)' in found.texts
  for finding in explanation.findings:
    assert finding.text in found.texts
  text = str(explanation)
  assert all(line in text for line in found.texts if line.startswith(('4 arrays', "over 'model'")))


def test_large_trees_show_their_first_rows():
  tree = {f'{number}<': jax.ShapeDtypeStruct((8, number), np.float32) for number in range(1, 2004)}
  found = shown(spmd.explain(LAYOUT, tree))
  assert found.tags.count('tr') == 2000 + 1 + 3 and 'and 3 more, which print shows.' in found.texts


def test_findings():
  w = spmd.LogicallyPartitioned(jnp.ones((8, 16)), ('embed', '<mpl>'))
  findings = LAYOUT.check({'w': w})
  assert shown(findings).texts == [finding.text for finding in findings]
  assert shown(findings.of('nothing')).texts == ['No findings.']


@pytest.fixture(scope='module')
def comparison():
  def create():
    return {'w': spmd.LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))}

  def step(state, x):
    return jax.tree.map(lambda w: w - 0.1, state), jnp.sum((x @ state['w'].unbox()) ** 2)

  train_step = explore.TrainStep(step, create, jax.ShapeDtypeStruct((32, 64), jnp.float32))
  estimator, target = explore.Estimator(train_step), explore.parse_target('h100:8')
  layouts = {
    '<data>': spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),)),
    'tensor': spmd.Layout(spmd.abstract_mesh({'model': 8}), (('mlp', 'model'),)),
  }
  outcomes = [estimator.estimate(each, target)._replace(name=name) for name, each in layouts.items()]
  return explore.Comparison(target, outcomes)


def test_a_comparison_has_its_table_and_its_report(comparison):
  found = shown(comparison)
  assert repr(comparison) == '<comparison of <data>, tensor on h100:8>'
  assert {'<data>', 'tensor', 'bound by', 'yes'} <= set(found.texts)
  assert found.page == comparison.to_html()
  assert 'Layouts on h100:8' in found.page


def test_a_report_as_text_or_as_a_file(comparison, tmp_path):
  text = comparison.to_html(tmp_path / 'report.html')
  assert text == comparison.to_html() == (tmp_path / 'report.html').read_text()


def test_checkpoints(tmp_path):
  layout = spmd.Layout({'data': 8}, (('embed', 'data'),))
  for name, value in (('1', 1), ('2', 2)):
    w = spmd.LogicallyPartitioned(np.full((8, 2), value, np.float32), ('embed', None))
    checkpoint.save(tmp_path / name, layout.shard({'w': w}), layout=layout)
  one = checkpoint.show(tmp_path / '1')
  assert {one.title, 'w', '(data, -)', '64 B'} <= set(shown(one).texts)
  listed = checkpoint.ls(tmp_path)
  assert [each.title for each in listed] == [text for text in shown(listed).texts if ': 1 leaf' in text][
    ::2
  ]
  assert shown(checkpoint.diff(tmp_path / '1', tmp_path / '2')).texts == ['w: contents differ']
  assert shown(checkpoint.diff(tmp_path / '1', tmp_path / '1')).texts == ['No differences.']


def test_the_remarks_on_a_checkpoint(tmp_path):
  checkpoint.save(tmp_path / '1', {'w': np.ones(2), 'b': (np.ones(1),)}, layout=LAYOUT)
  one = checkpoint.show(tmp_path / '1')
  damaged = one._replace(record=dataclasses.replace(one.record, unreadable={'x': 'x: <unreadable>'}))
  assert 'x: <unreadable>' in shown(damaged).texts and 'x: <unreadable>' in str(damaged)
  leaf = next(iter(one.record.leaves.values()))
  large = dataclasses.replace(one.record, leaves={str(number): leaf for number in range(2001)})
  listed = type(checkpoint.ls(tmp_path))([one._replace(record=large)] * 2)
  assert shown(listed).tags == ['ul', 'li', 'li']


def test_a_compiled_program_and_a_reshard():
  w = LAYOUT.shard({'<w>': jnp.ones((8, 16))}, P(None, 'model'))
  explanation = LAYOUT.jit(lambda w: w['<w>'] @ w['<w>'].T).explain(w)
  found = shown(explanation)
  assert 'argument 0/<w>' in found.texts and found.tags.count('table') == 1
  assert all(str(one) in found.text for one in explanation.collectives)
  plan = LAYOUT.plan_reshard(w, spmd.Layout({'model': 8}))
  assert '<w>[8, 16]' in shown(plan).texts and 'on the wire.' in shown(plan).text


def test_a_preflight(tmp_path):
  checkpoint.save(tmp_path / '1', {'w': np.ones(8)}, layout=LAYOUT)
  preflight = checkpoint.preflight(tmp_path / '1', {'w': np.zeros(8)})
  assert shown(preflight).texts == [str(preflight)]


def test_long_tables_have_a_filter():
  tree = {f'w{number}': jnp.ones(number) for number in range(1, 10)}
  assert shown(spmd.explain(LAYOUT, tree)).tags.count('input') == 1
  del tree['w9']
  assert shown(spmd.explain(LAYOUT, tree)).tags.count('input') == 0
