"""Progress bars in notebooks with and without ipywidgets."""

import importlib.util

import rich.console

import flax_spmd as spmd


def test_a_notebook_without_ipywidgets_shows_text(monkeypatch, capsys):
  """Where rich warns at every step, and a warning is an error here."""
  monkeypatch.setattr(rich.console, '_is_jupyter', lambda: True)
  find = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util, 'find_spec', lambda name, *a: None if name == 'ipywidgets' else find(name, *a)
  )
  batches = list(spmd.prefetch([1, 2, 3], lambda batch: batch, progress='reading'))
  out, err = capsys.readouterr()
  assert batches == [1, 2, 3] and 'reading' in err and '3/3' in err and not out
