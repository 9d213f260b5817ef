"""`python -m g4patch`."""

from g4patch.cli import entry

if __name__ == "__main__":
    entry()
