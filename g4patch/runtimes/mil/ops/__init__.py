"""The ops that the interpreter knows, by family. Importing a family registers its ops."""

from g4patch.runtimes.mil.ops import (  # noqa: F401
    constexpr,
    elementwise,
    indexing,
    linear,
    reduction,
    shape,
    slicing,
)
from g4patch.runtimes.mil.ops.registry import KERNELS, Kernel

__all__ = ["KERNELS", "Kernel"]
