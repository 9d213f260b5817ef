"""A reference from tensors that someone else made, in a `.npz` file."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.lib.npyio import NpzFile

from g4patch import reference
from g4patch.copying import Progress, refuse_existing
from g4patch.errors import BundleError
from g4patch.record import tolerances
from g4patch.record.stream import Spec, bounds_json, spec_of, streaming
from g4patch.tokens import GEMMA4_MEDIA, GEMMA4_PAD

# The array that holds the metadata: a JSON object in a string.
_METADATA = "g4patch"
# What reading an archive of strangers may raise, beside its own errors.
_MALFORMED = (OSError, ValueError, KeyError, TypeError, ArithmeticError, EOFError, RuntimeError)


def convert(source: Path, out: Path, tokens: Mapping[str, int], precision: str, progress: Progress) -> tuple[str, ...]:
    """Write the tensors of `source`, one at a time, as a reference to `out`. Returns the names of the runs.

    The arrays are named as the tensors of a reference; one more, `g4patch`, may hold the metadata as JSON, or part of
    it. Where it says nothing, the model is right, the token ids are Gemma 4's, and the tolerances of what is made
    before the layers are those of a few roundings; a tolerance of anything else must be given. `tokens` wins over both.
    Raises BundleError where that makes no reference, UsageError where `out` cannot be written.
    """
    refuse_existing(out)
    with _refused(source), _opened(source) as arrays:
        names = [name for name in arrays.files if name != _METADATA]
        if not names:
            raise ValueError("there are no tensors in it")
        specs, largest = _survey(arrays, names)
        metadata = _metadata(source, arrays, tokens)
        given = metadata.pop("tolerances", {})
        stated = {**bounds_json(_rounded(largest, given, precision)), **given}
        with streaming(out, specs, {**metadata, "tolerances": given}, progress) as stream:
            for name in names:
                stream.write(name, arrays[name])
            stream.finish({**metadata, "tolerances": stated})
    return tuple(dict.fromkeys(name.split("/", 1)[0] for name in names))


@contextmanager
def _opened(source: Path) -> Iterator[NpzFile]:
    arrays = np.load(source, allow_pickle=False)  # a pickle runs what is in it
    if not isinstance(arrays, NpzFile):
        raise ValueError("it is one array; np.savez makes files of several")
    with arrays:
        yield arrays


@contextmanager
def _refused(source: Path) -> Iterator[None]:
    """Whatever is wrong with the file is one sentence about it."""
    hint = "arrays are named RUN/input/NAME and RUN/expected/NAME, see g4patch/reference.py"
    try:
        yield
    except BundleError as error:
        reason = error.message.rpartition(" is not a reference: ")[2]
        raise BundleError(f"{source} makes no reference: {reason}", hint) from error
    except (*_MALFORMED, BadZipFile, zlib.error) as error:
        raise BundleError(f"{source} makes no reference: {error}", hint) from error


def _survey(arrays: NpzFile, names: list[str]) -> tuple[dict[str, Spec], dict[str, float]]:
    """The specs of all tensors, and the largest absolute value of each expected name."""
    specs: dict[str, Spec] = {}
    largest: dict[str, float] = {}
    for name in names:
        array = arrays[name]
        try:
            specs[name] = spec_of(array)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        _, kind, what = name.split("/", 2) if name.count("/") >= 2 else ("", "", "")
        if kind == "expected":
            largest[what] = max(largest.get(what, 0.0), tolerances.largest(array))
    return specs, largest


def _metadata(source: Path, arrays: NpzFile, tokens: Mapping[str, int]) -> dict[str, Any]:
    said = json.loads(str(arrays[_METADATA])) if _METADATA in arrays.files else {}
    if not isinstance(said, dict) or not isinstance(said.get("tolerances", {}), dict):
        raise ValueError("its g4patch array is no JSON object")
    ids = said.get("token_ids", {**GEMMA4_MEDIA, "pad": GEMMA4_PAD})
    usual = {"schema": reference.SCHEMA, "model": "right", "source": {"file": source.name}}
    return {**usual, **said, "token_ids": {**ids, **tokens}}


def _rounded(largest: Mapping[str, float], given: Mapping[str, Any], precision: str) -> dict[str, reference.Tolerance]:
    """The tolerances that nobody gave and that need no model to be known."""
    lacking = [name for name in largest if name not in given]
    if unknown := [name for name in lacking if not tolerances.is_rounded_only(name)]:
        raise ValueError(f"its g4patch array states no tolerance for {', '.join(sorted(unknown))}")
    return {name: tolerances.of_rounding(name, largest[name], tolerances.PRECISIONS[precision]) for name in lacking}
