"""Timelines: text and SVG show every task at its time, and stay legible when long."""

import io
import re
from textwrap import dedent
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from flax_spmd._src.pipeline.schedules.timeline import ticks
from flax_spmd.pipeline import DualPipeV, GPipe, Interleaved1F1B, OneFOneB, Schedule, ZeroBubbleV

SVG = '{http://www.w3.org/2000/svg}'


def rows_of(text):
  """Per rank, its characters in all bands."""
  rows = {}
  for line in text.splitlines():
    if line.startswith('rank '):
      number, row = re.fullmatch(r'rank (\d+) +([│┆FBW].*)[│]', line).groups()
      rows[int(number)] = rows.get(int(number), '') + row
  return rows


def names_of(row):
  return re.findall(r'[FBW][₀-₉]*\d+', row)


def test_text_wraps_into_bands():
  assert (
    str(DualPipeV(ranks=2, fuse=True).draw(4))
    == dedent("""
    DualPipeV(ranks=2, fuse=True) with 4 microbatches: makespan 26, bubble 7.7%, live 5 5
    F: forward, B: backward, W: weight gradient; F₁2 is of stage 1 and microbatch 2; no gap: one program
           0       2       4       6       8       10      12
    rank 0 │F₀0│F₀1│F₀2│F₃0│B₃0│W₃0│F₃1│F₀3B₃1 W₃1 │   │F₃2B₀0 │
    rank 1 │   │F₁0│F₂0│F₁1│F₂1│F₁2B₂0 W₂0 │F₂2B₁0 W₁0 │F₁3B₂1 │

               14      16      18      20      22      24
    rank 0 W₀0 │B₃2W₃2 │   │F₃3B₀1 W₀1 │B₃3W₃3 │B₀2│W₀2│B₀3│W₀3│
    rank 1 W₂1 │F₂3B₁1 W₁1 │B₂2W₂2 │B₁2W₁2 │   │B₂3│B₁3│W₂3│W₁3│
  """).strip()
  )


def test_a_wide_terminal_needs_one_band():
  assert (
    OneFOneB(ranks=4).draw(8).text(width=110)
    == dedent("""
    OneFOneB(ranks=4) with 8 microbatches: makespan 33, bubble 27.3%, live 4 3 2 1
    F: forward, B: backward; F2 is of microbatch 2
           0              5              10             15             20             25             30
    rank 0 │F0│F1│F2│F3│                 │B0   │F4│B1   │F5│B2   │F6│B3   │F7│B4   │  │B5   │  │B6   │  │B7   │
    rank 1 │  │F0│F1│F2│           │B0   │F3│B1   │F4│B2   │F5│B3   │F6│B4   │F7│B5   │  │B6   │  │B7   │     │
    rank 2 │     │F0│F1│     │B0   │F2│B1   │F3│B2   │F4│B3   │F5│B4   │F6│B5   │F7│B6   │  │B7   │           │
    rank 3 │        │F0│B0   │F1│B1   │F2│B2   │F3│B3   │F4│B4   │F5│B5   │F6│B6   │F7│B7   │                 │
  """).strip()
  )


@settings(max_examples=30)
@given(
  st.sampled_from([GPipe(3), OneFOneB(8), Interleaved1F1B(2), ZeroBubbleV(4), DualPipeV(2, fuse=True)]),
  st.sampled_from([4, 8, 16, 32]),
  st.integers(40, 200),
)
def test_every_task_is_named_and_lines_keep_to_the_width(schedule, microbatches, width):
  timeline = schedule.draw(microbatches)
  text = timeline.text(width)
  assert max(map(len, text.splitlines())) <= width
  rows = rows_of(text)
  assert len(rows) == schedule.ranks
  assert len({len(row) for row in rows.values()}) == 1
  if len(text.splitlines()) > 15 * (schedule.ranks + 2):
    return  # too narrow for all names
  for rank, steps in enumerate(timeline.simulation.steps):
    assert len(set(names_of(rows[rank]))) == sum(len(timed.step.tasks) for timed in steps)


@pytest.mark.parametrize('schedule', [GPipe(8), OneFOneB(8), Interleaved1F1B(8), ZeroBubbleV(8)])
def test_8_ranks_and_32_microbatches_fit_16_bands(schedule):
  """With all names, in bands of 100 characters."""
  text = schedule.draw(32).text()
  assert len(text.splitlines()) <= 16 * 10 + 3
  for rank, row in rows_of(text).items():
    tasks = sum(len(step.tasks) for step in schedule.tasks(32)[rank])
    assert len(set(names_of(row))) == tasks


def test_a_cell_too_short_for_its_name_shows_its_letter():
  """The first stage takes a thousandth of the others' time."""
  timeline = OneFOneB(2).draw(32, {'fwd': [0.001, 1], 'bwd': [0.001, 2]})
  lines = timeline.text(80).splitlines()
  assert len(lines) <= 2 + 16 * 4
  assert set(names_of(rows_of(timeline.text(80))[1])) == {f'{k}{i}' for k in 'FB' for i in range(32)}


def test_tasks_that_take_no_time():
  timeline = OneFOneB(2).draw(2, dict.fromkeys(('fwd', 'bwd', 'wgrad'), 0))
  assert timeline.simulation.makespan == timeline.simulation.bubble == 0
  assert len(timeline.text().splitlines()) == 5
  ElementTree.fromstring(timeline.svg)


@settings(max_examples=20)
@given(
  st.sampled_from([GPipe(3), OneFOneB(8), ZeroBubbleV(4), DualPipeV(2, fuse=True)]),
  st.sampled_from([4, 8, 32]),
  st.floats(1e-6, 1e6),
)
def test_svg_has_every_task_at_its_time(schedule, microbatches, unit):
  timeline = schedule.draw(microbatches, dict.fromkeys(('fwd', 'bwd', 'wgrad'), unit))
  root = ElementTree.fromstring(timeline.svg)
  rectangles = {}
  for rectangle in root.iter(f'{SVG}rect'):
    name, rank = re.match(r'(\w+) on rank (\d+):', rectangle.find(f'{SVG}title').text).groups()
    rectangles.setdefault((name, int(rank)), []).append(rectangle)
    left, top, width, height = (float(rectangle.get(name)) for name in ('x', 'y', 'width', 'height'))
    assert left + width <= float(root.get('width')) and top + height <= float(root.get('height'))
  expected = {
    (str(task), rank)
    for rank, order in enumerate(schedule.tasks(microbatches))
    for step in order
    for task in step.tasks
  }
  assert set(rectangles) == expected


def test_svg_names_tasks_and_times():
  svg = DualPipeV(2, fuse=True).draw(4).svg
  assert '<title>bwd_3__1 on rank 0: 8 to 9</title>' in svg
  texts = [text.text for text in ElementTree.fromstring(svg).iter(f'{SVG}text')]
  assert {'rank 0', 'rank 1', '0', 'F₀0', 'B₃1', 'W₁3'} <= set(texts)
  assert texts[0].startswith('DualPipeV(ranks=2, fuse=True) with 4 microbatches: makespan 26')


def test_svg_of_8_ranks_and_32_microbatches():
  root = ElementTree.fromstring(ZeroBubbleV(8).draw(32).svg)
  assert float(root.get('width')) <= 1700
  names = {text.text for text in root.iter(f'{SVG}text')}
  assert {f'F₁₅{i}' for i in range(32)} <= names


def test_svg_escapes_html():
  def rule(rank, microbatches):
    yield from ('fwd_0__0', 'bwd_0__0')

  rule.__name__ = '<b>&'
  ElementTree.fromstring(Schedule.of(rule, ranks=1).draw(1).svg)


def test_notebooks_show_svg_and_rich_prints_in_colour():
  timeline = OneFOneB(2).draw(2)
  assert timeline._repr_svg_() == timeline.svg
  assert timeline.svg in timeline._repr_html_()
  assert repr(timeline) == timeline.text()
  plain, coloured = io.StringIO(), io.StringIO()
  Console(file=plain, width=100).print(timeline)
  assert [line.rstrip() for line in plain.getvalue().splitlines()] == timeline.text().splitlines()
  Console(file=coloured, width=100, force_terminal=True, color_system='truecolor').print(timeline)
  assert '\x1b[38;2;17;17;17;48;2;' in coloured.getvalue()


def test_colours_differ_by_kind_and_stage():
  rectangles = re.findall(r'fill="(#\w{6})"><title>(\w+?)_(\d+)__', ZeroBubbleV(2).draw(4).svg)
  colours = {(kind, stage): colour for colour, kind, stage in rectangles}
  assert len(set(colours.values())) == 6  # three kinds, and a rank's first and second stage
  assert colours['fwd', '0'] == colours['fwd', '1'] != colours['fwd', '3']


@given(st.floats(1e-9, 1e9), st.floats(0.001, 0.9))
def test_ticks_are_round_and_apart(makespan, part):
  times = ticks(makespan, makespan * part)
  assert times[0] == 0 and times[-1] <= makespan * (1 + 1e-6)
  assert len(times) <= 1 / part + 1
