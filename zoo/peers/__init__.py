"""The models, a module for each place that they come from. Importing the package enters all of them."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
  importlib.import_module(f'{__name__}.{_module.name}')
