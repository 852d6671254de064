"""Explanations and comparisons in TensorBoard and Weights & Biases, read back from the files that these write."""

import json
import struct
import sys
from textwrap import dedent

import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd import explore, tracking
from flax_spmd.errors import LayoutError
from tests.texts import text_of

LAYOUT = spmd.Layout({'data': 2, 'model': 4}, (('mlp', 'model'),))


@pytest.fixture(scope='module')
def explanation():
  w = spmd.LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp'))
  return spmd.explain(LAYOUT, {'w': w, 'b': jnp.ones(3)})


@pytest.fixture(scope='module')
def comparison():
  create = lambda: {'w': spmd.LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))}
  step = lambda state, x: (state, jnp.sum((x @ state['w'].unbox()) ** 2))
  train_step = explore.TrainStep(step, create, jax.ShapeDtypeStruct((32, 64), jnp.float32))
  estimator, target = explore.Estimator(train_step), explore.parse_target('h100:8')
  layouts = {
    'data': spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),)),
    'tensor': spmd.Layout(spmd.abstract_mesh({'model': 8}), (('mlp', 'model'),)),
  }
  outcomes = [estimator.estimate(each, target)._replace(name=name) for name, each in layouts.items()]
  return explore.Comparison(target, [*outcomes, explore.Outcome.failed('none', LAYOUT, 'out of memory')])


class Writer:
  """A `SummaryWriter` of PyTorch or tensorboardX."""

  def __init__(self):
    self.texts, self.scalars = {}, {}

  def add_text(self, tag, text, step):
    self.texts[tag, step] = text

  def add_scalar(self, tag, value, step):
    self.scalars[tag, step] = value


class FlaxWriter(Writer):
  text, scalar = Writer.add_text, Writer.add_scalar
  add_text = add_scalar = property()  # absent


class MetricWriter(Writer):
  """A `MetricWriter` of CLU."""

  def write_texts(self, step, texts):
    self.texts |= {(tag, step): text for tag, text in texts.items()}

  def write_scalars(self, step, scalars):
    self.scalars |= {(tag, step): value for tag, value in scalars.items()}


@pytest.mark.parametrize('cls', [Writer, FlaxWriter, MetricWriter])
def test_any_writer(cls, explanation, comparison):
  writer = cls()
  tracking.log_tensorboard(explanation, writer, step=3)
  tracking.log_tensorboard(comparison, writer, name='compared')
  assert writer.texts == {
    ('layout', 3): f'```\n{explanation}\n```',
    ('compared', 0): f'```\n{comparison}\n```',
  }
  assert (
    writer.scalars['layout/bytes_per_device', 3]
    == explanation.bytes_per_device
    == 8 * 16 * 4 / 4 + 3 * 4
  )
  assert writer.scalars['compared/tensor/memory', 0] == comparison['tensor'].memory.peak
  assert writer.scalars['compared/data/seconds_low', 0] == comparison['data'].cost.low
  assert (
    writer.scalars['compared/none/fits', 0] == 0 and ('compared/none/memory', 0) not in writer.scalars
  )


def records(path):
  """The records of a file of events: a length, its checksum, the data and theirs."""
  data = path.read_bytes()
  while data:
    (length,) = struct.unpack('<Q', data[:8])
    yield data[12 : 12 + length]
    data = data[16 + length :]


def test_a_folder(explanation, tmp_path):
  pytest.importorskip('tensorboardX')
  from tensorboardX.proto.event_pb2 import Event

  tracking.log_tensorboard(explanation, tmp_path / 'run', step=7)
  [file] = (tmp_path / 'run').glob('events.out.tfevents.*')
  found = {}
  for record in records(file):
    event = Event.FromString(record)
    for value in event.summary.value:
      found[value.tag, event.step] = value
  texts = [value.tensor.string_val[0].decode() for (tag, _), value in found.items() if 'text' in tag]
  assert texts == [f'```\n{explanation}\n```']
  assert found['layout/bytes_per_device', 7].simple_value == explanation.bytes_per_device


def test_wandb_offline(explanation, comparison, tmp_path, monkeypatch):
  wandb = pytest.importorskip('wandb')
  monkeypatch.setenv('WANDB_SILENT', 'true')
  with wandb.init(mode='offline', dir=tmp_path, project='layouts') as run:
    tracking.log_wandb(explanation)
    tracking.log_wandb(comparison, run, name='compared')
    assert run.summary['layout/bytes_per_device'] == explanation.bytes_per_device
    assert run.summary['compared/tensor/memory'] == comparison['tensor'].memory.peak
  tables = {
    path.name.partition('_')[0]: json.loads(path.read_text()) for path in tmp_path.rglob('*.table.json')
  }
  assert [row[0] for row in tables['table']['data']] in (['b', 'w'], ['data', 'tensor', 'none'])
  pages = [path.read_text() for path in tmp_path.rglob('*.html')]
  assert any(explanation._repr_html_() in page for page in pages)


def test_errors(explanation, tmp_path, monkeypatch):
  assert text_of(LayoutError, tracking.log_tensorboard, {'w': 1}, Writer()) == dedent("""\
    A dict has no report.
    Fix: pass the result of explain, layout.jit(f).explain(...), explore.compare or explore.search.""")
  assert text_of(LayoutError, tracking.log_tensorboard, explanation, 3) == dedent("""\
    A int writes no text and scalars for TensorBoard: it has neither add_text and add_scalar, nor text and scalar, nor write_texts and write_scalars.
    Fix: pass a folder, or a SummaryWriter or MetricWriter.""")
  for name in ('tensorboardX', 'wandb'):
    monkeypatch.setitem(sys.modules, name, None)
  assert text_of(LayoutError, tracking.log_tensorboard, explanation, tmp_path / 'run') == dedent(f"""\
    Writing to {tmp_path / 'run'} for TensorBoard needs the package tensorboardX.
    Fix: pip install 'flax-spmd[tensorboard]', or pass the writer of the run.""")
  assert text_of(LayoutError, tracking.log_wandb, explanation) == dedent("""\
    Logging to Weights & Biases needs the package wandb.
    Fix: pip install 'flax-spmd[wandb]'.""")


def test_there_is_no_run(explanation, monkeypatch):
  monkeypatch.setitem(sys.modules, 'wandb', type('wandb', (), {'run': None}))
  assert text_of(LayoutError, tracking.log_wandb, explanation) == dedent("""\
    There is no run of wandb to log to.
    Fix: call wandb.init before, or pass run=.""")
