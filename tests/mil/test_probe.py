"""Lookups sliced out of a function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types

from g4patch.runtimes import Probe, Unavailable
from g4patch.runtimes.mil import MilProbe
from tests.mil.oracles import IOS17, IOS18, Array, convert, floats
from tests.mil.samples import Sample

TABLE = floats(40, 6, dtype="float16")


def probe(build: Any, inputs: dict[str, Any], **shapes: Any) -> MilProbe:
    function, weights = convert(build, inputs, IOS17)
    return MilProbe(function, weights.folder, **shapes)


def lookup(ids: Any) -> Any:
    shifted = mb.add(x=ids, y=np.int32(1), name="index")
    return mb.reshape(x=mb.gather(x=TABLE, indices=shifted, axis=0), shape=[1, 4, 2, 3], name="rows")


IDS = {"ids": np.zeros((1, 4), np.int32)}


def test_ids_are_fed_in_pieces_of_the_static_shape() -> None:
    found = probe(lookup, IDS).lookup("ids", "rows", np.arange(9))
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, TABLE[1:10])


def test_rows_go_past_what_computes_the_index() -> None:
    found = probe(lookup, IDS).table("index", "rows", np.array([39, 0, 7, 7, 1]))
    np.testing.assert_array_equal(found, TABLE[[39, 0, 7, 7, 1]])


@pytest.mark.parametrize("count", [0, 1, 4, 8])
def test_any_number_of_ids(count: int) -> None:
    assert probe(lookup, IDS).lookup("ids", "rows", np.arange(count)).shape == (count, 6)


def test_values_for_one_prompt() -> None:
    feeds = {"ids": np.array([[3, 2, 1, 0]]), "something else": np.zeros(1)}
    found = probe(lookup, IDS).run(feeds, ["index", "rows"])
    np.testing.assert_array_equal(found["index"], [[4, 3, 2, 1]])
    np.testing.assert_array_equal(found["rows"].reshape(4, 6), TABLE[[4, 3, 2, 1]])


def counter(step: Any, held: Any) -> Any:
    before = mb.read_state(input=held, name="before")
    after = mb.coreml_update_state(state=held, value=mb.add(x=before, y=step), name="after")
    return mb.add(x=mb.mul(x=before, y=np.float16(100)), y=after, name="seen")


@pytest.mark.parametrize("outputs", [["seen"], ["held"], ["held", "seen"]])
def test_states_start_as_they_are_given_and_are_values_after_the_run(outputs: list[str]) -> None:
    """From zeros, and from ones."""
    specs = {"step": mb.TensorSpec((2,), dtype=types.fp16), "held": mb.StateTensorSpec((2,), dtype=types.fp16)}
    function, weights = convert(counter, specs, IOS18)
    judge, feeds = MilProbe(function, weights.folder), {"step": np.array([3, 4])}
    empty = judge.run(feeds, outputs)
    full = judge.run({**feeds, "held": np.ones(2)}, outputs)
    assert list(empty) == list(full) == outputs
    for found, right in ((empty, {"held": [3, 4], "seen": [3, 4]}), (full, {"held": [4, 5], "seen": [104, 105]})):
        for name, array in found.items():
            np.testing.assert_array_equal(array, right[name])


def test_a_prompt_of_another_length_is_not_run() -> None:
    with pytest.raises(Unavailable, match=r"takes the shape \(1, 4\)"):
        probe(lookup, IDS).run({"ids": np.zeros((1, 5), np.int64)}, ["rows"])


def test_the_runtime_is_named() -> None:
    judge: Probe = probe(lookup, IDS)
    assert judge.runtime == f"g4patch MIL interpreter (numpy {np.__version__})"


def test_a_lookup_that_depends_on_another_input_is_not_run() -> None:
    def build(ids: Any, other: Any) -> Any:
        return mb.gather(x=TABLE, indices=mb.add(x=ids, y=other), axis=0, name="rows")

    judge = probe(build, {**IDS, "other": np.zeros((1, 4), np.int32)})
    with pytest.raises(Unavailable, match="also depends on other"):
        judge.lookup("ids", "rows", np.arange(4))


def test_an_output_that_mixes_ids_in_another_way_is_not_run_on_rows() -> None:
    def build(ids: Any) -> Any:
        found = mb.gather(x=TABLE, indices=mb.add(x=ids, y=np.int32(1), name="index"), axis=0)
        scale = mb.expand_dims(x=mb.cast(x=ids, dtype="fp16"), axes=[-1])
        return mb.mul(x=found, y=scale, name="rows")

    with pytest.raises(Unavailable, match="also depends on ids"):
        probe(build, IDS).table("index", "rows", np.arange(4))


@pytest.mark.filterwarnings("ignore:Some dimensions in the input shape are unknown")
@pytest.mark.parametrize(
    "shapes",
    [{}, {"shapes": {"ids": (1, 5)}}, {"shapes": {"ids": (2, 5)}}, {"shapes": {"ids": (1, -5)}}],
    ids=["no default", "the model's default", "not admitted", "no shape"],
)
def test_open_lengths(shapes: dict[str, Any]) -> None:
    """The reshape takes its length from the shape of the ids, which therefore are fed even past the index."""

    def build(ids: Any) -> Any:
        length = mb.slice_by_index(x=mb.shape(x=ids), begin=[1], end=[2])
        target = mb.concat(values=[np.array([1], np.int32), length, np.array([2, 3], np.int32)], axis=0)
        found = mb.gather(x=TABLE, indices=mb.add(x=ids, y=np.int32(1), name="index"), axis=0)
        return mb.reshape(x=found, shape=target, name="rows")

    judge = probe(build, {"ids": mb.TensorSpec((1, get_new_symbol()), dtype=types.int32)}, **shapes)
    np.testing.assert_array_equal(judge.lookup("ids", "rows", np.arange(12)), TABLE[1:13])
    np.testing.assert_array_equal(judge.table("index", "rows", np.arange(12)), TABLE[:12])


def test_the_default_length_is_what_is_fed() -> None:
    """Rows that depend on how many ids are fed show it."""

    def build(ids: Any) -> Any:
        length = mb.cast(x=mb.shape(x=ids), dtype="fp16")
        rows = mb.gather(x=TABLE, indices=ids, axis=0)
        return mb.add(x=mb.mul(x=rows, y=np.float16(0)), y=mb.reduce_sum(x=length, axes=[0]), name="rows")

    judge = probe(build, {"ids": mb.TensorSpec((1, get_new_symbol()), dtype=types.int32)}, shapes={"ids": (1, 5)})
    assert set(judge.lookup("ids", "rows", np.arange(5)).ravel()) == {1 + 5}


@pytest.mark.filterwarnings("ignore:Some dimensions in the input shape are unknown")
def test_shapes_that_are_too_large_are_not_fed() -> None:
    judge = probe(
        lambda ids: mb.gather(x=TABLE, indices=ids, axis=0, name="rows"),
        {"ids": mb.TensorSpec((1, get_new_symbol()), dtype=types.int32)},
        shapes={"ids": (1, 2**40)},
    )
    with pytest.raises(Unavailable, match="too large"):
        judge.lookup("ids", "rows", np.arange(5))


def test_gather_nd_and_gather_along_axis() -> None:
    def nd(ids: Any) -> Any:
        return mb.gather_nd(x=TABLE, indices=mb.expand_dims(x=ids, axes=[-1], name="index"), name="rows")

    def along(ids: Any) -> Any:
        column = mb.reshape(x=ids, shape=[4, 1])
        return mb.gather_along_axis(x=TABLE, indices=mb.tile(x=column, reps=[1, 6], name="index"), axis=0, name="rows")

    rows: Array = np.array([5, 39, 0, 2, 2])
    for build in (nd, along):
        judge = probe(build, IDS)
        np.testing.assert_array_equal(judge.lookup("ids", "rows", rows), TABLE[rows])
        np.testing.assert_array_equal(judge.table("index", "rows", rows), TABLE[rows])


@pytest.mark.parametrize("name", ["coreml-fp16", "coreml-ios16", "coreml-cast16"])
def test_samples(name: str) -> None:
    """All rows of the table, by ids and by index, come out once each and alike."""
    sample = Sample(name)
    ids = np.arange(320)
    by_id, by_row = (
        sample.probe.lookup("input_ids", sample.rows, ids),
        sample.probe.table(sample.index, sample.rows, ids),
    )
    np.testing.assert_array_equal(by_id, by_row)
    assert len(np.unique(by_id, axis=0)) == 320


def test_a_missing_weight_file_is_an_error_only_when_it_is_read(tmp_path: Path) -> None:
    sample = Sample("coreml-fp32")
    judge = MilProbe(sample.function, tmp_path)
    np.testing.assert_array_equal(judge.lookup("input_ids", "input_ids", np.arange(8)).reshape(-1), np.arange(8))
