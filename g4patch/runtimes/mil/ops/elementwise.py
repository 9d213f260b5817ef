"""Ops that work element by element, with numpy's broadcasting."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from g4patch.runtimes.mil.ops.registry import op
from g4patch.runtimes.mil.types import BY_NAME, FP16, Array, ElementType, round_to_fp16
from g4patch.runtimes.mil.weights import Lazy

_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "pow": np.power,
    "floor_div": np.floor_divide,
    "mod": np.mod,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}
_UNARY: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs,
    "acos": np.arccos,
    "asin": np.arcsin,
    "atan": np.arctan,
    "ceil": np.ceil,
    "cos": np.cos,
    "cosh": np.cosh,
    "exp": np.exp,
    "exp2": np.exp2,
    "floor": np.floor,
    "logical_not": np.logical_not,
    "round": np.rint,  # halves to even
    "sign": np.sign,
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "square": np.square,
    "tan": np.tan,
    "tanh": np.tanh,
}


def _register_binary(name: str, function: Callable[[Array, Array], Array]) -> None:
    @op(name)
    def binary(x: Array, y: Array) -> Array:
        return function(x, y)


def _register_unary(name: str, function: Callable[[Array], Array]) -> None:
    @op(name)
    def unary(x: Array) -> Array:
        return function(x)


for _binary, _function in _BINARY.items():
    _register_binary(_binary, _function)
for _unary, _mapping in _UNARY.items():
    _register_unary(_unary, _mapping)


@op("real_div")
def real_div(x: Array, y: Array) -> Array:
    """Between integers the type of the result is an integer's: the quotient is cut off towards zero."""
    quotient: Array = np.true_divide(x, y)
    return quotient if x.dtype.kind == "f" else np.trunc(quotient)


@op("inverse")
def inverse(x: Array, epsilon: Array | float = 1e-4) -> Array:
    return 1 / (x + epsilon)


@op("log")
def log(x: Array, epsilon: Array | float = 1e-45) -> Array:
    return np.log(x + epsilon)


@op("rsqrt")
def rsqrt(x: Array, epsilon: Array | float = 1e-12) -> Array:
    return np.asarray(1 / np.sqrt(x + epsilon))


@op("clip")
def clip(x: Array, alpha: Array, beta: Array) -> Array:
    return np.minimum(np.maximum(x, alpha), beta)


@op("erf")
def erf(x: Array) -> Array:
    return _erf(x.astype(np.float64)).astype(np.float32)


@op("relu")
def relu(x: Array) -> Array:
    return np.maximum(x, 0)


@op("sigmoid")
def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


@op("silu")
def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


@op("softplus")
def softplus(x: Array) -> Array:
    return np.logaddexp(x, np.float32(0))


@op("gelu")
def gelu(x: Array, mode: str = "EXACT") -> Array:
    if mode == "TANH_APPROXIMATION":
        # In place: this runs on the widest activations of a decoder layer.
        inner: Array = x * x
        inner *= np.float32(0.044715)
        inner += 1
        inner *= x
        inner *= np.float32(math.sqrt(2 / math.pi))
        np.tanh(inner, out=inner)
        inner += 1
        inner *= x
        inner *= np.float32(0.5)
        return inner
    if mode == "SIGMOID_APPROXIMATION":
        return np.asarray(x / (1 + np.exp(np.float32(-1.702) * x)))
    if mode != "EXACT":
        raise ValueError(f"gelu has no mode {mode}")
    return np.multiply(x, np.float32(0.5) * (1 + erf(x * np.float32(math.sqrt(0.5)))))


def _erf(x: Array) -> Array:
    """The error function of float64. numpy has none; `math.erf` is exact and slow, so equal values are asked once."""
    values, positions = np.unique(x, return_inverse=True)
    found = np.fromiter((math.erf(value) for value in values.tolist()), np.float64, len(values))
    return found[positions].reshape(x.shape)


@op("cast", moves=True, lazy=("x",))
def cast(x: Array | Lazy, dtype: str, element: ElementType) -> Array | Lazy:
    """Floats are cut off towards zero when cast to integers; integers wrap around, as C does."""
    if dtype not in BY_NAME:
        raise ValueError(f"cast has no type {dtype}")
    if isinstance(x, Lazy):
        read = x.read
        return Lazy(x.shape, element.held, lambda rows: _converted(read(rows), element))
    return _converted(x, element)


def _converted(x: Array, element: ElementType) -> Array:
    if element.held.kind in "iu" and x.dtype.kind == "f":
        # Straight from float to a narrow integer is undefined in C where it does not fit.
        return x.astype(np.int64).astype(element.held)
    return round_to_fp16(x) if element is FP16 else x.astype(element.held, copy=False)


@op("select", moves=True)
def select(cond: Array, a: Array, b: Array) -> Array:
    return np.where(cond, a, b)


@op("identity", moves=True)
def identity(x: Array) -> Array:
    return x
