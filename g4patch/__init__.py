"""Mend exported Gemma 4 bundles whose per-layer embeddings are looked up with media token ids.

import g4patch
report = g4patch.fix(Path("bundle.mlpackage"))
print(report.outcome, report.exit_code)
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("g4patch")
except PackageNotFoundError:  # a checkout that is run from where it lies
    __version__ = "not installed"

from g4patch.engine import Options, check, fix, inspect, open_model, revert, verify_bundle
from g4patch.report import Report

__all__ = ["Options", "Report", "__version__", "check", "fix", "inspect", "open_model", "revert", "verify_bundle"]
