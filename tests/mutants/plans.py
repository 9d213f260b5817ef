"""Wrong plans: what a faulty rule would ask for. Each format's own writer writes them, and they fit the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from g4patch.edits import Const, GraphEdit, NewNode, Operand, Plan, Redirect, mask_ids
from g4patch.report import Subject
from g4patch.view import Op, Use
from tests.mutants import TWO_FUNCTIONS, TWO_LOOKUPS, Mutant

_PLE = "ple-raw-ids"
# A text id that every vocabulary of the samples has, and that their references feed.
TEXT_ID = 7

EditChange = Callable[[Subject, GraphEdit], GraphEdit]


def every(change: EditChange, rule: str = _PLE) -> Callable[[Subject, Plan], Plan]:
    """A plan in which each edit of a rule is changed."""

    def changed(subject: Subject, plan: Plan) -> Plan:
        return Plan(tuple(change(subject, edit) if edit.rule == rule else edit for edit in plan.graph_edits))

    return changed


def missing(subject: Subject) -> list[int]:
    """The media ids that the right mask names."""
    return list(subject.analyses[0].lookups[0].judgement.missing)


def remade(subject: Subject, edit: GraphEdit, ids: Sequence[int], pad: int = 0) -> GraphEdit:
    """The mask again, with other ids and another pad. What stands behind it stays."""
    graph = next(a.graph for a in subject.analyses if a.graph.name == edit.graph)
    at = next(number for number, node in enumerate(edit.nodes) if node.op is Op.WHERE)
    value = edit.nodes[at].operands["y"]
    assert isinstance(value, str)
    uses = [redirect.use for redirect in edit.redirects]
    nodes = (*mask_ids(graph, value, uses, ids, pad, edit.rule).nodes, *edit.nodes[at + 1 :])
    return replace(edit, nodes=nodes)


def wrong_pad(subject: Subject, edit: GraphEdit) -> GraphEdit:
    return remade(subject, edit, missing(subject), 1)


def one_id_missing(subject: Subject, edit: GraphEdit) -> GraphEdit:
    return remade(subject, edit, missing(subject)[:-1] or [5])


def off_by_one(subject: Subject, edit: GraphEdit) -> GraphEdit:
    return remade(subject, edit, [token + 1 for token in missing(subject)])


def range_swallows_eoi_and_eoa(subject: Subject, edit: GraphEdit) -> GraphEdit:
    """All ids from image to video: EOI and EOA lie between them and are text."""
    image = subject.tokens.image.id
    assert image is not None
    return remade(subject, edit, [image + step for step in range(5)])


def text_id_masked(subject: Subject, edit: GraphEdit) -> GraphEdit:
    return remade(subject, edit, [*missing(subject), TEXT_ID])


def mask_names_pad_only(subject: Subject, edit: GraphEdit) -> GraphEdit:
    """A mask that does nothing: pad reads the pad row anyway."""
    return remade(subject, edit, [subject.tokens.pad_id])


def branches_swapped(subject: Subject, edit: GraphEdit) -> GraphEdit:
    def swapped(node: NewNode) -> NewNode:
        operands: Mapping[str, Operand] = node.operands
        if node.op is not Op.WHERE:
            return node
        return replace(node, operands={**operands, "x": operands["y"], "y": operands["x"]})

    return replace(edit, nodes=tuple(map(swapped, edit.nodes)))


def _embedding(subject: Subject, edit: GraphEdit) -> Redirect:
    (embedding, *_) = subject.analyses[0].embeddings
    return Redirect(Use(embedding.address, "index"), edit.redirects[0].value)


def token_embedding_instead(subject: Subject, edit: GraphEdit) -> GraphEdit:
    return replace(edit, redirects=(_embedding(subject, edit),))


def token_embedding_as_well(subject: Subject, edit: GraphEdit) -> GraphEdit:
    return replace(edit, redirects=(*edit.redirects, _embedding(subject, edit)))


def text_id_spliced(subject: Subject, edit: GraphEdit) -> GraphEdit:
    """The splice takes rows of a text id from what was handed in."""

    def other(operand: Operand) -> Operand:
        return Const(operand.dtype, TEXT_ID) if isinstance(operand, Const) and operand.value == 0 else operand

    nodes = (replace(node, operands={key: other(o) for key, o in node.operands.items()}) for node in edit.nodes)
    return replace(edit, nodes=tuple(nodes))


def one_lookup_left(subject: Subject, plan: Plan) -> Plan:
    """Of several lookups to mask, by one edit or by several, the last stays as it was."""
    edits = plan.graph_edits
    at = max(number for number, edit in enumerate(edits) if edit.rule == _PLE)
    redirects = edits[at].redirects[:-1]
    kept = (replace(edits[at], redirects=redirects),) if redirects else ()
    return Plan((*edits[:at], *kept, *edits[at + 1 :]))


WRONG_PLANS = (
    Mutant("wrong pad id", every(wrong_pad)),
    Mutant("one media id missing", every(one_id_missing)),
    Mutant("media ids off by one", every(off_by_one)),
    Mutant("range swallows EOI and EOA", every(range_swallows_eoi_and_eoa)),
    Mutant("a text id masked", every(text_id_masked)),
    Mutant("mask of pad alone", every(mask_names_pad_only)),
    Mutant("branches of the mask swapped", every(branches_swapped)),
    Mutant("token embedding masked instead", every(token_embedding_instead)),
    Mutant("token embedding masked as well", every(token_embedding_as_well)),
    Mutant("a text id spliced", every(text_id_spliced, "splice-misses-rows")),
    Mutant("one of several lookups left", one_lookup_left, base=TWO_LOOKUPS),
    Mutant("one of several functions left", one_lookup_left, base=TWO_FUNCTIONS),
)
