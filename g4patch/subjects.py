"""Open models and find out what their graphs do about PLE."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from g4patch import formats, sidecars, towers
from g4patch.errors import BundleError
from g4patch.formats import NOT_STAGED, Model, Staged
from g4patch.options import DEFAULTS, Options
from g4patch.ple import GraphAnalysis, analyse
from g4patch.report import Subject
from g4patch.tokens import TokenFacts, resolve


def open_model(path: Path, options: Options = DEFAULTS, staged: Staged = NOT_STAGED) -> Subject:
    """Open one model and analyse its graphs. Files in `staged` are read from there. Raises BundleError."""
    subject = subject_of(formats.load(path).open_model(path, staged), resolve(path, options.tokens))
    _refuse_contradiction(subject.analyses, subject.tokens)
    return subject


def subject_of(model: Model, tokens: TokenFacts) -> Subject:
    """An opened model, by token ids that are known."""
    if model.host_table is not None:
        tokens = tokens.within(model.host_table.table.rows)
        return Subject(model, tokens, (), host_rows=sidecars.analyse(model.host_table, tokens))
    analyses = tuple(analyse(graph, tokens) for graph in model.graphs)
    rows = [lookup.table.rows for analysis in analyses for lookup in analysis.lookups]
    if rows and (within := tokens.within(max(rows))) != tokens:
        tokens = within
        analyses = tuple(analyse(graph, tokens) for graph in model.graphs)
    # A tower looks nothing up, nor does a model without graphs: what the configuration promises is in another model.
    others = not all(towers.stands_alone(graph, tokens.patch_size) for graph in model.graphs)
    return Subject(model, tokens, analyses, bool(tokens.layer_width) and others)


def _refuse_contradiction(analyses: Sequence[GraphAnalysis], tokens: TokenFacts) -> None:
    """A graph that splices by ids none of which is a media id belongs to other token ids."""
    spliced = {token for analysis in analyses for splice in analysis.splices for token in splice.ids}
    spliced.discard(tokens.pad_id)
    media = set(tokens.media.values())
    if spliced and media and not spliced & media:
        ids = ", ".join(str(token) for token in sorted(spliced)[:3])
        source = " and ".join(tokens.sources)
        raise BundleError(
            f"the graph splices rows of id {ids}, no media id by {source}",
            "pass the model's own ids: --image-token-id, --audio-token-id, --video-token-id",
        )
