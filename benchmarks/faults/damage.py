"""Damage: bits of files change, files are cut, emptied, missing or swapped; verify and restore find it, and agree.

Every file is harmed in every way, HEAD and MANIFEST included. Damage is reported with the name of the file, and with the
name of an array if the values of an array are concerned. Only in HEAD some bytes are of no consequence.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator, Sequence

from faults.examinations import expect_agreement, number_at
from faults.known_states import Size, layout, state_of
from faults.places import Place
from faults.tally import Harm, Outcome, Tally
from flax_spmd import checkpoint, errors

STORES = ('disk', 'gcs', 's3')
RUNS = {'disk': 110, 'gcs': 20, 's3': 20}
SIZE = Size(4, 64, 3)
KINDS = {'plain': {}, 'compressed': {'compress': True}, 'packed': {'pack': 1 << 20}}
HARMS: dict[str, Callable[[bytes], bytes | None]] = {
  'gone': lambda data: None,
  'halved': lambda data: data[: len(data) // 2],
  'one byte short': lambda data: data[:-1],
  'emptied': lambda data: b'',
  'longer': lambda data: data + b'\0',
}
_ARRAY = re.compile(r'\b([ws]\d|step)\b')

MUTABLE = ('HEAD',)  # changes while a checkpoint is in use, so that parts of it are of no consequence

Harmed = dict[str, bytes | None]


def run(place: Place, runs: int) -> Iterator[Outcome]:
  for kind, options in KINDS.items():
    path = place.new(f'damage {kind}')
    checkpoint.save(path, state_of(1, SIZE), layout=layout(), **options)
    whole = {name: place.read(path, name) for name in place.files(path)}
    for campaign, faults in (
      (f'bit flips: {kind}', _flips(whole, runs, random.Random(kind))),
      (f'files cut or gone: {kind}', _cuts(whole)),
      (f'files swapped: {kind}', _swaps(whole, runs // 4 or 1, random.Random(kind))),
    ):
      tally = Tally(campaign, place.store)
      for fault, harmed in faults:
        tally.trial(fault, functools.partial(_trial, place, path, whole, harmed))
      yield tally.outcome()
    place.clear(path)


def _flips(whole: dict[str, bytes], runs: int, drawn: random.Random) -> Iterator[tuple[str, Harmed]]:
  """One bit of a file in turn, at a random place."""
  names = [name for name, data in whole.items() if data]
  for run_ in range(runs):
    name = names[run_ % len(names)]
    data = bytearray(whole[name])
    place, bit = drawn.randrange(len(data)), drawn.randrange(8)
    data[place] ^= 1 << bit
    yield f'bit {bit} of byte {place} of {name}', {name: bytes(data)}


def _cuts(whole: dict[str, bytes]) -> Iterator[tuple[str, Harmed]]:
  for name, data in whole.items():
    for harm, change in HARMS.items():
      if change(data) != data:
        yield f'{harm}: {name}', {name: change(data)}


def _swaps(whole: dict[str, bytes], runs: int, drawn: random.Random) -> Iterator[tuple[str, Harmed]]:
  names = [*whole]
  for _ in range(runs):
    one, two = drawn.sample(names, 2)
    if whole[one] != whole[two]:
      yield f'swapped: {one} and {two}', {one: whole[two], two: whole[one]}


def _trial(place: Place, path: str, whole: dict[str, bytes], harmed: Harmed) -> str:
  for name, data in harmed.items():
    place.remove(path, name) if data is None else place.write(path, name, data)
  try:
    reading, of_arrays = expect_agreement(path, SIZE), _concerns_arrays(path, [*harmed])
  finally:
    for name in harmed:
      place.write(path, name, whole[name])
  if reading.found is None:
    if not all(name.rpartition('/')[2] in MUTABLE for name in harmed):
      raise Harm('not found, though harmless')
    return 'harmless'
  for reader, text in (('verify', reading.found), ('restore', reading.refused or '')):
    _expect_names(reader, text, [*harmed], of_arrays)
  return 'found'


def _concerns_arrays(path: str, files: Sequence[str]) -> bool:
  """Whether values of arrays are lost: a restore without checks refuses, or returns others."""
  if not all('/d/' in file for file in files):
    return False
  try:
    number_at(path, SIZE, verify=False)
  except (Harm, errors.CheckpointError):
    return True
  return False


def _expect_names(reader: str, text: str, files: Sequence[str], of_arrays: bool) -> None:
  """A file of the damage is named, and an array if values of arrays are concerned.

  Raises:
    Harm: not so.
  """
  if not any(file.rsplit('/', 1)[-1] in text for file in files):
    raise Harm(f'{reader} names no file: {text}')
  if of_arrays and not _ARRAY.search(text):
    raise Harm(f'{reader} names no array: {text}')
