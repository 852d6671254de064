"""Flax's own layers: the logical names of their arrays, for models whose authors gave none.

    layer_names(nn)[nn.Embed]   # {'embedding': ('vocab', 'embed')}

One table serves both libraries, as the layers of Linen and of NNX name their arrays alike. The names of a layer whose
rank varies are a function of the layer. `flax.nnx` takes a second to import, so the caller does that where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, TypeVar

Names: TypeAlias = tuple[Any, ...] | None
LayerEntry: TypeAlias = Mapping[str, Names | Callable[[Any], Names]]
Entry = TypeVar('Entry')

_ATTENTION: LayerEntry = {
  **{f'{each}/kernel': ('embed', 'heads', 'kv') for each in ('query', 'key', 'value')},
  **{f'{each}/bias': ('heads', 'kv') for each in ('query', 'key', 'value')},
  **{f'{each}/{name}': ('kv',) for each in ('query_ln', 'key_ln') for name in ('scale', 'bias')},
  'out/kernel': ('heads', 'kv', 'embed'),
  'out/bias': ('embed',),
  'cached_key': ('batch', 'length', 'heads', 'kv'),
  'cached_value': ('batch', 'length', 'heads', 'kv'),
}
_DENSE: LayerEntry = {'kernel': ('in', 'out'), 'bias': ('out',)}


def layer_names(flax: ModuleType) -> dict[type, LayerEntry]:
  """The names of the arrays of each layer of `flax.linen` or `flax.nnx`, by their path below the layer."""
  entries: dict[str, LayerEntry] = {
    'Dense Linear': _DENSE,
    'DenseGeneral LinearGeneral': {'kernel': _general_kernel, 'bias': _general_bias},
    'Einsum': {'kernel': _einsum_kernel, 'bias': _einsum_bias},
    'Embed': {'embedding': ('vocab', 'embed')},
    'Conv ConvTranspose': {'kernel': _conv_kernel, 'bias': ('out',)},
    'ConvLocal': {'kernel': _conv_kernel, 'bias': _local_bias},
    'LayerNorm RMSNorm': {'scale': ('embed',), 'bias': ('embed',)},
    'BatchNorm GroupNorm InstanceNorm': dict.fromkeys(('scale', 'bias', 'mean', 'var'), ('out',)),
    'MultiHeadDotProductAttention MultiHeadAttention': _ATTENTION,
    'LoRA': {'lora_a': ('in', None), 'lora_b': (None, 'out')},
  }
  if hasattr(flax, 'compact'):  # that of NNX has two layers
    gates = (f'{gate}{of}' for gate in 'ih' for of in 'ifgo')
    entries['OptimizedLSTMCell'] = {f'{each}/{name}': _DENSE[name] for each in gates for name in _DENSE}
  return _of_library(flax, entries)


class Output(NamedTuple):
  """The result of a layer.

  Attributes:
    array: the array whose dimensions the result ends with.
    dimensions: function of the layer and of the array's rank to the positions of these dimensions; None if they are
      not the last of the result.
    is_sequence: whether a dimension between the batch and these is a length.
  """

  array: str
  dimensions: Callable[[Any, int], tuple[int, ...] | None]
  is_sequence: bool = True


_LAST = Output('kernel', lambda layer, rank: (rank - 1,))
_CONV = Output(
  'kernel', lambda layer, rank: (rank - 1 - getattr(layer, 'transpose_kernel', False),), False
)
_GENERAL = Output('kernel', lambda layer, rank: _general_result(layer, rank))
_EINSUM = Output('kernel', lambda layer, rank: _einsum_result(layer))
_EMBEDDED = Output('embedding', lambda layer, rank: (1,))
_LOGITS = Output('embedding', lambda layer, rank: (0,))


def layer_outputs(flax: ModuleType) -> dict[tuple[type, str], Output]:
  """The results of the methods of layers of `flax.linen` or `flax.nnx`. Those of others have the shardings of their arguments."""
  called = {
    'Dense Linear': _LAST,
    'DenseGeneral LinearGeneral': _GENERAL,
    'Einsum': _EINSUM,
    'Embed': _EMBEDDED,
    'Conv ConvLocal ConvTranspose': _CONV,
  }
  of_calls = {(cls, '__call__'): output for cls, output in _of_library(flax, called).items()}
  return {**of_calls, **{(cls, 'attend'): _LOGITS for cls in _of_library(flax, {'Embed': _LOGITS})}}


def _of_library(flax: ModuleType, entries: Mapping[str, Entry]) -> dict[type, Entry]:
  """The entries of the classes that a library has, by their names in either."""
  pairs = ((name, entry) for names, entry in entries.items() for name in names.split())
  return {getattr(flax, name): entry for name, entry in pairs if hasattr(flax, name)}


def nnx_shape(layer: Any, name: str) -> tuple[int, ...]:
  """The shape that an array has in a single layer of `flax.nnx`, by the fields of the layer."""
  inputs, outputs, normalized = (
    tuple(_sequence(getattr(layer, field, ())))
    for field in ('in_features', 'out_features', 'num_features')
  )
  batch = tuple(getattr(layer, 'batch_axis', {}).values())
  if name == 'kernel':
    return getattr(layer, 'kernel_shape', None) or (*batch, *inputs, *outputs)
  if name == 'embedding':
    return layer.num_embeddings, layer.features
  return normalized or tuple(getattr(layer, 'bias_shape', None) or ()) or (*batch, *outputs)


def _general_kernel(layer: Any) -> Names:
  """Batch dimensions, then those of the input, then those of the output; the first of each has the name."""
  inputs = getattr(layer, 'in_features', None)  # of NNX
  count = len(_sequence(layer.axis if inputs is None else inputs))
  return (*_batch(layer), 'in', *[None] * (count - 1), *_outputs(layer))


def _general_bias(layer: Any) -> Names:
  return (*_batch(layer), *_outputs(layer))


def _batch(layer: Any) -> list[None]:
  batch = getattr(layer, 'batch_dims', None)  # of Linen
  return [None] * len(_sequence(layer.batch_axis if batch is None else batch))


def _outputs(layer: Any) -> tuple[Any, ...]:
  features = getattr(layer, 'out_features', None)  # of NNX
  return ('out', *[None] * (len(_sequence(layer.features if features is None else features)) - 1))


def _conv_kernel(layer: Any) -> Names:
  """The window, then inputs and outputs; in the transpose of a convolution, outputs and inputs."""
  ends = ('out', 'in') if getattr(layer, 'transpose_kernel', False) else ('in', 'out')
  return (*[None] * len(_sequence(layer.kernel_size)), *ends)


def _local_bias(layer: Any) -> Names:
  """The places of the window, then outputs: a convolution without shared weights has a bias for each place."""
  return (*[None] * len(_sequence(layer.kernel_size)), 'out')


def _einsum_kernel(layer: Any) -> Names:
  """The first contracted dimension is an input, and the first that only the result has is an output."""
  if not layer.einsum_str:
    return None
  _, kernel, _, names = _einsum_letters(layer)
  return tuple(names.get(letter) for letter in kernel)


def _einsum_bias(layer: Any) -> Names:
  """The dimensions of the result that the kernel has."""
  if not layer.einsum_str:
    return None
  _, kernel, result, names = _einsum_letters(layer)
  return tuple(names.get(letter) for letter in result if letter in kernel)


def _einsum_letters(layer: Any) -> tuple[str, str, str, dict[str, str]]:
  """The letters of inputs, kernel and result, and the names of letters."""
  operands, result = layer.einsum_str.replace(' ', '').replace('...', '').split('->')
  inputs, kernel = operands.split(',')
  contracted = [letter for letter in kernel if letter in inputs and letter not in result]
  made = [letter for letter in kernel if letter not in inputs and letter in result]
  return (
    inputs,
    kernel,
    result,
    {**dict.fromkeys(contracted[:1], 'in'), **dict.fromkeys(made[:1], 'out')},
  )


def _general_result(layer: Any, rank: int) -> tuple[int, ...] | None:
  """The dimensions of the output; batch dimensions would be between those of the argument."""
  return None if _batch(layer) else tuple(range(rank - len(_outputs(layer)), rank))


def _einsum_result(layer: Any) -> tuple[int, ...] | None:
  """The last dimensions of the result that only the kernel has."""
  if not layer.einsum_str:
    return None
  inputs, kernel, result, _ = _einsum_letters(layer)
  made = [letter for letter in result if letter in kernel and letter not in inputs]
  return tuple(map(kernel.index, made)) if made and result.endswith(''.join(made)) else None


def _sequence(value: Any) -> Sequence[Any] | Mapping[Any, Any]:
  return (value,) if isinstance(value, int) else value
