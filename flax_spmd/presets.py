"""Presets: the usual layouts, as functions that return plain tables to print, edit and add to.

    rules = presets.fsdp_tensor_parallel(data='data', model='model')
    print(rules)

They use the names that most models have: 'batch' and 'length' for activations, 'embed', 'mlp', 'heads',
'kv', 'vocab' and 'expert' for parameters. A name that a model lacks costs nothing, and a model without
names is laid out by the `fsdp` in the tables that have one. Mesh axes are called as the arguments say.
"""

from __future__ import annotations

from typing import Any

from flax_spmd._src.rules.clauses import fsdp as fill
from flax_spmd._src.rules.table import Rules


def data_parallel(data: Any = 'data') -> Rules:
  """Every device has all parameters and a part of the batch.

  Args:
    data: the mesh axis, or a tuple of them, that the batch lies over.

  Example:
    >>> presets.data_parallel()
    Rules(('batch', 'data'))
  """
  return Rules(('batch', data))


def fsdp(data: Any = 'data', *, min_size: int = 2**20) -> Rules:
  """Fully sharded data parallelism: parameters, gradients and optimizer state are in pieces.

  The same as ZeRO-3 (arXiv:1910.02054); the model needs no names.

  Args:
    data: the mesh axis, or a tuple of them, that batch and parameters lie over.
    min_size: parameters with fewer elements stay whole.

  Example:
    >>> presets.fsdp()
    Rules(('batch', 'data'), fsdp('data'))
  """
  return Rules(('batch', data), fill(data, min_size=min_size))


def tensor_parallel(model: Any = 'model', data: Any = 'data') -> Rules:
  """Matrices are cut so that each pair of them needs one exchange (arXiv:1909.08053, section 3).

  Args:
    model: the mesh axis that heads, hidden units and the vocabulary lie over.
    data: the mesh axis that the batch lies over.

  Example:
    >>> presets.tensor_parallel()
    Rules(('batch', 'data'), ('vocab', 'model'), ('mlp', 'model'), ('heads', 'model'))
  """
  return Rules(('batch', data), ('vocab', model), ('mlp', model), ('heads', model))


def fsdp_tensor_parallel(data: Any = 'data', model: Any = 'model', *, min_size: int = 2**20) -> Rules:
  """Tensor parallelism over one axis; what it leaves open is fully sharded over the other.

  Args:
    data: the mesh axis that the batch and the open dimensions lie over.
    model: as in `tensor_parallel`.
    min_size: parameters with fewer elements stay whole.

  Example:
    >>> presets.fsdp_tensor_parallel()
    Rules(('batch', 'data'), ('vocab', 'model'), ('mlp', 'model'), ('heads', 'model'), fsdp('data'))
  """
  return tensor_parallel(model, data) + fill(data, min_size=min_size)


def sequence_parallel(model: Any = 'model', data: Any = 'data') -> Rules:
  """Tensor parallelism, and between its matrices the tokens of a sequence lie over the same axis.

  Where an activation has heads or hidden units, those come first and the sequence is whole
  (arXiv:2205.05198, section 4.2.2).

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
  """Long sequences in pieces: activations lie over an axis of their own, parameters over both.

  Args:
    context: the mesh axis that the sequence lies over.
    data: the mesh axis that the batch lies over.
    min_size: parameters with fewer elements stay whole.

  Example:
    >>> presets.context_parallel()
    Rules(('batch', 'data'), ('length', 'context'), fsdp(('data', 'context')))
  """
  return Rules(('batch', data), ('length', context), fill((data, context), min_size=min_size))


def expert_parallel(
  expert: Any = 'expert', data: Any = 'data', model: Any = 'model', *, min_size: int = 2**20
) -> Rules:
  """Each device has some of the experts of a mixture (arXiv:2006.16668); the rest as FSDP and tensors.

  Args:
    expert: the mesh axis that experts lie over; the batch lies over it too.
    data, model, min_size: as in `fsdp_tensor_parallel`.

  Example:
    >>> presets.expert_parallel().spec(('expert', 'embed', 'mlp'))
    P('expert', None, 'model')
  """
  inner = fsdp_tensor_parallel(data, model, min_size=min_size)
  return Rules(('expert', expert), ('batch', (data, expert)), *inner.clauses[1:])


def zero1(data: Any = 'data', *, min_size: int = 2**20) -> Rules:
  """ZeRO-1 (arXiv:1910.02054): parameters whole, the optimizer's state in pieces.

  Args:
    data: the mesh axis that the batch and the state lie over.
    min_size: arrays with fewer elements stay whole.

  Example:
    >>> presets.zero1()
    Rules(('(^|/)opt_state/', Rules(fsdp('data'))), ('batch', 'data'))
  """
  return Rules(('(^|/)opt_state/', Rules(fill(data, min_size=min_size))), ('batch', data))


def zero2(data: Any = 'data', *, min_size: int = 2**20) -> Rules:
  """ZeRO-2: as ZeRO-1, and gradients in pieces, which the step has to name.

  In the step: `grads = with_sharding_annotation(grads, 'gradients')`.

  Args:
    data, min_size: as in `zero1`.

  Example:
    >>> presets.zero2().clauses[-1]
    ('@gradients', fsdp('data'))
  """
  return Rules(zero1(data, min_size=min_size), ('@gradients', fill(data, min_size=min_size)))


def zero3(data: Any = 'data', *, min_size: int = 2**20) -> Rules:
  """ZeRO-3: everything in pieces; another name for `fsdp`.

  Args:
    data, min_size: as in `fsdp`.

  Example:
    >>> presets.zero3() == presets.fsdp()
    True
  """
  return fsdp(data, min_size=min_size)


def hybrid_fsdp(shard: Any = 'fsdp', replicate: Any = 'replica', *, min_size: int = 2**20) -> Rules:
  """HSDP (arXiv:2304.11277, section 3.2.2): in pieces within a slice, whole slices side by side.

  Parameters never travel over the slow network between slices, only gradients do. The mesh:
  `make_mesh({'fsdp': 8}, dcn={'replica': 2})`.

  Args:
    shard: the mesh axis within a slice.
    replicate: the mesh axis between slices.
    min_size: parameters with fewer elements stay whole.

  Example:
    >>> presets.hybrid_fsdp()
    Rules(('batch', ('replica', 'fsdp')), fsdp('fsdp'))
  """
  return Rules(('batch', (replicate, shard)), fill(shard, min_size=min_size))
