"""narrow-ids: a cast on the way to the PLE lookup must hold every token id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from g4patch.ple import Lookup
from g4patch.report import Finding, Subject
from g4patch.tokens import TokenFacts
from g4patch.verdicts import some
from g4patch.view import Graph

if TYPE_CHECKING:
    from g4patch.rules import Rule


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """One finding for each cast that gives a lookup wrong rows; lookups that share it share the finding."""
    for analysis in subject.analyses:
        casts: dict[str, list[Lookup]] = {}
        for lookup in analysis.lookups:
            for address in lookup.judgement.narrowed:
                casts.setdefault(address, []).append(lookup)
        for address, lookups in casts.items():
            yield _finding(rule, analysis.graph, address, lookups, subject.tokens)


def _finding(rule: Rule, graph: Graph, address: str, lookups: list[Lookup], tokens: TokenFacts) -> Finding:
    cast = graph.node(address)
    ids = sorted({token for lookup in lookups for token in lookup.judgement.narrowed[address]})
    message = f"{cast.native} {address} to {cast.attributes['dtype']} cannot hold {some(ids)}: PLE reads wrong rows"
    unmasked = [modality for modality, token in tokens.media.items() if token in ids]
    also = f", and with {', '.join(unmasked)} ids masked" if unmasked else ""
    withheld = f"re-export with token ids in 32 bits up to the lookup{also}"
    nodes = (address, *(lookup.gather.address for lookup in lookups))
    return Finding(rule.id, rule.severity, message, graph.name, nodes, withheld=withheld)
