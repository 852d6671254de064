"""Runs the guides and the how-tos as notebooks, and keeps their outputs for the site.

    python docs/execute.py               # all of them
    python docs/execute.py scale_up      # one; or several
    python docs/execute.py --missing     # those without outputs of this code

Each runs in a process of its own, because devices are set up once per process, in an empty folder. A cell that
fails is printed with its traceback, and the exit code is 1. Outputs go into a jupyter-cache, from which
`sphinx-build` renders; those that other sources or other versions made are thrown away first.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path

from jupyter_cache import get_cache
from jupyter_cache.base import JupyterCacheAbstract, ProjectNb
from jupyter_cache.executors.utils import ExecutionResult, create_cache_bundle, single_nb_execution

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / 'docs' / '_build' / 'executed'
READER = {'name': 'myst_nb_md', 'type': 'plugin'}
TIMEOUT = 300  # seconds, for a cell


def notebooks() -> list[Path]:
  """All pages with cells; the longest first, so that none of them is alone at the end."""
  pages = [*ROOT.glob('guides/*.md'), *ROOT.glob('docs/*.md'), *ROOT.glob('docs/[a-z]*/*.md')]
  with_cells = [page for page in pages if '```{code-cell}' in page.read_text('utf-8')]
  return sorted(with_cells, key=lambda page: (page.stat().st_size, page), reverse=True)


def made_by() -> str:
  """A digest of everything that outputs depend on beside their cells: this package's sources, and versions."""
  digest = hashlib.sha256(sys.version.encode())
  for path in sorted((ROOT / 'flax_spmd').rglob('*')):
    if path.is_file() and '__pycache__' not in path.parts:
      digest.update(path.read_bytes())
  for package in ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'ipykernel'):
    digest.update(version(package).encode())
  return digest.hexdigest()


def fresh_cache() -> JupyterCacheAbstract:
  """The cache, emptied if its outputs are of other sources."""
  note, digest = CACHE / 'made_by', made_by()
  if not note.exists() or note.read_text() != digest:
    shutil.rmtree(CACHE, ignore_errors=True)
    CACHE.mkdir(parents=True)
    note.write_text(digest)
  return get_cache(CACHE)


def run(notebook: ProjectNb) -> ExecutionResult:
  """The notebook with its outputs, or with the error that ended it."""
  with tempfile.TemporaryDirectory() as folder:
    return single_nb_execution(
      notebook.nb,
      cwd=folder,
      timeout=TIMEOUT,
      allow_errors=False,
      extra_arguments=['--IPKernelApp.log_level=ERROR'],
    )


def execute(pages: list[Path], cache: JupyterCacheAbstract) -> list[Path]:
  """Runs pages in parallel, prints the time of each, and returns those that failed."""
  failed = []
  with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
    read = {page: cache.add_nb_to_project(str(page), read_data=READER) for page in pages}
    futures = {
      pool.submit(run, cache.get_project_notebook(record.pk)): page for page, record in read.items()
    }
    for future in as_completed(futures):
      page, result = futures[future], future.result()
      print(f'{page.relative_to(ROOT)}: {result.time:.1f} s', flush=True)
      if result.err:
        print(re.sub(r'\x1b\[[\d;]*m', '', str(result.err)), flush=True)  # without colours
        failed.append(page)
        continue
      notebook = ProjectNb(read[page].pk, str(page), result.nb, [])
      bundle = create_cache_bundle(notebook, None, None, result.time, None)
      cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
  return failed


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('names', nargs='*', help='pages by their files, without `.md`; none is all')
  parser.add_argument('--missing', action='store_true', help='only those without outputs of this code')
  options = parser.parse_args()
  pages = notebooks()
  unknown = set(options.names) - {page.stem for page in pages}
  if unknown or not pages:
    parser.error(
      f'no page {", ".join(sorted(unknown))}; there are {", ".join(page.stem for page in pages)}'
    )
  pages = [page for page in pages if not options.names or page.stem in options.names]
  cache = fresh_cache()
  if options.missing:
    for page in pages:
      cache.add_nb_to_project(str(page), read_data=READER)
    unexecuted = {record.uri for record in cache.list_unexecuted()}
    pages = [page for page in pages if str(page) in unexecuted]
  start = time.perf_counter()
  failed = execute(pages, cache)
  print(f'{len(pages)} pages in {time.perf_counter() - start:.0f} s, {len(failed)} failed')
  return 1 if failed else 0


if __name__ == '__main__':
  sys.exit(main())
