"""Matrix products, convolution and attention against coremltools' value inference and onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb

from tests.mil.oracles import IOS16, IOS18, check, floats, interpret, ints, onnx_run, same


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
def test_linear(shape: tuple[int, ...], dtype: str) -> None:
    weight, bias = floats(7, 5, seed=1, dtype=dtype), floats(7, seed=2, dtype=dtype)
    check(lambda x: mb.linear(x=x, weight=weight, bias=bias), {"x": floats(*shape, dtype=dtype)}, IOS16, ulps=8)


def test_linear_without_bias() -> None:
    weight = floats(4, 5, seed=1)
    same(interpret(lambda x: mb.linear(x=x, weight=weight), {"x": floats(3, 5)}), [floats(3, 5) @ weight.T])


def test_linear_with_a_weight_of_many_blocks() -> None:
    """More elements than are decoded at once, and a last block that is not full."""
    weight = floats(3001, 700, seed=1, dtype="float16")
    x = floats(2, 700)
    (wanted,) = onnx_run("MatMul", [x, weight.astype(np.float32).T.copy()])

    def build(x: Any) -> Any:
        return mb.cast(x=mb.linear(x=mb.cast(x=x, dtype="fp16"), weight=weight), dtype="fp32")

    (found,) = interpret(build, {"x": x.astype(np.float16).astype(np.float32)}, IOS16)
    np.testing.assert_allclose(found, wanted, atol=0.1)


@pytest.mark.parametrize(
    ("x", "y", "arguments"),
    [
        ((2, 3, 4), (4, 5), {}),
        ((2, 3, 4), (2, 5, 4), {"transpose_y": True}),
        ((2, 4, 3), (1, 4, 5), {"transpose_x": True}),
        ((1, 2, 4, 3), (5, 2, 6, 4), {"transpose_x": True, "transpose_y": True}),
    ],
)
def test_matmul(x: tuple[int, ...], y: tuple[int, ...], arguments: dict[str, bool]) -> None:
    check(lambda x, y: mb.matmul(x=x, y=y, **arguments), {"x": floats(*x), "y": floats(*y, seed=1)}, ulps=8)


@pytest.mark.parametrize("transpose", [False, True])
def test_matmul_with_a_stored_operand(transpose: bool) -> None:
    y = floats(*((6, 4) if transpose else (4, 6)), seed=1)
    check(lambda x: mb.matmul(x=x, y=y, transpose_y=transpose), {"x": floats(2, 3, 4)}, ulps=8)


def test_matmul_of_integers() -> None:
    check(lambda x, y: mb.matmul(x=x, y=y), {"x": ints(-9, 9, 3, 4), "y": ints(-9, 9, 4, 2)})


def test_einsum() -> None:
    def build(x: Any, y: Any) -> Any:
        return mb.einsum(values=(x, y), equation="nchw,nwhu->nchu")

    check(build, {"x": floats(2, 3, 4, 5), "y": floats(2, 5, 4, 6, seed=1)}, ulps=8)


CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "1x1": ((1, 6, 1, 5), (4, 6, 1, 1), {}, {}),
    "strides": ((2, 3, 9, 8), (4, 3, 3, 2), {"strides": [2, 3]}, {"strides": [2, 3]}),
    "dilations": ((1, 3, 9, 9), (2, 3, 3, 2), {"dilations": [2, 3]}, {"dilations": [2, 3]}),
    "groups": ((1, 6, 7, 7), (4, 3, 3, 3), {"groups": 2}, {"group": 2}),
    "depthwise": ((1, 4, 7, 7), (4, 1, 3, 3), {"groups": 4}, {"group": 4}),
    "custom": (
        (1, 2, 6, 6),
        (3, 2, 3, 3),
        {"pad_type": "custom", "pad": [1, 0, 2, 1]},
        {"pads": [1, 2, 0, 1]},
    ),
    "same": (
        (1, 2, 7, 6),
        (3, 2, 2, 3),
        {"pad_type": "same", "strides": [2, 1]},
        {"auto_pad": "SAME_UPPER", "strides": [2, 1]},
    ),
    "same_lower": ((1, 2, 7, 6), (3, 2, 2, 3), {"pad_type": "same_lower"}, {"auto_pad": "SAME_LOWER"}),
    "one axis": ((2, 3, 9), (4, 3, 3), {"strides": [2]}, {"strides": [2]}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_conv(name: str) -> None:
    shape, kernel, ours, theirs = CONVOLUTIONS[name]
    x, weight, bias = floats(*shape), floats(*kernel, seed=1), floats(kernel[0], seed=2)
    wanted = onnx_run("Conv", [x, weight, bias], **theirs)
    same(interpret(lambda x: mb.conv(x=x, weight=weight, bias=bias, **ours), {"x": x}), wanted, ulps=16)


@pytest.mark.parametrize("mask", ["none", "float", "bool"])
def test_attention(mask: str) -> None:
    inputs = {"q": floats(1, 2, 3, 4), "k": floats(1, 2, 5, 4, seed=1), "v": floats(1, 2, 5, 6, seed=2)}
    allowed = np.tril(np.ones((3, 5), np.int32), 2)
    if mask != "none":
        inputs["m"] = floats(3, 5, seed=3) if mask == "float" else allowed

    def plain(q: Any, k: Any, v: Any) -> Any:
        return mb.scaled_dot_product_attention(query=q, key=k, value=v)

    def masked(q: Any, k: Any, v: Any, m: Any) -> Any:
        allowed = mb.greater(x=m, y=0) if mask == "bool" else m
        return mb.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=allowed)

    check(plain if mask == "none" else masked, inputs, IOS18, ulps=16)


def test_attention_against_onnxruntime() -> None:
    q, k, v = floats(1, 2, 3, 4), floats(1, 2, 5, 4, seed=1), floats(1, 2, 5, 6, seed=2)
    wanted = onnx_run("Attention", [q, k, v], opset=23)
    found = interpret(
        lambda q, k, v: mb.scaled_dot_product_attention(query=q, key=k, value=v), {"q": q, "k": k, "v": v}
    )
    same(found, wanted, ulps=16)
