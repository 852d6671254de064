"""Targets, links and comparisons in unusual cases."""

from textwrap import dedent

import flax_spmd as spmd
from flax_spmd import errors, explore
from flax_spmd._src.compare.costs import between
from tests.texts import text_of

LAYOUT = spmd.Layout(spmd.abstract_mesh({'data': 2, 'model': 4}), (('embed', 'data'), ('mlp', 'model')))


def test_a_missing_hardware_file():
  assert text_of(errors.TargetDeviceError, explore.parse_target, 'x:8', 'no.toml') == dedent("""\
    no.toml cannot be read: No such file or directory.
    Fix: pass a TOML file.""")


def test_the_bandwidth_between_neighbours_on_a_torus():
  target = explore.parse_target('v5e:4x4')
  assert between(target, {'stage': 4, 'data': 4}, 'stage', 0, 1) == target.chip.link


def test_the_difference_between_failed_layouts():
  failed = [explore.Outcome.failed(name, LAYOUT, f'{name} is wrong') for name in ('one', 'other')]
  comparison = explore.Comparison(explore.parse_target('h100:8'), failed)
  assert comparison.diff('one', 'other') == ['one: one is wrong', 'other: other is wrong']
