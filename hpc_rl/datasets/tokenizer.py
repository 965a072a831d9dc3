"""Loads a Hugging Face tokenizer folder with `tokenizers`, and its chat template in a Jinja sandbox.

The rollout role, its workers, the datasets and the embedded servers all use it. It supports only fast
tokenizers (tokenizer.json). No torch and no transformers, so processes start fast and stay small.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpc_rl.core.errors import ConfigError

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """Text to ids and back."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        path = self.folder / "tokenizer.json"
        if not path.exists():
            raise ConfigError(
                f"tokenizer {self.folder} has no tokenizer.json. "
                "Give the folder of a model with a fast tokenizer."
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library's errors have no common base class
            raise ConfigError(f"{path} can't be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = self._json("tokenizer_config.json")
        found = {name: _get_content(self._config.get(name)) for name in SPECIAL_TOKENS}
        # templates may test whether a token is defined, but assume that bos and eos are
        self._special = {name: token for name, token in found.items() if token}
        self._special = {"bos_token": "", "eos_token": "", **self._special}
        self.eos_token_ids = self._eos_token_ids()
        self._template: jinja2.Template | None = None

    @property
    def size(self) -> int:
        """The number of tokens, including added ones."""
        return self._tokenizer.get_vocab_size()

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a completion; None if the folder defines none."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def unknown(self, text: str) -> list[str]:
        """Return the parts of a text without a token in the vocabulary."""
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        unknown_id = None if unknown is None else self._tokenizer.token_to_id(unknown)
        if unknown_id is None:
            return []
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        parts = (
            text[slice(*offsets)]
            for token, offsets in zip(encoded.ids, encoded.offsets, strict=True)
            if token == unknown_id
        )
        return [part for part in parts if part and part != unknown]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def chat(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render messages with the chat template. Encode the text without special tokens.

        Raises ConfigError if there is no template, if it is invalid, or if it refuses the messages.
        """
        self._template = template = self._template or self._compile_template()
        try:
            return template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special, **variables
            )
        # a template is a program and may raise any of these errors
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, OverflowError) as error:
            raise ConfigError(f"the chat template of {self.folder} refuses the messages: {error}") from None

    def _compile_template(self) -> jinja2.Template:
        source = self._template_source()
        try:
            return _make_environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            message = f"the chat template of {self.folder} is not valid: {error.message}, line {error.lineno}"
            raise ConfigError(message) from None

    def _template_source(self) -> str:
        path = self.folder / "chat_template.jinja"
        source = path.read_text() if path.exists() else self._config.get("chat_template")
        # several templates by name
        if isinstance(source, list):
            source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
        if not isinstance(source, str):
            hint = "rows with `messages` and chat requests need one: add chat_template.jinja"
            raise ConfigError(f"tokenizer {self.folder} has no chat template; {hint}.")
        return source

    def _eos_token_ids(self) -> list[int]:
        eos = self._special["eos_token"]
        found = [self._tokenizer.token_to_id(eos)] if eos else []
        for name in ("generation_config.json", "config.json"):
            value = self._json(name).get("eos_token_id")
            found += value if isinstance(value, list) else [value]
        return list(dict.fromkeys(token for token in found if token is not None))

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            found = json.loads(path.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{path} is not a JSON object.")
        return found


class _GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's text for trainers. It has no effect here."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _make_environment() -> ImmutableSandboxedEnvironment:
    """Return a Jinja environment with the switches, filters and globals that published templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.globals.update(raise_exception=_raise, strftime_now=lambda form: time.strftime(form))
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    return environment


def _get_content(token: Any) -> str:
    return (token.get("content") if isinstance(token, dict) else token) or ""


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
