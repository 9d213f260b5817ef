"""What an edited package says of its edits: an entry of its user-defined metadata, a line for each time it was edited.

    com.example.whatever   as it was
    g4patch                g4patch 0.1.0: ple-raw-ids, splice-misses-rows; plan 5d41402a...

Xcode shows it, and `MLModel.user_defined_metadata["g4patch"]` of coremltools has it.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version

from g4patch.edits import Plan
from g4patch.formats import Model
from g4patch.formats.coreml.proto import Message

KEY = "g4patch"


def complete(model: Model, plan: Plan) -> Plan:
    """The plan with its note: Core ML needs no companion nodes."""
    rules = ", ".join(dict.fromkeys(edit.rule for edit in plan.edits))
    return replace(plan, note=f"g4patch {version('g4patch')}: {rules}; plan {plan.digest}")


def write(message: Message, note: str) -> None:
    """Add a note to those that a `Model` has."""
    if note:
        entries = message.description.metadata.userDefined
        entries[KEY] = f"{entries[KEY]}\n{note}" if KEY in entries else note


def take_back(rest: Message, before: Message, note: str) -> bool:
    """Undo `write` in `rest`, the model after; False where its entry is not what `write` makes of the one before."""
    written = type(before)()
    written.description.CopyFrom(before.description)
    write(written, note)
    metadata = rest.description.metadata
    if metadata.userDefined.get(KEY) != written.description.metadata.userDefined.get(KEY):
        return False
    if KEY in before.description.metadata.userDefined:
        metadata.userDefined[KEY] = before.description.metadata.userDefined[KEY]
    elif note:
        del metadata.userDefined[KEY]
    if not before.description.HasField("metadata") and not metadata.ByteSize():
        rest.description.ClearField("metadata")
    if not before.HasField("description") and not rest.description.ByteSize():
        rest.ClearField("description")
    return True
