"""Logical-axis partitioning for Flax Linen: name a model's axes once, shard it by a rule table.

    import flax_spmd as spmd

    w = self.param('w', spmd.with_logical_partitioning(init, ('embed', 'hidden')), shape)
    layout = spmd.Layout({'data': 2, 'model': 4}, rules=(('batch', 'data'), ('hidden', 'model')))
    state = layout.init(create_state, key, x)
    step = layout.jit(train_step, donate_argnums=0)
    print(spmd.explain(layout, state))

The names of `flax.linen.spmd` are included, with the same signatures and results.
"""

import importlib
import typing

from flax_spmd import errors as errors
from flax_spmd import presets as presets
from flax_spmd._src.active_layout import get_logical_axis_rules as get_logical_axis_rules
from flax_spmd._src.active_layout import logical_axis_rules as logical_axis_rules
from flax_spmd._src.active_layout import set_logical_axis_rules as set_logical_axis_rules
from flax_spmd._src.constraints import RulesFallback as RulesFallback
from flax_spmd._src.constraints import constrain as constrain
from flax_spmd._src.constraints import with_logical_constraint as with_logical_constraint
from flax_spmd._src.data.data_shard import DataShard as DataShard
from flax_spmd._src.data.even_batches import EvenBatch as EvenBatch
from flax_spmd._src.data.even_batches import even_batches as even_batches
from flax_spmd._src.data.gather import gather as gather
from flax_spmd._src.data.prefetch import prefetch as prefetch
from flax_spmd._src.draw.drawing import Drawing as Drawing
from flax_spmd._src.draw.drawing import draw as draw
from flax_spmd._src.explanation import Explanation as Explanation
from flax_spmd._src.explanation import explain as explain
from flax_spmd._src.jit.program_explanation import ProgramExplanation as ProgramExplanation
from flax_spmd._src.jit.tree_constraints import with_sharding_annotation as with_sharding_annotation
from flax_spmd._src.jit.tree_constraints import with_sharding_constraint as with_sharding_constraint
from flax_spmd._src.layout import Layout as Layout
from flax_spmd._src.mesh import abstract_mesh as abstract_mesh
from flax_spmd._src.mesh import make_mesh as make_mesh
from flax_spmd._src.names.box_trees import add_axis as add_axis
from flax_spmd._src.names.box_trees import is_axis_metadata as is_axis_metadata
from flax_spmd._src.names.box_trees import map_axis_meta as map_axis_meta
from flax_spmd._src.names.box_trees import remove_axis as remove_axis
from flax_spmd._src.names.box_trees import replace_boxed as replace_boxed
from flax_spmd._src.names.box_trees import unbox as unbox
from flax_spmd._src.names.boxes import PARTITION_NAME as PARTITION_NAME
from flax_spmd._src.names.boxes import AxisMetadata as AxisMetadata
from flax_spmd._src.names.boxes import LogicallyPartitioned as LogicallyPartitioned
from flax_spmd._src.names.boxes import Partitioned as Partitioned
from flax_spmd._src.names.boxes import with_logical_partitioning as with_logical_partitioning
from flax_spmd._src.names.boxes import with_partitioning as with_partitioning
from flax_spmd._src.names.given_names import with_names as with_names
from flax_spmd._src.names.layer_names import names_for as names_for
from flax_spmd._src.names.remat_scan import remat_scan as remat_scan
from flax_spmd._src.names.specs import get_partition_spec as get_partition_spec
from flax_spmd._src.names.specs import get_sharding as get_sharding
from flax_spmd._src.names.specs import logical_to_mesh as logical_to_mesh
from flax_spmd._src.names.specs import logical_to_mesh_axes as logical_to_mesh_axes
from flax_spmd._src.names.specs import logical_to_mesh_sharding as logical_to_mesh_sharding
from flax_spmd._src.reshard.reshard_plan import ReshardPlan as ReshardPlan
from flax_spmd._src.rules.clauses import Leaf as Leaf
from flax_spmd._src.rules.clauses import fsdp as fsdp
from flax_spmd._src.rules.clauses import host as host
from flax_spmd._src.rules.clauses import optimizer_over as optimizer_over
from flax_spmd._src.rules.decisions import Decision as Decision
from flax_spmd._src.rules.decisions import Policies as Policies
from flax_spmd._src.rules.decisions import Resolution as Resolution
from flax_spmd._src.rules.table import Rules as Rules
from flax_spmd._src.state_plan import Plan as Plan

__version__ = '0.1.0'

if typing.TYPE_CHECKING:
  from flax_spmd import checkpoint as checkpoint
  from flax_spmd import explore as explore
  from flax_spmd import pipeline as pipeline
  from flax_spmd import testing as testing
  from flax_spmd import translate as translate
  from flax_spmd._src.compare.compare import compare as compare
  from flax_spmd._src.search.search import search as search

_LAZY = {
  'checkpoint': '',
  'compare': 'explore',
  'explore': '',
  'pipeline': '',
  'search': 'explore',
  'testing': '',
  'tracking': '',
  'translate': '',
}  # imported on first use: Orbax alone takes 0.3 s


if not typing.TYPE_CHECKING:  # for a type checker, it would make every misspelt name a public one

  def __getattr__(name: str) -> object:
    if name not in _LAZY:
      raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    module = importlib.import_module(f'flax_spmd.{_LAZY[name] or name}')
    return getattr(module, name) if _LAZY[name] else module


_PUBLIC = sorted({name for name in globals() if name[0] != '_'} - {'importlib', 'typing'} | _LAZY.keys())


def __dir__() -> list[str]:
  return _PUBLIC
