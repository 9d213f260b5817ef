"""What a model computes of a reference: values by graph and by the name that references use, fed from the reference.

A reference of one graph uses that graph's own names; one of a whole model has names of its own, which are resolved by
what the graph is a part of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from g4patch import formats
from g4patch.feeding import admits, computed, feeds, given, parts, shaped, takes, within_reach
from g4patch.ple import GraphAnalysis
from g4patch.reference import Reference, Run
from g4patch.report import Subject
from g4patch.stages import COMBINED, IDENTITY, LOGITS, stage_of

Array = NDArray[Any]

# What came out, what was expected, and the layers whose slices both hold, where they are not all.
Pair = tuple[Array, Array, tuple[int, ...]]
Values = dict[tuple[str, str], Pair]


def values(subject: Subject, run: Run, against: Reference) -> Values:
    """What a model computes for a run, by graph and the name that references use. Raises Unavailable.

    Of several graphs, such as one for prompts and one to decode, only those are run whose inputs the run fits.
    """
    found: Values = {}
    fitting = [analysis for analysis in subject.analyses if fed(analysis, subject, run, against) is not None]
    for analysis in fitting or subject.analyses:
        if against.layers is None:
            found |= _of_graph(analysis, subject, run)
        else:
            found |= _of_stage(analysis, subject, run, against.layers)
    return found


def _of_graph(analysis: GraphAnalysis, subject: Subject, run: Run) -> Values:
    graph, wanted = analysis.graph.name, _wanted(analysis, run)
    if not wanted:
        return {}
    arrays = formats.of(subject.model).probe(subject.model, graph).run(run.inputs, list(dict.fromkeys(wanted.values())))
    return {
        (graph, name): (shaped(analysis, name, arrays[output], run.expected[name]), run.expected[name], ())
        for name, output in wanted.items()
    }


def _wanted(analysis: GraphAnalysis, run: Run) -> dict[str, str]:
    """For each expected name that a graph can compute, the value to tap."""
    wanted: dict[str, str] = {}
    lookup = analysis.lookup
    for name in run.expected:
        if name == IDENTITY and lookup is not None:
            wanted[name] = lookup.output
        elif name == COMBINED and lookup is not None and lookup.combined:
            wanted[name] = lookup.combined
        elif name in analysis.graph.outputs or name in analysis.graph.states:
            wanted[name] = name
    return wanted


def _of_stage(analysis: GraphAnalysis, subject: Subject, run: Run, layers: int) -> Values:
    stage = stage_of(analysis, subject.tokens)
    arrays = feeds(stage, given(run), subject.tokens.media)
    names = [name for name in stage.taps if name in run.expected and within_reach(stage, arrays, name)]
    if not names or stage.depth not in (None, layers) or not takes(stage, arrays.arrays):
        return {}
    found: Values = {}
    for name, array in computed(subject.model, stage, arrays, names, run.expected).items():
        slices = stage.layers if name == IDENTITY else ()
        found[analysis.graph.name, name] = (parts(stage, name, array), parts(stage, name, run.expected[name]), slices)
    return found


def fed(analysis: GraphAnalysis, subject: Subject, run: Run, against: Reference) -> Mapping[str, Array] | None:
    """What a graph is fed for a run, None where the run does not fit it."""
    if against.layers is None:
        known = all(lookup.ids_input in run.inputs for lookup in analysis.lookups)
        return run.inputs if known and admits(analysis.graph, run.inputs) else None
    stage = stage_of(analysis, subject.tokens)
    arrays = feeds(stage, given(run), subject.tokens.media)
    return arrays.arrays if takes(stage, arrays.arrays) else None


def logits(subject: Subject, against: Reference) -> dict[str, Array]:
    """What a model puts out as logits, `[1, S, V]` by run, fed from a reference. Raises Unavailable."""
    runs = [run for run in against.runs if LOGITS in run.expected]
    found = {run.name: values(subject, run, against) for run in runs}
    return {run: pair[0] for run, pairs in found.items() for (_, name), pair in pairs.items() if name == LOGITS}
