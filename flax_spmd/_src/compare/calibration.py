"""Calibration: measured step times, by which the time brackets of other layouts on the same chip become narrower.

    calibration = explore.calibrate([(outcome, 7.9)], 'h100:64')
    calibration.to_toml('measured.toml')
    search(train_step, 'h100:64', hardware='measured.toml')

The measured over the expected time is the chip's `pace`: the part of a step's time that comes from the machine and the
model, not from the layout. It multiplies every bracket of the chip.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

from flax_spmd._src.compare.costs import Cost, expected, local_seconds
from flax_spmd._src.compare.hardware import Chip, Target, parse_target
from flax_spmd._src.compare.outcome import Outcome
from flax_spmd._src.hlo.counts import Counts
from flax_spmd._src.public import public
from flax_spmd._src.text import plural, shown, time_text, value_text

# Ends of the bracket after calibration on one step of the same model, fitted to published step times.
CALIBRATED = (0.93, 1.07)
_FAR = 10.0  # no published step has such a pace
_FIX = 'Fix: pass pairs of an outcome of compare or Estimator and the seconds of a whole step of it.'


@public('flax_spmd.explore')
class Calibration(NamedTuple):
  """The result of `calibrate`.

  Attributes:
    chip: the chip, with its measured `pace` and a narrower `spread`.
    names: names of the measured outcomes.
    errors: relative error of the expected time of each measured step, calibrated by the others; empty for one.

  Example:
    >>> create = lambda: {'w': LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))}
    >>> step = lambda state, x: (state, jnp.sum(x @ state['w'].unbox()))
    >>> train_step = explore.TrainStep(step, create, jax.ShapeDtypeStruct((32, 64), jnp.float32))
    >>> target = explore.parse_target('h100:8')
    >>> layout = Layout(abstract_mesh({'data': 8}), (('batch', 'data'),))
    >>> outcome = explore.Estimator(train_step).estimate(layout, target)
    >>> calibration = explore.calibrate([(outcome, 1e-3)], 'h100:8')
    >>> calibration.to_toml(tmp / 'measured.toml')
    >>> again = explore.parse_target('h100:8', tmp / 'measured.toml')
    >>> cost = explore.Estimator(train_step).estimate(layout, again).cost
    >>> cost.low < 1e-3 < cost.high
    True
  """

  chip: Chip
  names: tuple[str, ...]
  errors: tuple[float, ...]

  def to_toml(self, path: str | os.PathLike[str]) -> None:
    """Writes the chip as a TOML file, for the argument `hardware` and the option `--hardware`."""
    Path(path).write_text(f'# {self}\n{_toml(self.chip)}', encoding='utf-8')

  def __str__(self) -> str:
    low, high = self.chip.spread
    text = f'{self.chip.name}, calibrated by {plural(len(self.names), "measured step")}: pace {self.chip.pace:.3g}'
    if not 1 / _FAR < self.chip.pace < _FAR:
      text += ', far from 1: check that the times are seconds of one whole step'
    if self.errors:
      text += f', the others predict each within {100 * max(map(abs, self.errors)):.0f} %'
    return f'{text}; brackets from {low:.2f} to {high:.2f} of the expected time.'


@public('flax_spmd.explore')
def calibrate(
  measured: Sequence[tuple[Outcome, float]],
  target: str,
  *,
  hardware: str | os.PathLike[str] | None = None,
) -> Calibration:
  """Narrows the time brackets of a chip by measured step times.

  One measured step of the same model is enough. Of several, preferably with different layouts, the bracket contains all.

  Args:
    measured: pairs of an outcome for the layout that ran, estimated or compiled, and the measured seconds per step.
    target: hardware that the steps ran on, such as `'h100:8'`.
    hardware: TOML file with descriptions of further chips.

  Returns:
    The calibrated chip. Its TOML file is the `hardware` of later calls, for any number of these chips.

  Raises:
    TargetDeviceError: the target is unknown.
    ValueError: nothing was measured, an outcome is not one of the target, has no costs or is a pipeline's, or a time is
      impossible.

  Example:
    >>> create = lambda: {'w': LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))}
    >>> step = lambda state, x: (state, jnp.sum(x @ state['w'].unbox()))
    >>> train_step = explore.TrainStep(step, create, jax.ShapeDtypeStruct((32, 64), jnp.float32))
    >>> layouts = {'data': Layout(abstract_mesh({'data': 8}), (('batch', 'data'),))}
    >>> comparison = compare(train_step, layouts, 'cpu:8')
    >>> calibration = explore.calibrate([(comparison['data'], 2e-3)], 'cpu:8')
    >>> calibration.names
    ('data',)
  """
  parsed, measured = parse_target(target, hardware), _pairs(measured)
  problems = [
    f'{_label(one)}: {text}' for one, time in measured if (text := _problem(one, time, parsed))
  ]
  if not measured or problems:
    raise ValueError('\n'.join([*(problems or ['No step was measured.']), _FIX]))
  chip = parsed.chip._replace(pace=1.0)
  paces = [seconds / _expected(outcome, chip) for outcome, seconds in measured]
  pace = _mean(paces)
  errors = tuple(
    _mean([*paces[:index], *paces[index + 1 :]]) / one - 1
    for index, one in enumerate(paces if len(paces) > 1 else ())
  )
  low = min(CALIBRATED[0], *(one / pace for one in paces), 1.0)
  high = max(CALIBRATED[1], *(one / pace for one in paces), 1.0)
  chip = chip._replace(pace=pace, spread=(low, high))
  return Calibration(chip, tuple(map(_label, (outcome for outcome, _ in measured))), errors)


def _pairs(measured: Any) -> list[tuple[Outcome, float]]:
  pairs = list(measured) if isinstance(measured, Iterable) else [measured]
  for pair in pairs:
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and hasattr(pair[0], 'counts')):
      raise ValueError(f'{shown(value_text(pair))} is no pair of an outcome and seconds.\n{_FIX}')
  return pairs


def _expected(outcome: Outcome, chip: Chip) -> float:
  if outcome.cost is None:
    return math.nan
  compute, memory, links, *_ = outcome.cost
  return expected(compute, memory, sum(links.values()), chip)


def _mean(values: Sequence[float]) -> float:
  """The geometric mean."""
  return math.exp(sum(map(math.log, values)) / len(values))


def _label(outcome: Outcome) -> str:
  return outcome.name or f'mesh {outcome.mesh}'


def _problem(outcome: Outcome, seconds: float, target: Target) -> str:
  """The reason why a pair cannot be used, or ''."""
  chip, devices = target.chip, math.prod(outcome.mesh.values())
  compiled_for = outcome.source.partition(':')[2]
  if outcome.cost is None or outcome.counts is None:
    return f'there are no costs: {(outcome.error or "not estimated").splitlines()[0]}'
  if devices != target.devices or compiled_for not in ('', chip.name):
    return (
      f'the outcome is for {devices} devices of {compiled_for or "some chip"}, not for {target.text}'
    )
  if outcome.pipeline is not None:
    return 'the outcome is a pipeline, whose time has bubbles that a pace would count again'
  if not _is_of(outcome.cost, outcome.counts, chip):
    return f'the outcome has the times of another chip than {chip.name}'
  least = outcome.counts.flops / max(chip.flops.values())
  if not isinstance(seconds, SupportsFloat):
    return f'{seconds!r} is no time'
  if not least < seconds < math.inf:
    return f'{seconds:g} s is impossible: its products alone take {time_text(least)} at the peak of {chip.name}'
  return ''


def _is_of(cost: Cost, counts: Counts, chip: Chip) -> bool:
  """Whether a cost has the figures of a chip: its operations take as long."""
  own = cost.compute, cost.memory
  return any(
    all(map(math.isclose, own, local_seconds(counts, chip, peak))) for peak in chip.flops.values()
  )


def _toml(chip: Chip) -> str:
  """A chip as an entry of a TOML file; fields that have their default are left out."""
  fields = chip._asdict()
  kept = {key: value for key, value in fields.items() if value != Chip._field_defaults.get(key)}
  lines = [f'{key} = {_toml_value(value)}' for key, value in kept.items() if key != 'name']
  return '\n'.join([f'[{json.dumps(chip.name)}]', *lines, ''])


def _toml_value(value: Any) -> str:
  if isinstance(value, Mapping):
    return '{' + ', '.join(f'{json.dumps(key)} = {one!r}' for key, one in value.items()) + '}'
  if isinstance(value, str):
    return json.dumps(value)
  return repr(list(value)) if isinstance(value, (list, tuple)) else repr(value)
