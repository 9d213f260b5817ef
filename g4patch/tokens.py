"""Which token ids mean image, audio, video and padding, and who says so.

Sources, first wins: the command line, `config.json`, `genai_config.json`, a bundle's `metadata.json` (beside the
model or in the folder above), Gemma 4's own ids. Files that contradict each other are an error, never a choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from g4patch import configs
from g4patch.errors import BundleError, UsageError

MODALITIES = ("image", "audio", "video")
GEMMA4_MEDIA = {"image": 258880, "audio": 258881, "video": 258884}
GEMMA4_PAD = 0
GEMMA4 = "Gemma 4's own ids"
# Gemma 3n's placeholders lie beyond its PLE table. It has none for video, and Gemma 4's id for that is text there.
_GEMMA3N: dict[str, int | None] = {"image": 262145, "audio": 262273, "video": None}
FLAG = "the command line"

# Sizes of the model that a source may state: fields of TokenFacts.
_NUMBERS = (
    "vocabulary",
    "hidden_size",
    "layers",
    "layer_width",
    "clipped_vision_layers",
    "clipped_audio_layers",
    "patch_size",
)


@dataclass(frozen=True)
class Token:
    """A token id and who says so. An `id` of None: the source says that the model lacks this modality."""

    id: int | None
    source: str

    @property
    def by_default(self) -> bool:
        return self.source == GEMMA4


@dataclass(frozen=True)
class TokenFacts:
    """What is known of the model's tokens, PLE and towers from outside the graph. None is unknown.

    `clipped_vision_layers` and `clipped_audio_layers` are how many layers of clipped linears the towers have;
    `patch_size` is the side of an image patch in pixels.
    """

    image: Token
    audio: Token
    video: Token
    pad: Token
    vocabulary: int | None = None
    hidden_size: int | None = None
    layers: int | None = None
    layer_width: int | None = None
    clipped_vision_layers: int | None = None
    clipped_audio_layers: int | None = None
    patch_size: int | None = None
    warnings: tuple[str, ...] = ()

    def token(self, modality: str) -> Token:
        token: Token = getattr(self, modality)
        return token

    @property
    def media(self) -> dict[str, int]:
        """Modality -> placeholder id, for the modalities the model has."""
        ids = {modality: self.token(modality).id for modality in MODALITIES}
        return {modality: token for modality, token in ids.items() if token is not None}

    @property
    def only_by_default(self) -> frozenset[str]:
        """Modalities that only Gemma 4's defaults name although a source names others.

        Where no source names any, the defaults stand for the model and this is empty.
        """
        named = [modality for modality in MODALITIES if not self.token(modality).by_default]
        return frozenset(MODALITIES) - frozenset(named) if named else frozenset()

    def within(self, rows: int) -> TokenFacts:
        """The same without modalities that only the defaults name and whose ids a table of `rows` rows lacks."""
        facts = self
        for modality in self.only_by_default:
            if (self.token(modality).id or 0) >= rows:
                facts = replace(facts, **{modality: Token(None, GEMMA4)})  # type: ignore[arg-type]
        return facts

    @property
    def pad_id(self) -> int:
        if self.pad.id is None:
            raise BundleError(f"{self.pad.source} sets no pad id", "pass --pad-token-id")
        return self.pad.id

    @property
    def sources(self) -> tuple[str, ...]:
        """Who names the ids, each once, in order."""
        tokens = (*(self.token(modality) for modality in MODALITIES), self.pad)
        return tuple(dict.fromkeys(token.source for token in tokens))


@dataclass(frozen=True)
class TokenFlags:
    """Ids given on the command line; None where a flag was not given."""

    image: int | None = None
    audio: int | None = None
    video: int | None = None
    pad: int | None = None


@dataclass(frozen=True)
class _Source:
    """What one file says. `tokens` holds only what it mentions; `numbers` are sizes of the model."""

    name: str
    tokens: Mapping[str, int | None]
    numbers: Mapping[str, int] = field(default_factory=dict)
    other_pads: Mapping[str, int] = field(default_factory=dict)


def resolve(bundle: Path, flags: TokenFlags) -> TokenFacts:
    """Find out the token ids for a bundle at `bundle`.

    Raises BundleError where sources contradict each other or are malformed, UsageError for impossible flags.
    """
    sources = list(_sources(bundle))
    given = {name: _flag(name, value) for name, value in vars(flags).items() if value is not None}
    tokens = {name: _decide(name, given, sources) for name in (*MODALITIES, "pad")}
    ids = [token.id for name, token in tokens.items() if name != "pad" and token.id is not None]
    if len(set(ids)) != len(ids):
        raise BundleError(
            "two modalities have the same token id",
            "pass --image-token-id, --audio-token-id and --video-token-id",
        )
    numbers = {key: _agree(key, sources) for key in _NUMBERS}
    pad = tokens["pad"].id
    warnings = tuple(
        f"{place} sets pad id {other}, {tokens['pad'].source} says {pad}: PLE uses the latter"
        for source in sources
        for place, other in source.other_pads.items()
        if other != pad
    )
    return TokenFacts(
        image=tokens["image"],
        audio=tokens["audio"],
        video=tokens["video"],
        pad=tokens["pad"],
        warnings=warnings,
        **numbers,
    )


def _flag(name: str, value: int) -> Token:
    if value < 0:
        raise UsageError(f"--{name}-token-id is {value}", "token ids are 0 or more")
    return Token(value, FLAG)


def _decide(name: str, given: Mapping[str, Token], sources: list[_Source]) -> Token:
    if name in given:
        return given[name]
    said = [(source.name, source.tokens[name]) for source in sources if name in source.tokens]
    if len({token for _, token in said}) > 1:
        claims = ", ".join(f"{source} says {token}" for source, token in said)
        raise BundleError(f"the {name} token id is contradictory: {claims}", f"pass --{name}-token-id")
    if said:
        return Token(said[0][1], said[0][0])
    return Token(GEMMA4_PAD if name == "pad" else GEMMA4_MEDIA[name], GEMMA4)


def _agree(key: str, sources: list[_Source]) -> int | None:
    """A size of the model: from the first source that has it."""
    return next((source.numbers[key] for source in sources if key in source.numbers), None)


def _sources(bundle: Path) -> Iterator[_Source]:
    bundle = bundle.absolute()
    inner = [bundle] if bundle.is_dir() else []
    for name, read in _READERS.items():
        for folder in (*inner, bundle.parent, bundle.parent.parent):
            content = configs.load(folder / name)
            source = read(name, content) if isinstance(content, dict) else None
            if source and (source.tokens or source.numbers or source.other_pads):
                yield source
                break


def _section(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = content.get(key)
    return section if isinstance(section, dict) else {}


def _ints(where: str, content: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, int]:
    """Integers under other names; keys that are absent or null are left out."""
    found = {}
    for key, name in keys.items():
        value = content.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise BundleError(f"{where}: {key} is not an integer", "mend the file, or pass the ids as flags")
        found[name] = value
    return found


def _tokens(where: str, content: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, int | None]:
    """Token ids under other names; a null stays, it says that there is none."""
    nulls: dict[str, int | None] = {name: None for key, name in keys.items() if key in content}
    return nulls | _ints(where, content, keys)


def _hugging_face(where: str, content: Mapping[str, Any]) -> _Source:
    """`config.json` of a Gemma 4 or 3n checkpoint: the text model may be nested or the whole file."""
    text = _section(content, "text_config") or content
    tokens = dict(_GEMMA3N) if content.get("model_type") in ("gemma3n", "gemma3n_text") else {}
    tokens |= _tokens(where, content, {f"{name}_token_id": name for name in MODALITIES})
    tokens |= _tokens(where, text, {"pad_token_id": "pad"})
    numbers = _ints(
        where,
        text,
        {
            "vocab_size": "vocabulary",
            "hidden_size": "hidden_size",
            "num_hidden_layers": "layers",
            "hidden_size_per_layer_input": "layer_width",
        },
    )
    return _Source(where, tokens, numbers | _towers(where, content))


def _towers(where: str, content: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of the towers; where a section leaves one out, the default of Hugging Face's `configuration_gemma4`."""
    found: dict[str, int] = {}
    for tower, clipped, layers in (("vision", False, 16), ("audio", True, 12)):
        section = _section(content, f"{tower}_config")
        if section.get("model_type") != f"gemma4_{tower}":
            continue
        sizes = _ints(where, section, {"num_hidden_layers": "layers", "patch_size": "patch_size"})
        if section.get("use_clipped_linears", clipped) is True:
            found[f"clipped_{tower}_layers"] = sizes.get("layers", layers)
        if tower == "vision":
            found["patch_size"] = sizes.get("patch_size", 16)
    return found


def _genai(where: str, content: Mapping[str, Any]) -> _Source:
    """onnxruntime-genai's `genai_config.json`: media ids under `model`; its pad id is for batching, not for PLE."""
    model = _section(content, "model")
    keys = {f"{name}_token_id": name for name in MODALITIES}
    pads = _ints(where, model, {"pad_token_id": f"{where} model.pad_token_id"})
    return _Source(where, _tokens(where, model, keys), other_pads=pads)


def _bundle_metadata(where: str, content: Mapping[str, Any]) -> _Source:
    """`metadata.json` of a Core AI LLM bundle (metadata_version 0.2): only the image id and the vocabulary."""
    tokens = _tokens(where, _section(content, "vision"), {"image_token_id": "image"})
    numbers = _ints(where, _section(content, "language"), {"vocab_size": "vocabulary"})
    return _Source(where, tokens, numbers)


_READERS = {
    "config.json": _hugging_face,
    "genai_config.json": _genai,
    "metadata.json": _bundle_metadata,
}
