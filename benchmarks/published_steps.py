"""Published step times, steps measured on one GPU, and the time brackets of both.

`published.toml` has the published steps. Each is written as a program (`published_model.py`) and estimated; so are the
strangers' steps in `one_gpu.json`. The fit has one number for each chip, the share of its peak that products reach, one for
all, the share of the bandwidth of HBM that is reached, and two for each platform, the ends of brackets. Every figure is of
steps that were left out: their chip's share, that of the bandwidth and the ends of their platform are fitted to the others.
The time to start an operation of a GPU is no part of the fit: the 5,400 kernels of the LSTM in `one_gpu.json` follow each
other without gaps, and the least of them take 1.3 us; with what they read and write, 1.5 us.
"""

import itertools
import json
import math
import statistics
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import published_model
import strangers
from harness import Figure, at_least, at_most, exact
from reporting import Table

import flax_spmd as spmd
from flax_spmd._src.compare import costs
from flax_spmd._src.compare.calibration import CALIBRATED
from flax_spmd._src.hlo.counts import Counts
from flax_spmd._src.hlo.work import Product
from flax_spmd.explore import Estimator, Outcome, parse_target

FILE = Path(__file__).with_name('published.toml')
MEASURED, HERE = Path(__file__).with_name('one_gpu.json'), 'h100:1'
SOURCE = 'https://github.com/flax-spmd/flax_spmd/tree/main/benchmarks/one_gpu.py'
DIES = {'h200': 'h100'}  # another memory, the same products
MARGIN = 0.97  # of the low end, below the fastest step relative to its expected time
BANDWIDTHS = (0.7, 0.75, 0.8, 0.85, 0.9, 1.0)


class Step(NamedTuple):
  """A step with a known time, its estimated work on each device, and the seconds of its communication."""

  target: str
  model: str
  batch: int
  seconds: float
  dtype: str
  products: Sequence[Sequence[float]]
  hbm_bytes: float
  kernels: float
  links: float
  source: str

  @property
  def die(self) -> str:
    chip = self.target.partition(':')[0]
    return DIES.get(chip, chip)

  @property
  def platform(self) -> str:
    return parse_target(self.target).chip.platform


# -- estimates


def published() -> list[Step]:
  """The steps, each estimated for its target; seconds each, and no compiler."""
  content = tomllib.loads(FILE.read_text())
  return [*(_estimated(entry, content) for entry in content['steps']), *measured()]


def measured() -> list[Step]:
  """The strangers' steps that were measured on one GPU, but for those whose estimate is in doubt."""
  layout, found = spmd.Layout(spmd.abstract_mesh({'data': 1}), (('batch', 'data'),)), []
  for name, report in json.loads(MEASURED.read_text()).items():
    if name in strangers.MODELS and 'seconds' in report:
      train_step = strangers.train_step(name)
      estimator = Estimator(train_step)
      outcome = estimator.estimate(layout, HERE)
      if not outcome.doubts:
        batch = jax.tree.leaves(train_step.batch)[0].shape[0]
        found.append(_step(HERE, name, batch, report['seconds'], estimator.dtype, outcome, SOURCE))
  return found


def _step(
  target: str, model: str, batch: int, seconds: float, dtype: str, outcome: Outcome, source: str
) -> Step:
  parsed, counts = parse_target(target), outcome.counts
  assert counts is not None
  links = sum(costs.seconds(one, parsed, outcome.mesh) for one in counts.collectives)
  products = [list(one) for one in counts.products]
  return Step(
    target, model, batch, seconds, dtype, products, counts.hbm_bytes, counts.kernels, links, source
  )


def decoder(entry: dict[str, Any], content: dict[str, Any]) -> published_model.Decoder:
  """The model of a step of the file."""
  return published_model.Decoder(
    **content['models'][entry['model']],
    keep=None if entry['keep'] == 'all' else tuple(entry['keep']),
    skips=parse_target(entry['target']).chip.platform == 'cuda',  # the fit for TPUs is better without
  )


def _estimated(entry: dict[str, Any], content: dict[str, Any]) -> Step:
  target, tokens = parse_target(entry['target']), entry['batch'] * entry['length']
  model = decoder(entry, content)
  train_step = published_model.train_step(model, entry['batch'] * target.devices, entry['length'])
  # cuDNN's attention has the products of every attention kernel; no kernel of a TPU can be partitioned here
  estimator = Estimator(train_step, platform='cuda')
  layout = spmd.Layout(spmd.abstract_mesh(entry['mesh']), published_model.rules_for(entry['mesh']))
  outcome = estimator.estimate(layout, target)
  seconds = entry.get('seconds') or (
    model.published_flops(tokens, entry['length'], entry['formula'] == 'causal') / entry['tflops'] / 1e12
  )
  source = f'{content["sources"][entry["source"]]}/{entry["path"]}'
  return _step(entry['target'], entry['model'], entry['batch'], seconds, 'bf16', outcome, source)


# -- the fit


def expected(step: Step, efficiency: float, bandwidth: float) -> float:
  return costs.local(*_local(step, efficiency, bandwidth)) + step.links


def _local(step: Step, efficiency: float, bandwidth: float) -> tuple[float, float, str]:
  """The seconds of the products of a step, and of what waits for memory, with the platform."""
  chip = parse_target(step.target).chip
  products = tuple(Product(*one) for one in step.products)
  flops = sum(one.flops * one.runs for one in products)
  counts = Counts(flops, step.hbm_bytes, (), (), (), products, step.kernels)
  reached = chip.bandwidth * bandwidth / costs.BANDWIDTH
  chip = chip._replace(efficiency=efficiency, bandwidth=reached)
  return *costs.local_seconds(counts, chip, costs.peak(chip, step.dtype)), chip.platform


def efficiency_of(steps: Sequence[Step], bandwidth: float) -> float:
  """The share of the peak with which the mean logarithmic error of some steps is zero."""
  low, high = 0.05, 2.0
  for _ in range(30):
    middle = math.sqrt(low * high)
    error = sum(math.log(expected(step, middle, bandwidth) / step.seconds) for step in steps)
    low, high = (middle, high) if error > 0 else (low, middle)
  return middle


def efficiencies(steps: Sequence[Step], bandwidth: float) -> dict[str, float]:
  """The share of each die."""
  by_die: dict[str, list[Step]] = {}
  for step in steps:
    by_die.setdefault(step.die, []).append(step)
  return {die: efficiency_of(group, bandwidth) for die, group in by_die.items()}


def fit(steps: Sequence[Step]) -> float:
  """The share of the bandwidth with the least squared logarithmic errors, each die at its best share."""

  def error(bandwidth: float) -> float:
    shares = efficiencies(steps, bandwidth)
    return sum(
      math.log(step.seconds / expected(step, shares[step.die], bandwidth)) ** 2 for step in steps
    )

  return min(BANDWIDTHS, key=error)


def ends(step: Step, efficiency: float, bandwidth: float) -> tuple[float, float]:
  """The ends of the bracket of a step, as `costs.cost` computes them for a spread of (1, 1)."""
  compute, memory, platform = _local(step, efficiency, bandwidth)
  return costs.ends(compute, memory, step.links, platform)


def spreads(steps: Sequence[Step], bandwidth: float) -> dict[str, tuple[float, float]]:
  """The factors on both ends that make the brackets contain all steps, for each platform.

  The share of a step's die is that by the others.
  """
  ratios: dict[str, list[tuple[float, float]]] = {}
  for step in steps:
    others = [one for one in steps if one is not step and one.die == step.die]
    if others:
      low, high = ends(step, efficiency_of(others, bandwidth), bandwidth)
      ratios.setdefault(step.platform, []).append((step.seconds / low, step.seconds / high))
  return {
    platform: (MARGIN * min(low for low, _ in found), max(high for _, high in found))
    for platform, found in ratios.items()
  }


class Prediction(NamedTuple):
  """A step and its bracket by the other steps."""

  step: Step
  low: float
  high: float

  @property
  def ratio(self) -> float:
    """Published time over the bracket's middle."""
    return self.step.seconds / math.sqrt(self.low * self.high)

  @property
  def is_inside(self) -> bool:
    return self.low <= self.step.seconds <= self.high


def left_out(steps: Sequence[Step]) -> list[Prediction]:
  """The bracket of each step by all others; steps of dies without another step are not among them."""
  found = []
  for step in steps:
    others = [one for one in steps if one is not step]
    alike = [one for one in others if one.die == step.die]
    if alike:
      bandwidth = fit(others)
      spread = spreads(others, bandwidth)[step.platform]
      low, high = ends(step, efficiency_of(alike, bandwidth), bandwidth)
      found.append(Prediction(step, spread[0] * low, spread[1] * high))
  return found


class Calibrated(NamedTuple):
  """A prediction after calibration by one other step of the same model and die."""

  error: float
  is_inside: bool


def calibrated(steps: Sequence[Step], bandwidth: float) -> list[Calibrated]:
  """Each step, calibrated by each other one of the same model and die."""
  shares, found = efficiencies(steps, bandwidth), []
  for measured, step in itertools.permutations(steps, 2):
    if (measured.model, measured.die) == (step.model, step.die):
      share = shares[step.die]
      pace = measured.seconds / expected(measured, share, bandwidth)
      low, high = (pace * end for end in ends(step, share, bandwidth))
      inside = CALIBRATED[0] * low <= step.seconds <= CALIBRATED[1] * high
      found.append(Calibrated(pace * expected(step, share, bandwidth) / step.seconds - 1, inside))
  return found


# -- the report


def figures(steps: Sequence[Step]) -> list[Figure]:
  """The figures of the published steps."""
  found = left_out(steps)
  widths = [one.high / one.low for one in found]
  off = [abs(one.ratio - 1) for one in found]
  after = calibrated(steps, fit(steps))
  errors = sorted(abs(one.error) for one in after)
  inside = sum(one.is_inside for one in found)
  faster = sum(one.step.seconds < one.low for one in found)
  return [
    exact('published: steps', len(found), '', at_least(12)),
    exact('published: of them in their bracket', inside, '', at_least(math.ceil(0.8 * len(found)))),
    exact('published: faster than the low end', faster, '', at_most(0)),
    exact('published: width of the bracket, median', statistics.median(widths), 'x', at_most(1.35)),
    exact('published: width of the bracket, largest', max(widths), 'x', at_most(1.35)),
    exact('published: off the middle, median', 100 * statistics.median(off), '%', at_most(10)),
    exact('calibrated: pairs of steps of one model and chip', len(after), ''),
    exact('calibrated: off, median', 100 * statistics.median(errors), '%', at_most(5)),
    exact('calibrated: off by at most 5 %', 100 * sum(one <= 0.05 for one in errors) / len(errors), '%'),
    exact(
      'calibrated: in their bracket',
      100 * sum(one.is_inside for one in after) / len(after),
      '%',
      at_least(80),
    ),
  ]


def table(steps: Sequence[Step]) -> Table:
  """Each step with its bracket by the others."""
  rows = [
    [
      one.step.target,
      one.step.model,
      str(one.step.batch),
      f'{one.step.seconds:.3g}',
      f'{one.low:.3g} to {one.high:.3g}',
      f'{100 * (one.ratio - 1):+.0f}',
      '' if one.is_inside else 'outside',
    ]
    for one in left_out(steps)
  ]
  head = [
    'target',
    'model',
    'sequences per device',
    'published, s',
    'bracket, s',
    'off the middle, %',
    '',
  ]
  return Table('Published steps, each predicted by the others', head, rows)


def fitted(steps: Sequence[Step]) -> dict[str, Any]:
  """The numbers that the package has, as fitted to all steps."""
  bandwidth = fit(steps)
  shares = {die: round(share, 3) for die, share in efficiencies(steps, bandwidth).items()}
  found = {
    platform: [round(end, 3) for end in spread] for platform, spread in spreads(steps, bandwidth).items()
  }
  return {'bandwidth': bandwidth, 'efficiencies': shares, 'spreads': found}


def details(steps: Sequence[Step]) -> dict[str, Any]:
  """The estimates of the steps, and the numbers that are fitted to them."""
  return {'steps': [step._asdict() for step in steps], 'fitted': fitted(steps)}
