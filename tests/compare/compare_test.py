"""Comparisons of layouts with the CPU's compiler, which every machine has."""

import json
import os
from html.parser import HTMLParser
from textwrap import dedent

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import flax_spmd as spmd
from flax_spmd import cli
from flax_spmd._src.compare import compilation
from flax_spmd._src.compare.compile_worker import memory_needed
from flax_spmd.errors import LayoutError, TargetDeviceError
from flax_spmd.explore import Comparison, TrainStep, compare

LAYERS, BATCH, EMBED, MLP = 3, 64, 32, 128
TARGET = 'cpu:8'


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _=None):
    def param(name, *names):
      init = spmd.with_logical_partitioning(nn.initializers.normal(), names)
      sizes = {'embed': EMBED, 'mlp': MLP}
      return self.param(name, init, tuple(sizes[axis] for axis in names))

    h = spmd.with_logical_constraint(nn.relu(x @ param('up', 'embed', 'mlp')), ('batch', 'mlp'))
    return spmd.with_logical_constraint(x + h @ param('down', 'mlp', 'embed'), ('batch', None)), None


class Model(nn.Module):
  @nn.compact
  def __call__(self, x):
    stack = nn.scan(
      Block,
      length=LAYERS,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      metadata_params={nn.PARTITION_NAME: 'layers'},
    )
    return stack(name='blocks')(x, None)[0]


def create():
  params = Model().init(jax.random.key(0), jnp.ones((1, EMBED)))['params']
  return TrainState.create(apply_fn=Model().apply, params=params, tx=optax.adamw(1e-3))


def step(state, x):
  loss, grads = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn({'params': p}, x) ** 2))(
    state.params
  )
  return state.apply_gradients(grads=grads), loss


def setup():
  return TrainStep(step, create, jax.ShapeDtypeStruct((BATCH, EMBED), jnp.float32))


def layouts():
  return {
    'data': spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),)),
    'fsdp': spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'), ('embed', 'data'))),
    'tensor': spmd.Layout(
      spmd.abstract_mesh({'data': 2, 'model': 4}), (('batch', 'data'), ('mlp', 'model'))
    ),
  }


@pytest.fixture(scope='module', autouse=True)
def cache(tmp_path_factory):
  folder = tmp_path_factory.mktemp('cache')
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('FLAX_SPMD_CACHE', str(folder))
    yield folder


@pytest.fixture(scope='module')
def comparison(cache):
  given = layouts()
  given['odd'] = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('layers', 'data'),))
  return compare(setup(), given, TARGET)


def test_flops_match_the_model(comparison):
  whole = 3 * 2 * 2 * BATCH * EMBED * MLP * LAYERS  # forward, and twice that backward
  for name in layouts():
    assert comparison[name].counts.flops == pytest.approx(whole / 8, rel=0.06), name


def test_memory_matches_the_layout(comparison):
  weights = 4 * 2 * EMBED * MLP * LAYERS
  memory = {name: comparison[name].memory for name in layouts()}
  assert memory['data'].parameters == weights
  assert memory['fsdp'].parameters == weights // 8 and memory['tensor'].parameters == weights // 4
  assert memory['fsdp'].optimizer == 2 * weights // 8 + 4
  assert memory['data'].batch == memory['fsdp'].batch == 4 * BATCH * EMBED // 8
  for one in memory.values():
    state = one.parameters + one.optimizer + one.rest + one.batch
    assert one.peak == pytest.approx(state + one.temporaries, rel=0.01)


def test_collectives_follow_the_layout(comparison):
  weights = 4 * 2 * EMBED * MLP * LAYERS
  (data,) = comparison['data'].counts.by_axis()
  assert data == ('data',)
  assert comparison['data'].counts.by_kind()['all-reduce'] == pytest.approx(
    2 * weights * 7 / 8, rel=0.01
  )
  assert 'all-gather' in comparison['fsdp'].counts.by_kind()
  assert ('model',) in comparison['tensor'].counts.by_axis()
  assert any('compare_test.py' in one.source for one in comparison['tensor'].counts.collectives)


def test_a_layout_that_does_not_divide_is_a_failed_row(comparison):
  odd = comparison['odd']
  assert not odd.fits and odd.memory is None
  assert odd.error.startswith("params/blocks/down, dim 0 'layers': size 3 is not divisible by")


def test_the_table(comparison):
  text = str(comparison)
  lines = text.splitlines()
  assert lines[0].startswith('cpu:8: 8 devices with 16 GiB each')
  assert [line.split()[0] for line in lines[2:6]] == ['data', 'fsdp', 'tensor', 'odd']
  assert 'poor proxy' in lines[-2]
  assert lines[-1] == 'Time brackets: a guess, since no published step of cpu was compared.'
  assert comparison.best.name in layouts()


def test_the_difference(comparison):
  lines = comparison.diff('data', 'fsdp')
  assert any(line.startswith('fsdp needs') and line.endswith('less: parameters') for line in lines)
  assert any('all-gather' in line for line in lines)
  assert comparison.diff('data', 'data') == []
  with pytest.raises(TargetDeviceError) as caught:
    comparison.diff('data', 'fdsp')
  assert str(caught.value) == dedent("""\
    The comparison has no layout 'fdsp'. Did you mean 'fsdp'?
    Fix: use one of data, fsdp, tensor, odd.""")
  with pytest.raises(TargetDeviceError) as caught:
    comparison[0]
  assert str(caught.value) == dedent("""\
    The comparison has no layout 0.
    Fix: use one of data, fsdp, tensor, odd.""")


@pytest.mark.parametrize('jobs', [0, -1])
def test_a_number_of_compilers_below_one(jobs):
  for call in (
    lambda: compare(setup(), layouts(), TARGET, jobs=jobs),
    lambda: spmd.search(setup(), TARGET, jobs=jobs),
  ):
    with pytest.raises(TargetDeviceError) as caught:
      call()
    assert str(caught.value) == (
      f'jobs={jobs} is not a number of compilers.\nFix: pass 1 or more, or leave it out.'
    )


def test_json(comparison):
  content = json.loads(comparison.to_json())
  assert [one['name'] for one in content['layouts']] == ['data', 'fsdp', 'tensor', 'odd']
  assert content['source'] == 'compiled:cpu'
  assert content['layouts'][0]['memory']['parameters'] == comparison['data'].memory.parameters
  assert content['layouts'][2]['mesh'] == {'data': 2, 'model': 4}


class Page(HTMLParser):
  """Checks that tags are closed in order, and collects texts."""

  def __init__(self):
    super().__init__()
    self.open, self.texts, self.tags = [], [], []

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    if tag not in ('meta', 'input'):
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_startendtag(self, tag, attrs):
    self.tags.append(tag)

  def handle_data(self, data):
    self.texts.append(data)


def read(file):
  page = Page()
  page.feed(file.read_text())
  page.close()
  assert not page.open
  return page


def test_the_page(comparison, tmp_path):
  comparison.to_html(tmp_path / 'report.html')
  page = read(tmp_path / 'report.html')
  assert {'table', 'svg', 'details', 'script'} <= set(page.tags)
  for name in layouts():
    assert name in page.texts
  assert 'params/blocks/up' in page.texts
  text = (tmp_path / 'report.html').read_text()
  assert 'http://' not in text.replace('http://www.w3.org/2000/svg', '') and 'src=' not in text


def test_the_roofline_depends_on_the_dtype(comparison, tmp_path):
  comparison.to_html(tmp_path / 'report.html')
  chip = comparison.target.chip
  flops = chip.flops['f32'] * chip.efficiency / chip.bandwidth
  assert f'In f32, a step on cpu is compute-bound above {flops:.3g} FLOPs per byte of HBM' in str(
    read(tmp_path / 'report.html').texts
  )


def test_names_are_escaped(tmp_path):
  bad = '<script>alert("x")</script>'
  layout = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))

  def make():
    return {bad: spmd.LogicallyPartitioned(jnp.ones((8, 8)), (bad, None))}

  train_step = TrainStep(lambda s, x: (s, jnp.sum(x @ s[bad].unbox())), make, jnp.ones((8, 8)))
  one = compare(train_step, {bad: layout}, TARGET)
  one.to_html(tmp_path / 'report.html')
  page = read(tmp_path / 'report.html')
  assert page.tags.count('script') == 1
  assert bad in page.texts
  assert 'data-value="inf' not in (tmp_path / 'report.html').read_text()  # JavaScript reads Infinity


def test_a_thousand_parameters_make_a_small_page(comparison, tmp_path):
  outcome = comparison['fsdp']
  rows = [row._replace(path=f'{row.path}/{i}') for i in range(143) for row in outcome.program.rows]
  many = type(comparison)(
    comparison.target, [outcome._replace(program=outcome.program._replace(rows=rows))]
  )
  many.to_html(tmp_path / 'report.html')
  assert '<figure>' in (tmp_path / 'report.html').read_text()
  assert len(rows) > 1000 and (tmp_path / 'report.html').stat().st_size < 300_000


# -- the cache


def test_a_repeated_comparison_compiles_nothing(comparison, monkeypatch):
  monkeypatch.setattr(compilation, 'run_workers', lambda *arguments: pytest.fail('compiled again'))
  again = compare(setup(), layouts(), TARGET)
  assert all(outcome.compiled.cached for outcome in again)
  assert [outcome.counts for outcome in again] == [comparison[name].counts for name in layouts()]
  assert [outcome.cost for outcome in again] == [comparison[name].cost for name in layouts()]


@pytest.mark.parametrize('name', ['XLA_FLAGS', 'LIBTPU_INIT_ARGS'])
def test_other_flags_of_compilers_are_compiled_with(comparison, monkeypatch, name):
  monkeypatch.setattr(compilation, 'run_workers', lambda *arguments: [{'error': 'compiled again'}])
  monkeypatch.setenv(name, f'{os.environ.get(name, "")} --xla_some_flag=true')
  assert compare(setup(), {'data': layouts()['data']}, TARGET)['data'].error == 'compiled again'


def test_a_damaged_cache_entry_is_compiled_again(comparison, cache, monkeypatch):
  runs = []
  run = compilation.run_workers
  monkeypatch.setattr(compilation, 'run_workers', lambda *arguments: runs.append(1) or run(*arguments))
  for file in cache.glob('*.json'):
    file.write_text('{"counts": {"flops"')
  again = compare(setup(), {'data': layouts()['data']}, TARGET)
  assert runs == [1] and again['data'].counts == comparison['data'].counts


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
  (tmp_path / 'file').write_text('')
  monkeypatch.setenv('FLAX_SPMD_CACHE', str(tmp_path / 'file' / 'cache'))
  monkeypatch.setattr(compilation, 'run_workers', lambda *arguments: [{'error': 'no', 'used': 1}])
  with pytest.warns(UserWarning, match='Set FLAX_SPMD_CACHE to another folder'):
    assert compare(setup(), {'data': layouts()['data']}, TARGET)['data'].error == 'no'


def test_failures_are_retried_unless_out_of_memory(tmp_path, monkeypatch):
  monkeypatch.setenv('FLAX_SPMD_CACHE', str(tmp_path))
  results = iter([{'error': 'a crash'}, {'error': 'too large', 'used': 2**40}])
  monkeypatch.setattr(compilation, 'run_workers', lambda *arguments: [next(results)])
  errors = [compare(setup(), {'data': layouts()['data']}, TARGET)['data'].error for _ in range(3)]
  assert errors == ['a crash', 'too large', 'too large']


# -- errors


def test_a_bare_function_is_not_a_train_step():
  with pytest.raises(TypeError) as caught:
    compare(step, layouts(), TARGET)
  assert (
    str(caught.value)
    == dedent("""\
    The first argument of compare is of type function, not a TrainStep.
    Fix: write compare(TrainStep(step, create, batch), ...), with TrainStep from flax_spmd.explore; or pass a function that returns one for a layout, lambda layout: TrainStep(...).""")
  )


def of_four(params, opt_state, x, y):
  return params


def own_state(rng, size, *shapes, **options):
  return {}


def returned(value=None):
  return value


@pytest.mark.parametrize(
  'given', [lambda train_step: train_step, lambda train_step: lambda layout: train_step]
)
def test_functions_of_a_train_step_that_take_other_arguments(given):
  batch = jax.ShapeDtypeStruct((8,), 'float32')

  def error_of(step, create, args=()):
    with pytest.raises(TypeError) as caught:
      compare(given(TrainStep(step, create, batch, args)), layouts(), TARGET)
    return str(caught.value)

  assert (
    error_of(of_four, returned)
    == dedent("""\
    A training step is called as step(state, batch), but of_four(params, opt_state, x, y) takes other arguments.
    Fix: pass a function of two arguments, such as lambda state, batch: of_four(state, *batch) for a batch that is a tuple, or of_four(*state, *batch) if the state is one, too.""")
  )
  assert error_of(None, returned).startswith(
    'A training step is called as step(state, batch), but step is of type NoneType.\nFix: '
  )
  assert error_of(lambda state, batch: state, {'w': 1}) == dedent("""\
    TrainStep calls create(*args), with 0 arguments, but create is of type dict.
    Fix: pass a function that returns the state, lambda: state.""")
  assert error_of(jax.jit(lambda state, batch: state), own_state, (1,)) == dedent("""\
    TrainStep calls create(*args), with 1 argument, but own_state(rng, size, *shapes, **options) takes other arguments.
    Fix: pass its arguments, TrainStep(step, create, batch, args=(...)).""")


@pytest.mark.parametrize(
  ('layouts', 'problem'),
  [
    ({}, 'compare needs at least one layout.'),
    ((), 'compare needs at least one layout.'),
    (
      spmd.Layout(spmd.abstract_mesh({'data': 8}), ()),
      'compare needs layouts by name, or a list of them, not a Layout.',
    ),
    ('fsdp', 'compare needs layouts by name, or a list of them, not a str.'),
    (
      {'a': (('batch', 'data'),), 'b': None},
      'compare needs layouts and pipelines, and these are none:\n  a: a tuple\n  b: a NoneType',
    ),
  ],
)
def test_no_layouts(layouts, problem):
  train_step = TrainStep(lambda state, x: state, dict, jax.ShapeDtypeStruct((8,), 'float32'))
  with pytest.raises(TypeError) as error:
    compare(train_step, layouts, 'cpu:8')
  fix = "Fix: pass compare(train_step, {'fsdp': Layout(mesh, rules)}, target)."
  assert str(error.value) == f'{problem}\n{fix}'


def test_meshes_of_another_size():
  text = "The mesh {'data': 8} has 8 devices, the target cpu:16 16.\nFix: give the layout a mesh of 16 devices."
  one, fitting = spmd.abstract_mesh({'data': 8}), spmd.abstract_mesh({'data': 16})
  for rows, expected in (
    ({'one': one}, text),
    ({'one': one, 'fitting': fitting, 'other': one}, f'one: {text}\nother: {text}'),
  ):
    with pytest.raises(TargetDeviceError) as caught:
      compare(setup(), {name: spmd.Layout(mesh) for name, mesh in rows.items()}, 'cpu:16')
    assert str(caught.value) == expected


def test_a_model_that_cannot_be_traced():
  def broken(state, x):
    raise ZeroDivisionError('mine')

  with pytest.raises(ZeroDivisionError, match='mine'):
    compare(setup()._replace(step=broken), layouts(), TARGET)


def test_an_error_under_one_layout_is_in_its_row():
  def narrow(state, x):
    if 'data' not in dict(spmd.get_logical_axis_rules()).values():
      raise ZeroDivisionError('mine')
    return step(state, x)

  wide = {'data': layouts()['data'], 'none': spmd.Layout(spmd.abstract_mesh({'data': 8}), ())}
  row = compare(setup()._replace(step=narrow), wide, TARGET)['none']
  assert row.error == 'ZeroDivisionError: mine' and not row.fits


def test_when_no_layout_fits():
  wrong = {'odd': spmd.Layout(spmd.abstract_mesh({'data': 8}), (('layers', 'data'),))}
  with pytest.raises(LayoutError, match='size 3 is not divisible'):
    compare(setup(), wrong, TARGET)


def test_a_missing_wheel_is_noticed_before_anything_is_traced(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  layout = spmd.Layout(spmd.abstract_mesh({'data': 16}), (('batch', 'data'),))
  with pytest.raises(TargetDeviceError) as caught:
    compare(setup()._replace(step=pytest.fail), [layout], 'v5e:4x4')
  assert str(caught.value) == dedent("""\
    There is no compiler for v5e:4x4 on this machine: the wheel libtpu is not installed.
    Fix: pip install 'flax-spmd[tpu]'""")


def test_a_wheel_for_another_jax(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: object())
  versions = {'jaxlib': '0.12.0.1', 'jax-cuda12-plugin': '0.10.2', 'jax-cuda12-pjrt': '0.10.2'}
  monkeypatch.setattr('importlib.metadata.version', versions.__getitem__)
  with pytest.raises(TargetDeviceError) as caught:
    compilation.check_compiler(compilation.Target('h100:8', spmd.explore.chips()['h100'], (1, 8)))
  assert str(caught.value) == dedent("""\
    The compiler for h100:8, jax-cuda12-plugin 0.10.2, does not match jax 0.12.0.1.
    Fix: pip install 'jax-cuda12-plugin==0.12.0'""")


def test_the_compiler_for_gpus_of_either_cuda(monkeypatch):
  for cuda in ('cuda12', 'cuda13'):
    plugin = f'jax_{cuda}_plugin'
    monkeypatch.setattr('importlib.util.find_spec', lambda name, plugin=plugin: name == plugin or None)
    monkeypatch.setattr(compilation, 'installed_version', lambda wheel: '0.12.0.1')
    compilation.check_compiler(compilation.Target('h100:8', spmd.explore.chips()['h100'], (1, 8)))
    assert compilation.compiler_versions('cuda') == dict.fromkeys(
      (f'jax-{cuda}-plugin', f'jax-{cuda}-pjrt'), '0.12.0.1'
    )


def test_too_many_devices_for_the_cpu():
  with pytest.raises(TargetDeviceError, match="Fix: compare on a target such as 'h100:1024'"):
    compilation.check_compiler(compilation.Target('cpu:4096', spmd.explore.chips()['cpu'], (1, 4096)))


@pytest.mark.parametrize(
  ('code', 'ending'),
  [('import os; os.kill(os.getpid(), 9)', 'SIGKILL'), ('raise SystemExit(3)', 'code 3')],
)
def test_a_crash_of_the_compiler_is_a_result(tmp_path, monkeypatch, code, ending):
  worker = tmp_path / 'python'
  worker.write_text(f'#!/bin/sh\nexec {os.sys.executable} -c "{code}"\n')
  worker.chmod(0o755)
  monkeypatch.setenv('FLAX_SPMD_CACHE', str(tmp_path / 'cache'))
  monkeypatch.setattr('sys.executable', str(worker))
  outcome = compare(setup(), {'data': layouts()['data']}, TARGET)['data']
  assert outcome.error.startswith(f'the compiler ended with {ending}') and not outcome.fits


@pytest.mark.parametrize(
  ('error', 'temporaries', 'peak'),
  [
    ('Used 20.00G of 15.75G hbm. Exceeded', 0, 20 * 2**30),
    ('the total memory required for HLO temporaries (17.00G) exceeds available HBM', 17 * 2**30, None),
  ],
)
def test_out_of_memory_reports_the_memory_needed(tmp_path, monkeypatch, error, temporaries, peak):
  monkeypatch.setenv('FLAX_SPMD_CACHE', str(tmp_path))
  result = {'error': error, **memory_needed(f'RESOURCE_EXHAUSTED: {error}')}
  monkeypatch.setattr(compilation, 'run_workers', lambda *arguments: [dict(result)])
  comparison = compare(setup(), {'data': layouts()['data']}, TARGET)
  memory = comparison['data'].memory
  state = memory.parameters + memory.optimizer + memory.rest + memory.batch
  assert memory.temporaries == temporaries and memory.peak == (peak or state + temporaries)
  assert 'no, ' in str(comparison).splitlines()[2] and not comparison['data'].fits
  assert memory_needed('something else') == {}


def test_the_arrays_that_need_the_memory():
  def kept(w, x):
    for _ in range(3):
      x = jnp.sin(x @ w)
    return x.sum()

  step = lambda w, x: (w - jax.grad(kept)(w, x), jnp.float32(0))
  x = jax.ShapeDtypeStruct((8 * 4096, 256), jnp.float32)
  layout = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))
  comparison = compare(TrainStep(step, lambda: jnp.ones((256, 256)), x), {'data': layout}, TARGET)
  outcome = comparison['data']
  first = outcome.live[0]
  line = kept.__code__.co_firstlineno + 2
  assert (first.array, first.source) == ('f32[4096,256]', f'compare_test.py:{line}')
  assert first.bytes == first.number * 4 * 4096 * 256 and first.number > 1
  assert 0.9 * outcome.memory.temporaries < sum(one.bytes for one in outcome.live)
  text = f'  in memory at the peak: {first.number * 4} MiB: {first.number} x f32[4096,256], compare_test.py:{line}'
  assert text not in str(comparison)
  assert text in str(Comparison(comparison.target, [outcome._replace(fits=False)])).splitlines()
  assert json.loads(comparison.to_json())['layouts'][0]['live'][0] == first._asdict()
  assert 'Temporary arrays at the peak' in comparison.to_html()


# -- the command line


@pytest.fixture
def project(tmp_path, monkeypatch):
  """A folder with a module that has the model, and layouts as TOML."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  (tmp_path / 'my_model.py').write_text('from tests.compare.compare_test import setup\n')
  for name, layout in layouts().items():
    (tmp_path / f'{name}.toml').write_text(layout.to_toml())
  return tmp_path


def run(capsys, *arguments):
  code = cli.main([*map(str, arguments)])
  captured = capsys.readouterr()
  return code, captured.out, captured.err


def test_compare_from_the_command_line(project, capsys):
  arguments = ['compare', 'my_model:setup', 'data.toml', 'fsdp.toml', '--target', TARGET]
  code, out, err = run(capsys, *arguments)
  assert code == 0 and 'fsdp' in out and not err
  code, out, err = run(capsys, *arguments, '--json', '--fail-if-over', '400KiB')
  assert json.loads(out)['target'] == TARGET
  assert (
    code == 1 and err.startswith('FAILED data: ') and 'the limit is 400 KiB' in err and 'fsdp' not in err
  )
  code, out, err = run(capsys, *arguments, '--fail-if-replicated', 'params/.*', '10KiB')
  assert code == 1
  assert err.splitlines() == [
    'FAILED data: params/blocks/down (48 KiB) is replicated',
    'FAILED data: params/blocks/up (48 KiB) is replicated',
  ]


def test_a_function_that_returns_no_train_step(project, capsys):
  (project / 'their_model.py').write_text(
    'def tuple_():\n  return 1, 2\ndef dict_():\n  return {"step": 1}\n'
  )
  for name, kind in (('tuple_', 'tuple'), ('dict_', 'dict')):
    code, _, err = run(capsys, 'explain', f'their_model:{name}', 'data.toml')
    assert code == 2 and err == dedent(f"""\
      their_model:{name} returned {kind}, not a training step.
      Fix: name an explore.TrainStep, or a function that returns one or its fields, (step, create, batch).
      """)


def test_a_train_step_of_a_module(project, capsys):
  (project / 'steps.py').write_text(
    'from tests.compare.compare_test import setup\ntrain = setup()\nlayouts = {}\n'
  )
  code, out, _ = run(capsys, 'explain', 'steps:train', 'fsdp.toml')
  assert code == 0 and 'params/blocks/up' in out
  assert run(capsys, 'explain', 'steps:layouts', 'fsdp.toml')[2] == dedent("""\
    steps:layouts is dict, not a training step.
    Fix: name an explore.TrainStep, or a function that returns one or its fields, (step, create, batch).
    """)


def test_an_attribute_error_of_a_module_is_its_own(project, capsys):
  (project / 'broken.py').write_text('import jax\njax.nosuchname\n')
  code, _, err = run(capsys, 'explain', 'broken:setup', 'data.toml')
  assert code == 3 and 'broken.py", line 2' in err and 'cannot be imported' not in err


def test_layout_files_of_one_name(project, capsys):
  files = []
  for name in layouts():
    (project / name).mkdir()
    files.append(f'{name}/layout.toml')
    (project / f'{name}.toml').rename(project / files[-1])
  code, out, _ = run(capsys, 'compare', 'my_model:setup', *files, '--target', TARGET, '--json')
  assert code == 0 and [each['name'] for each in json.loads(out)['layouts']] == files


def test_a_function_that_returns_a_tuple(project, capsys):
  (project / 'tuples.py').write_text(
    'from tests.compare.compare_test import setup\ndef parts():\n  return tuple(setup())[:3]\n'
  )
  code, out, _ = run(capsys, 'explain', 'tuples:parts', 'tensor.toml')
  assert code == 0 and 'params/blocks/up' in out


def test_report_from_the_command_line(project, capsys):
  code, out, _ = run(
    capsys, 'report', 'my_model:setup', 'data.toml', '--target', TARGET, '--to', 'a.html'
  )
  assert (code, out) == (0, 'Wrote a.html\n')
  assert 'data' in read(project / 'a.html').texts


def test_explain_from_the_command_line(project, capsys):
  code, out, _ = run(capsys, 'explain', 'my_model:setup', 'tensor.toml')
  assert code == 0 and 'params/blocks/up' in out
  code, _, err = run(capsys, 'explain', 'my_model:setup', 'tensor.toml', '--fail-if-over', '1KiB')
  assert code == 1 and err.startswith('FAILED tensor.toml: ')


def test_a_mesh_axis_of_size_minus_one_needs_the_number_of_devices(project, capsys):
  (project / 'open.toml').write_text(layouts()['data'].to_toml().replace('data = 8', 'data = -1'))
  code, _, err = run(capsys, 'explain', 'my_model:setup', 'open.toml')
  assert (code, err) == (
    2,
    "open.toml: A mesh axis has size -1: {'data': -1}.\nFix: pass the number of devices as --devices.\n",
  )
  code, out, _ = run(capsys, 'explain', 'my_model:setup', 'open.toml', '--devices', '16')
  assert code == 0 and "{'data': 16}" in out
  code, out, _ = run(capsys, 'compare', 'my_model:setup', 'open.toml', '--target', TARGET, '--json')
  assert code == 0 and json.loads(out)['target'] == TARGET


def test_targets_from_the_command_line(capsys):
  code, out, _ = run(capsys, 'targets')
  assert code == 0 and "'cpu:8'" in out and 'compiler installed' in out and 'scaling-book' in out


def test_bad_arguments(project, capsys):
  code, _, err = run(capsys, 'compare', 'my_model:nothing', 'data.toml', '--target', TARGET)
  assert code == 2 and err.startswith('my_model:nothing cannot be imported: ')
  code, _, err = run(capsys, 'compare', 'my_model:setup', 'no.toml', '--target', TARGET)
  assert (code, err) == (
    2,
    'no.toml cannot be read: No such file or directory.\nFix: pass a layout file (TOML).\n',
  )
  (project / 'bad.toml').write_text('format = 1\n[mesh\n')
  code, _, err = run(capsys, 'compare', 'my_model:setup', 'bad.toml', '--target', TARGET)
  assert code == 2 and err.startswith('bad.toml: ') and 'line 2' in err
  (project / 'axis.toml').write_text(layouts()['data'].to_toml().replace('data = 8', 'dta = 8'))
  code, _, err = run(capsys, 'explain', 'my_model:setup', 'axis.toml')
  assert code == 2 and err.startswith("axis.toml: Rule 0 ('batch', 'data') uses mesh axis 'data'")
  (project / 'bytes.toml').write_bytes(b'\xff\xfe')
  for options in (['bytes.toml'], ['data.toml', '--hardware', 'bytes.toml']):
    code, _, err = run(capsys, 'compare', 'my_model:setup', *options, '--target', TARGET)
    assert code == 2 and err.startswith(
      "bytes.toml cannot be read: 'utf-8' codec can't decode byte 0xff"
    )
  code, _, err = run(capsys, 'compare', 'my_model:setup', 'data.toml', '--target', 'v9:8')
  assert code == 2 and err.startswith("There is no target 'v9:8'.")
  for wrong in (
    ['compare', 'model', 'a.toml', '--target', TARGET],
    ['explain', 'a:b', 'c', '--fail-if-over', 'x'],
  ):
    with pytest.raises(SystemExit):
      cli.main(wrong)


# -- golden layouts


def test_golden_layouts(tmp_path, monkeypatch):
  file, layout = tmp_path / 'layout.txt', layouts()['fsdp']
  state = layout.abstract(create)
  with pytest.raises(AssertionError, match='has been written'):
    spmd.testing.assert_layout(layout, state, file)
  spmd.testing.assert_layout(layout, state, file)
  other = layouts()['data']
  with pytest.raises(AssertionError) as caught:
    spmd.testing.assert_layout(other, other.abstract(create), file)
  text = str(caught.value)
  assert "-params/blocks/up float32[layers=3, embed=32, mlp=128] P(None, 'data', None) 6144" in text
  assert text.endswith('Fix: if the change is intended, run the test with FLAX_SPMD_UPDATE=1.')
  monkeypatch.setenv('FLAX_SPMD_UPDATE', '1')
  spmd.testing.assert_layout(other, other.abstract(create), file)
  monkeypatch.delenv('FLAX_SPMD_UPDATE')
  spmd.testing.assert_layout(other, other.abstract(create), file)


def test_user_chips_from_a_path(tmp_path):
  chip = spmd.explore.chips()['cpu']._asdict() | {'memory': 2**20, 'source': 'mine'}
  fields = {name: value for name, value in chip.items() if value and name not in ('name', 'flops')}
  lines = [f'{name} = {json.dumps(value)}' for name, value in fields.items()]
  (tmp_path / 'mine.toml').write_text('\n'.join(['[mine]', *lines, 'flops = {bf16 = 1e12}']))
  given = {'data': layouts()['data']}
  outcome = compare(setup(), given, 'mine:8', hardware=tmp_path / 'mine.toml')['data']
  assert outcome.error is None and outcome.cost.compute > 0
