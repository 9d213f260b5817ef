"""An interpreter of MIL, the programs inside `.mlpackage` bundles, in numpy: it proves a patched one off a Mac."""

from g4patch.runtimes.mil.interpreter import Interpreter, run
from g4patch.runtimes.mil.probe import MilProbe
from g4patch.runtimes.mil.program import Function, read_function
from g4patch.runtimes.mil.weights import Weights

__all__ = ["Function", "Interpreter", "MilProbe", "Weights", "read_function", "run"]
