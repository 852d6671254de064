"""The names and ticks of charts, on the pages of `compare` and `search`."""

import itertools
import re
from html import unescape
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

import flax_spmd as spmd
from flax_spmd._src.compare.chart_labels import free_place
from flax_spmd.explore import TrainStep


class Texts(HTMLParser):
  """The text elements of the pictures of a page: position, anchor and lines."""

  def __init__(self, page):
    super().__init__()
    self.found, self._inside, self._skip = [], None, False
    self.feed(page)

  def handle_starttag(self, tag, attrs):
    if tag in ('text', 'tspan'):
      self._inside = dict(self._inside or {}) | dict(attrs)
    self._skip = tag == 'title'

  def handle_endtag(self, tag):
    if tag == 'text':
      self._inside = None
    self._skip = False

  def handle_data(self, data):
    if self._inside is not None and not self._skip:
      self.found.append((float(self._inside['x']), self._inside.get('text-anchor'), unescape(data)))


def create():
  names = {'up': ('embed', 'mlp'), 'down': ('mlp', 'embed')}
  return {name: spmd.LogicallyPartitioned(jnp.ones((256, 256)), axes) for name, axes in names.items()}


def step(state, x):
  y = jnp.tanh(x @ state['up'].unbox()) @ state['down'].unbox()
  return jax.tree.map(lambda w: 0.9 * w, state), jnp.mean(y**2)


@given(
  st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), max_size=12), st.sampled_from([-14, 14])
)
def test_numbers_beside_close_dots_do_not_overlap(dots, step):
  taken = []
  heights = [free_place(x, y, str(number), taken, step) for number, (x, y) in enumerate(dots)]
  assert all((height - y) * step >= 0 for height, (_, y) in zip(heights, dots))
  for (x, y), (other, height) in itertools.combinations(taken, 2):
    assert abs(x - other) >= 8 or abs(y - height) >= 14


def test_names_and_ticks_of_a_search_can_be_read(tmp_path):
  train_step = TrainStep(step, create, jax.ShapeDtypeStruct((64, 256), jnp.float32))
  result = spmd.search(train_step, 'h100:8', candidates=30, top=0)
  result.to_html(tmp_path / 'page.html')
  page = (tmp_path / 'page.html').read_text()
  texts = Texts(page).found
  for x, anchor, text in texts:  # none begins left of its picture, at 6.5 px a character
    assert x - (6.5 * len(text) if anchor == 'end' else 0) >= 0, text
  words = ' '.join(text for _, _, text in texts)
  assert all(' '.join(outcome.name.split()[:3]) in words for outcome in result.outcomes)
  scatter = page[page.index('Time against memory') :]
  scatter = scatter[: scatter.index('</section>')]
  ticks = [text for _, _, text in Texts(scatter).found]
  assert sum(bool(re.fullmatch(r'[\d.]+ ([KMG]i)?B', text)) for text in ticks) >= 3
  assert sum(bool(re.fullmatch(r'[\d.]+ (s|ms|us)', text)) for text in ticks) >= 3
  listed = re.findall('<li>(.*?)</li>', scatter)
  assert listed and [str(number) for number in range(1, len(listed) + 1)] == ticks[-len(listed) :]
  roofline = page[page.index('<h2>Roofline') :]
  assert {'100', '1,000'} & {
    text for _, _, text in Texts(roofline[: roofline.index('</section>')]).found
  }
  names = tuple(one.name for one in result.pareto)
  assert all(unescape(text).startswith(names) for text in listed)
