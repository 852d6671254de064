"""Steps that run on one GPU, beside their estimates: memory and time.

    python benchmarks/one_gpu.py measure STEPS.json               # on a machine with a GPU; each step in a process
    python benchmarks/one_gpu.py compare STEPS.json h100:1        # anywhere: beside estimates for this target
    python benchmarks/one_gpu.py measure STEPS.json gqa t5        # some steps

The steps are those of `strangers/`, and of the Llama-like decoders in `published.toml` that were measured here, of which each
calibrates the time of the others.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import published_model
import published_steps
import strangers

import flax_spmd as spmd
from flax_spmd.explore import Estimator, TrainStep, calibrate, parse_target

RULES = (('batch', 'data'),)
STEPS, WARM = 5, 2
SECONDS = 150  # limit for one step's process
_PUBLISHED = tomllib.loads(published_steps.FILE.read_text())
DECODERS = {  # those steps of the file that were measured here
  f'decoder-{one["batch"]}x{one["length"]}{"-all" if one["keep"] == "all" else ""}': one
  for one in _PUBLISHED['steps']
  if one['source'] == 'here'
}
TOKENS = 30000  # words of a batch; every vocabulary has more
BOUNDS = {'segments': 2, 'attention_mask': 2, 'positions': 256, 'label': 1000, 'labels': 1000}
NAMES = (*strangers.MODELS, *DECODERS)


def train_step(name: str) -> TrainStep:
  """The step of a name, for one device."""
  if name not in DECODERS:
    return strangers.train_step(name)
  entry = DECODERS[name]
  model = published_steps.decoder(entry, _PUBLISHED)
  return published_model.train_step(model, entry['batch'], entry['length'])


# -- on the machine with the GPU


def run_here(name: str) -> dict[str, Any]:
  """Runs a step on the first device of this process.

  Returns:
    Seconds of its compilation and of one step; bytes: the allocator's peak, and the compiler's analysis.
  """
  made = train_step(name)
  mesh = spmd.make_mesh({'data': 1}, devices=jax.devices()[:1])
  layout = spmd.Layout(mesh, RULES)
  state = layout.init(made.create)
  batch = layout.shard(_random(made.batch))
  before = _peak()
  begin = time.perf_counter()
  step = layout.jit(made.step, donate_argnums=0)
  compiled = step.lower(state, batch).compile()
  seconds = time.perf_counter() - begin
  memory = compiled.memory_analysis()
  for _ in range(WARM):
    state, metrics = step(state, batch)
  jax.block_until_ready(state)
  times = []
  for _ in range(STEPS):
    begin = time.perf_counter()
    for _ in range(2):
      state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    times.append((time.perf_counter() - begin) / 2)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(metrics)))
  return {
    'device': jax.devices()[0].device_kind,
    'seconds': statistics.median(times),
    'fastest': min(times),
    'compilation': seconds,
    'init': before,
    'peak': _peak(),
    'arguments': memory.argument_size_in_bytes,
    'temporaries': memory.temp_size_in_bytes,
    'results': memory.output_size_in_bytes - memory.alias_size_in_bytes,
    'kernels': _kernels(lambda: jax.block_until_ready(step(state, batch))),
  }


def _random(batch: Any) -> Any:
  """Random values for a batch of shapes; tokens are spread over their vocabulary."""
  generator = np.random.default_rng(0)

  def values(path: Any, leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jnp.integer):
      bound = BOUNDS.get(str(getattr(path[-1], 'key', '')) if path else '', TOKENS)
      return generator.integers(0, bound, leaf.shape).astype(leaf.dtype)
    return jnp.asarray(generator.normal(size=leaf.shape), leaf.dtype)

  return jax.tree.map_with_path(values, batch)


def _peak() -> int:
  return (jax.devices()[0].memory_stats() or {}).get('peak_bytes_in_use', 0)


def _kernels(run: Any) -> dict[str, list[float]]:
  """The kernels of one step with the most time: runs and microseconds; the error instead where they cannot be profiled."""
  try:
    with tempfile.TemporaryDirectory() as folder:
      with jax.profiler.trace(folder):
        run()
      (file,) = Path(folder).rglob('*.xplane.pb')
      data = jax.profiler.ProfileData.from_file(str(file))
    found: dict[str, list[float]] = {}
    for plane in data.planes:
      if 'GPU' in plane.name:
        for line in plane.lines:
          if 'Stream' in line.name:
            for event in line.events:
              entry = found.setdefault(event.name, [0, 0.0])
              entry[0] += 1
              entry[1] += event.duration_ns / 1e3
    return dict(sorted(found.items(), key=lambda one: -one[1][1])[:60])
  except Exception as error:
    return {f'{type(error).__name__}: {error}'[:200]: [0, 0.0]}


def measure(file: Path, names: list[str]) -> None:
  """Runs steps, each in a process of its own, and writes what was measured after each."""
  found = json.loads(file.read_text()) if file.exists() else {}
  found['jax'] = jax.__version__
  for name in names or NAMES:
    begin = time.perf_counter()
    try:
      done = subprocess.run(
        [sys.executable, __file__, 'run', name],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
      )
      report = json.loads(done.stdout) if not done.returncode else {'error': done.stderr[-1500:]}
    except subprocess.TimeoutExpired:
      report = {'error': f'more than {SECONDS} s'}
    found[name] = report
    file.write_text(json.dumps(found, indent=1))
    shown = {key: value for key, value in report.items() if key != 'kernels'}
    print(name, f'{time.perf_counter() - begin:.0f} s', shown, flush=True)


# -- anywhere


def compare(file: Path, target: str) -> None:
  """Prints the measured steps beside their estimates."""
  found = json.loads(file.read_text())
  devices = {
    report['device'] for report in found.values() if isinstance(report, dict) and 'device' in report
  }
  print(f'{", ".join(devices)}, jax {found["jax"]}, estimated as {target}')
  outcomes = {}
  layout = spmd.Layout(spmd.abstract_mesh({'data': 1}), RULES)
  for name in NAMES:
    report = found.get(name, {'error': 'not run'})
    if 'error' in report:
      print(f'{name:20} {report["error"].strip().splitlines()[-1][:90]}')
      continue
    outcome = outcomes[name] = Estimator(train_step(name)).estimate(layout, target)
    cost, seconds = outcome.cost, report['seconds']
    assert cost is not None
    compiled = report['arguments'] + report['temporaries'] + report['results']
    inside = 'inside' if cost.low <= seconds <= cost.high else f'{seconds / cost.high:.2f} x high'
    inside = inside if seconds >= cost.low else f'FASTER: {seconds / cost.low:.2f} x low'
    print(
      f'{name:20} {1e3 * seconds:7.2f} ms, bracket {1e3 * cost.low:7.2f} to {1e3 * cost.high:7.2f}: {inside:16}'
      f' memory {outcome.memory.peak / 2**30:6.2f} GiB, compiled {100 * (outcome.memory.peak / compiled - 1):+5.1f} %,'
      f' allocated {100 * (outcome.memory.peak / report["peak"] - 1):+5.1f} % {"in doubt" if outcome.doubts else ""}',
      flush=True,
    )
  decoders = {name: (outcomes[name], found[name]['seconds']) for name in DECODERS if name in outcomes}
  for one, measured in decoders.items():
    chip = calibrate([measured], target).chip
    errors = [
      f'{100 * (chip.pace * outcome.cost.expected / seconds - 1):+.1f} %'
      for other, (outcome, seconds) in decoders.items()
      if other != one
    ]
    print(f'calibrated by {one}: {", ".join(errors)}')


if __name__ == '__main__':
  match sys.argv[1:]:
    case ['run', name]:
      print(json.dumps(run_here(name)))
    case ['measure', file, *names]:
      measure(Path(file), names)
    case ['compare', file, target]:
      parse_target(target)
      compare(Path(file), target)
    case _:
      sys.exit(__doc__)
