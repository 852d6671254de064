"""The site, built by `nox -s docs`.

Its source is the repository itself: guides, how-tos, benchmarks, changelog, each page at its own path. So a link
between two of them is the same in the repository and on the site. The outputs of guides come from `execute.py`.
"""

import importlib.metadata
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

project = 'flax_spmd'
author = 'the authors of flax_spmd'
release = version = importlib.metadata.version('flax-spmd')
language = 'en'

root_doc = 'docs/index'
include_patterns = [
  'docs/**.md',
  'docs/**.rst',
  'guides/*.md',
  'benchmarks/*.md',
  'CHANGELOG.md',
  'CONTRIBUTING.md',
]
exclude_patterns = ['docs/_build', '.*', 'build', 'dist', 'tests', 'flax_spmd']
extensions = [
  'myst_nb',
  'sphinx.ext.autodoc',
  'sphinx.ext.autosummary',
  'sphinx.ext.napoleon',
  'docstrings',
]

# Pages with cells: executed before, two at a time, and taken from the cache here.
nb_execution_mode = 'cache'
nb_execution_cache_path = str(HERE / '_build' / 'executed')
nb_execution_timeout = 300
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_merge_streams = True
myst_heading_anchors = 3
myst_enable_extensions = ['colon_fence', 'attrs_block']

# The reference, from docstrings.
autosummary_generate = False
autodoc_member_order = 'bysource'
autodoc_preserve_defaults = True
autodoc_typehints = 'signature'
autodoc_typehints_format = 'short'
autoclass_content = 'class'
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
toc_object_entries_show_parents = 'hide'

# Nothing is loaded from elsewhere: no fonts, no scripts; search is Sphinx's own index.
html_theme = 'furo'
html_title = 'flax_spmd'
html_static_path = ['static']
html_css_files = ['site.css']
html_extra_path = ['redirect']
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {'navigation_with_keys': True}
pygments_style = 'friendly'
pygments_dark_style = 'monokai'
