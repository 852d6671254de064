"""Presets: the usual rule tables, as functions that return plain tables to print, edit and extend.

    rules = presets.fsdp_tensor_parallel(data='data', model='model')
    print(rules)

They use common names: 'batch' and 'length' for activations, 'embed', 'mlp', 'heads', 'kv', 'vocab' and
'expert' for parameters. Names that a model lacks have no effect. In a model without names, parameters are
sharded by `fsdp` in the tables that have it, and `Layout.jit` keeps the batch sharded throughout the step. The
arguments are the names of mesh axes.

`layer_names` is the table of names of Flax's own layers, which `names_for` gives a model without names.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn

from flax_spmd._src import flax_layers
from flax_spmd._src.rules.clauses import fsdp as fsdp_rule
from flax_spmd._src.rules.clauses import optimizer_over as optimizer_over_rule
from flax_spmd._src.rules.table import Rules


def data_parallel(data: Any = 'data') -> Rules:
  """Data parallelism: parameters are replicated, the batch is sharded.

  Args:
    data: mesh axis, or tuple of axes, of the batch.

  Example:
    >>> presets.data_parallel()
    Rules(('batch', 'data'))
  """
  return Rules(('batch', data))


def fsdp(data: Any = 'data', *, min_size: int = 2**20) -> Rules:
  """Fully sharded data parallelism (FSDP): parameters, gradients and optimizer state are sharded.

  Equivalent to ZeRO-3 (arXiv:1910.02054). The model needs no names.

  Args:
    data: mesh axis, or tuple of axes, of the batch and the parameters.
    min_size: smallest number of elements of a sharded parameter; smaller ones are replicated.

  Example:
    >>> presets.fsdp()
    Rules(('batch', 'data'), fsdp('data'))
  """
  return Rules(('batch', data), fsdp_rule(data, min_size=min_size))


def tensor_parallel(model: Any = 'model', data: Any = 'data') -> Rules:
  """Tensor parallelism: each pair of matrices needs one all-reduce (arXiv:1909.08053, section 3).

  Args:
    model: mesh axis of heads, hidden units and the vocabulary.
    data: mesh axis of the batch.

  Example:
    >>> presets.tensor_parallel()
    Rules(('batch', 'data'), ('vocab', 'model'), ('mlp', 'model'), ('heads', 'model'))
  """
  return Rules(('batch', data), ('vocab', model), ('mlp', model), ('heads', model))


def fsdp_tensor_parallel(data: Any = 'data', model: Any = 'model', *, min_size: int = 2**20) -> Rules:
  """Tensor parallelism over one axis, and FSDP of the remaining dimensions over the other.

  Args:
    data: mesh axis of the batch and of FSDP.
    model: as in `tensor_parallel`.
    min_size: as in `fsdp`.

  Example:
    >>> presets.fsdp_tensor_parallel()
    Rules(('batch', 'data'), ('vocab', 'model'), ('mlp', 'model'), ('heads', 'model'), fsdp('data'))
  """
  return tensor_parallel(model, data) + fsdp_rule(data, min_size=min_size)


def sequence_parallel(model: Any = 'model', data: Any = 'data') -> Rules:
  """Sequence parallelism: tensor parallelism, with the sequence sharded over the same axis in between.

  In activations with heads or hidden units, these are sharded instead of the sequence (arXiv:2205.05198,
  section 4.2.2).

  Args:
    model, data: as in `tensor_parallel`.

  Example:
    >>> presets.sequence_parallel().spec(('batch', 'length', 'embed'))
    P('data', 'model', None)
    >>> presets.sequence_parallel().spec(('batch', 'length', 'heads', 'kv'))
    P('data', None, 'model', None)
  """
  return Rules(tensor_parallel(model, data), ('length', model))


def context_parallel(context: Any = 'context', data: Any = 'data', *, min_size: int = 2**20) -> Rules:
  """Context parallelism: the sequence is sharded over its own axis, parameters by FSDP over both axes.

  Args:
    context: mesh axis of the sequence.
    data: mesh axis of the batch.
    min_size: as in `fsdp`.

  Example:
    >>> presets.context_parallel()
    Rules(('batch', 'data'), ('length', 'context'), fsdp(('data', 'context')))
  """
  return Rules(('batch', data), ('length', context), fsdp_rule((data, context), min_size=min_size))


def expert_parallel(
  expert: Any = 'expert', data: Any = 'data', model: Any = 'model', *, min_size: int = 2**20
) -> Rules:
  """Expert parallelism: sharded experts of a mixture (arXiv:2006.16668), the rest as `fsdp_tensor_parallel`.

  Args:
    expert: mesh axis of the experts; the batch is sharded over it too.
    data, model, min_size: as in `fsdp_tensor_parallel`.

  Example:
    >>> presets.expert_parallel().spec(('expert', 'embed', 'mlp'))
    P('expert', None, 'model')
  """
  inner = fsdp_tensor_parallel(data, model, min_size=min_size)
  return Rules(('expert', expert), ('batch', (data, expert)), *inner.clauses[1:])


def zero1(data: Any = 'data', *, min_size: int = 2**20) -> Rules:
  """ZeRO-1 (arXiv:1910.02054): the optimizer state is sharded over the data axis, parameters are not.

  With rules for names or paths, `presets.zero1() + rules`, parameters are sharded by these, and the optimizer
  state by these and over the data axis.

  Args:
    data: mesh axis of the batch and the optimizer state.
    min_size: smallest number of elements of a sharded array; smaller ones are replicated.

  Example:
    >>> presets.zero1()
    Rules(('batch', 'data'), optimizer_over('data'))
  """
  return Rules(('batch', data), optimizer_over_rule(data, min_size=min_size))


def zero2(data: Any = 'data', *, min_size: int = 2**20) -> Rules:
  """ZeRO-2: ZeRO-1 with sharded gradients, which the step has to annotate.

  In the step: `grads = with_sharding_annotation(grads, 'gradients')`.

  Args:
    data, min_size: as in `zero1`.

  Example:
    >>> presets.zero2().clauses[-1]
    ('@gradients', optimizer_over('data'))
  """
  return Rules(
    zero1(data, min_size=min_size), ('@gradients', optimizer_over_rule(data, min_size=min_size))
  )


def zero3(data: Any = 'data', *, min_size: int = 2**20) -> Rules:
  """ZeRO-3: parameters, gradients and optimizer state are sharded; an alias of `fsdp`.

  Args:
    data, min_size: as in `fsdp`.

  Example:
    >>> presets.zero3() == presets.fsdp()
    True
  """
  return fsdp(data, min_size=min_size)


def hybrid_fsdp(shard: Any = 'fsdp', replicate: Any = 'replica', *, min_size: int = 2**20) -> Rules:
  """Hybrid FSDP (HSDP, arXiv:2304.11277, section 3.2.2): FSDP within a slice, replication across slices.

  Only gradients, not parameters, cross the slow network between slices. A suitable mesh:
  `make_mesh({'fsdp': 8}, dcn={'replica': 2})`.

  Args:
    shard: mesh axis within a slice.
    replicate: mesh axis across slices.
    min_size: as in `fsdp`.

  Example:
    >>> presets.hybrid_fsdp()
    Rules(('batch', ('replica', 'fsdp')), fsdp('fsdp'))
  """
  return Rules(('batch', (replicate, shard)), fsdp_rule(shard, min_size=min_size))


def layer_names() -> dict[type, dict[str, Any]]:
  """The names that `names_for` gives the arrays of Flax's own layers, Linen and NNX alike.

  Returns:
    For each type of layer, a dictionary from paths of arrays below it to logical names, one for each dimension, or to
    a function of the layer that returns them. Attention, embeddings and LayerNorm have names of transformers; in other
    layers, 'in' and 'out' are the dimensions of inputs and outputs.

  Example:
    >>> names = presets.layer_names()
    >>> names[nn.Embed], names[nn.Dense]
    ({'embedding': ('vocab', 'embed')}, {'kernel': ('in', 'out'), 'bias': ('out',)})
    >>> names[nn.MultiHeadDotProductAttention]['cached_key']
    ('batch', 'length', 'heads', 'kv')
  """
  from flax import nnx

  tables = {**flax_layers.layer_names(nn), **flax_layers.layer_names(nnx)}
  return {layer: dict(names) for layer, names in tables.items()}
