"""The public names of `import flax_spmd`, and the cost of importing it."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import flax.linen as nn

import flax_spmd as spmd

DROP_IN = {
  'LogicallyPartitioned',
  'PARTITION_NAME',
  'Partitioned',
  'RulesFallback',
  'add_axis',
  'get_logical_axis_rules',
  'get_partition_spec',
  'get_sharding',
  'is_axis_metadata',
  'logical_axis_rules',
  'logical_to_mesh',
  'logical_to_mesh_axes',
  'logical_to_mesh_sharding',
  'map_axis_meta',
  'remat_scan',
  'remove_axis',
  'replace_boxed',
  'set_logical_axis_rules',
  'unbox',
  'with_logical_constraint',
  'with_logical_partitioning',
  'with_partitioning',
}
OWN = {
  'DataShard',
  'EvenBatch',
  'AxisMetadata',
  'Decision',
  'Drawing',
  'Explanation',
  'Layout',
  'Leaf',
  'Plan',
  'Policies',
  'ProgramExplanation',
  'ReshardPlan',
  'Resolution',
  'Rules',
  'abstract_mesh',
  'constrain',
  'draw',
  'even_batches',
  'explain',
  'fsdp',
  'gather',
  'host',
  'make_mesh',
  'names_for',
  'optimizer_over',
  'prefetch',
  'with_names',
  'with_sharding_annotation',
  'with_sharding_constraint',
}
LAZY = {
  'checkpoint',
  'compare',
  'errors',
  'explore',
  'pipeline',
  'presets',
  'search',
  'testing',
  'tracking',
  'translate',
}  # imported at first use; compare and search are functions of explore


def test_the_public_names():
  """Adding or removing a public name is a decision, recorded here."""
  assert set(dir(spmd)) == DROP_IN | OWN | LAZY
  assert all(hasattr(spmd, name) for name in dir(spmd))


def test_modules_loaded_later_are_not_listed():
  code = (
    'import flax_spmd, flax_spmd.cli, flax_spmd.demo.run, flax_spmd.checkpoint; print(*dir(flax_spmd))'
  )
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert set(done.stdout.split()) == DROP_IN | OWN | LAZY


def test_public_objects_have_public_modules():
  for module in (spmd, spmd.checkpoint, spmd.explore, spmd.pipeline, spmd.tracking, spmd.translate):
    for name in set(dir(module)) - {'AxisMetadata', 'RulesFallback'}:  # Flax's own
      thing = getattr(module, name)
      if name[0] != '_' and (inspect.isclass(thing) or inspect.isfunction(thing)):
        homes = {module.__name__, 'flax_spmd'} if name in ('compare', 'search') else {module.__name__}
        assert thing.__module__ in homes, name


def test_facades_contain_only_imports():
  for module in (spmd.checkpoint, spmd.explore, spmd.pipeline, spmd.tracking, spmd.translate):
    docstring, *rest = ast.parse(Path(module.__file__).read_text()).body
    assert isinstance(docstring, ast.Expr) and all(isinstance(node, ast.ImportFrom) for node in rest)


def test_every_public_object_is_documented():
  undocumented = [
    name for name in sorted(DROP_IN | OWN - {'PARTITION_NAME'}) if not getattr(spmd, name).__doc__
  ]
  assert not undocumented


def test_the_drop_in_names_exist_in_flax():
  from flax.core import meta
  from flax.linen import spmd as flax_linen_spmd

  for name in DROP_IN:
    assert hasattr(nn, name) or hasattr(flax_linen_spmd, name) or hasattr(meta, name), name


def test_only_compat_uses_private_names_of_dependencies():
  package = Path(spmd.__file__).parent
  private = re.compile(
    r'jax\._src|(from|import) jaxlib\b|flax\.core\.(lift|scope)|\.__version__|module\._context'
  )
  users = {path for path in package.rglob('*.py') if private.search(path.read_text())}
  bindings = {
    package / '_src' / 'estimate' / 'mlir',
    package / '_src' / 'mlir',
  }  # jaxlib's MLIR, and nothing else there
  assert {path.name for path in users if path.parent not in bindings} == {'compat.py'}


def test_the_core_imports_nothing_heavy():
  heavy = {'orbax', 'libtpu', 'scipy.sparse', 'scipy.linalg', 'flax_spmd._src.pipeline.pipelined'}
  code = (
    'import sys, flax.linen, optax; before = set(sys.modules); import flax_spmd; '
    f'print(sorted(before & {heavy}), sorted(set(sys.modules) & {heavy}))'
  )
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == '[] []'


def test_importing_starts_no_backend():
  """So that devices can still be emulated, or `jax.distributed` started, after it."""
  code = 'import flax_spmd, flax_spmd.checkpoint, jax; jax.config.update("jax_num_cpu_devices", 3); print(jax.device_count())'
  environment = {'PATH': '', 'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run(
    [sys.executable, '-c', code], env=environment, capture_output=True, text=True, check=True
  )
  assert done.stdout.strip() == '3'
