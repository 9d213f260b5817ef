"""What stops a command. A check that failed is a result in the report, never an exception."""

from __future__ import annotations


class G4PatchError(Exception):
    """One sentence that says what is wrong, and a hint that says how to mend it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(G4PatchError):
    """The command line, or the token ids it was given, cannot be acted on."""


class BundleError(G4PatchError):
    """A bundle cannot be read, is not supported, or contradicts itself."""


class RuleError(G4PatchError):
    """A rule's folder is malformed, or a rule of that name does not exist."""


class EditError(G4PatchError):
    """A plan does not fit the graph it is applied to."""


class Interrupted(G4PatchError):
    """The work on one bundle of several was ended before it was done."""


class MissingExtra(G4PatchError):
    """A part of g4patch that was not installed is needed for this bundle."""
