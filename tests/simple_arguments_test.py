"""Arguments whose annotations are of numbers, text and None: every public function checks them before anything else."""

import functools
import importlib
import inspect
import re

import jax.numpy as jnp
import numpy as np
import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint, pipeline

MODULES = 'flax_spmd', 'flax_spmd.checkpoint', 'flax_spmd.explore', 'flax_spmd.pipeline'
OWN_CHECKS = {  # with fixes of their own
  ('abstract_mesh', 'devices'),
  ('with_sharding_annotation', 'name'),
  ('stage_end', 'name'),
  ('Layout.from_toml', 'text'),
  ('parse_target', 'text'),
}
SIMPLE = re.compile(r'(bool|int|float|str|None|Literal\[[^]]*\])( \| (bool|int|float|str|None))*')


def functions():
  """The public functions, classes and methods, called without an instance, by their names in errors."""
  for module in map(importlib.import_module, MODULES):
    for name, public in vars(module).items():
      if getattr(public, '__module__', None) != module.__name__ or inspect.isabstract(public):
        continue
      if not inspect.isclass(public):
        if callable(public):
          yield name, public
        continue
      if '__init__' in vars(public):
        yield name, public
      for key, value in vars(public).items():
        if not key.startswith('_') and inspect.isfunction(value):
          yield f'{name}.{key}', functools.partial(value, None)
        elif not key.startswith('_') and isinstance(value, (classmethod, staticmethod)):
          yield f'{name}.{key}', getattr(public, key)


def test_every_function_refuses_other_types():
  seen = 0
  for name, function in functions():
    for parameter in inspect.signature(function).parameters.values():
      if SIMPLE.fullmatch(str(parameter.annotation)) and (name, parameter.name) not in OWN_CHECKS:
        unusable = bytearray(b'1')
        with pytest.raises(TypeError) as caught:
          function(**{parameter.name: unusable})
        first, fix = str(caught.value).splitlines()
        assert first == f"{name}: {parameter.name} is bytearray(b'1'), of type bytearray."
        assert fix.startswith(f'Fix: pass {parameter.name} as '), fix
        seen += 1
  assert seen > 140


def test_a_text_of_the_command_line_is_named_with_the_value_that_was_meant(tmp_path):
  with pytest.raises(TypeError) as caught:
    checkpoint.save(tmp_path / 'new', {}, overwrite='False', pack='1', durable='yes', memory='4GiB')
  assert str(caught.value) == (
    "save: overwrite is 'False', of type str; pack is '1', of type str; memory is '4GiB', of type str; durable is 'yes', "
    'of type str.\n'
    'Fix: pass overwrite=False, pack=1, memory as an integer or None, durable as True or False.'
  )
  assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize('ranks', [4, 4.0, np.int8(4), np.array(4)])
def test_numbers_of_numpy_and_whole_floats_are_integers(ranks):
  assert pipeline.GPipe(ranks) == pipeline.GPipe(ranks=4) == pipeline.GPipe(ranks=ranks)


@pytest.mark.parametrize(
  'ranks', [4.5, '4', None, True, np.ones(1), np.float32(4.5), jnp.float32(4), [4]]
)
def test_others_are_none(ranks):
  with pytest.raises(TypeError, match=r'^GPipe: ranks is .+\nFix: pass ranks'):
    pipeline.GPipe(ranks)


@pytest.mark.parametrize('strict', [True, np.True_, 1])
def test_flags(strict):
  assert spmd.Layout({'data': 8}, (), strict=strict).strict
  with pytest.raises(TypeError) as caught:
    spmd.Layout({'data': 8}, (), strict='true')
  assert (
    str(caught.value) == "Layout: strict is 'true', of type str.\nFix: pass strict as True or False."
  )
