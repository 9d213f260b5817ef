"""`python -m g4patch`."""

from g4patch.cli import entry

entry()
