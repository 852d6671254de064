"""Lost servers."""
from __future__ import annotations
STORES=('gcs','s3')
RUNS={'gcs':4,'s3':4}
def run(place, runs): return iter(())
