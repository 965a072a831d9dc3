"""Tokenizer: a Hugging Face tokenizer folder through the `tokenizers` library, and its chat template in a Jinja sandbox.

Only fast tokenizers (tokenizer.json). No torch, no transformers: the rollout role and its workers start fast and stay small.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpc_rl.errors import ConfigError


class Tokenizer:
    """Text to ids and back.

    Args:
        folder: Holds tokenizer.json, and beside it tokenizer_config.json, chat_template.jinja, generation_config.json.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        path = self.folder / "tokenizer.json"
        if not path.exists():
            raise ConfigError(
                f"tokenizer {self.folder} has no tokenizer.json. Give the folder of a model with a fast tokenizer."
            )
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = self._json("tokenizer_config.json")
        self.bos_token = _content(self._config.get("bos_token"))
        self.eos_token = _content(self._config.get("eos_token"))
        self.eos_token_ids = self._eos_token_ids()
        self._template: jinja2.Template | None = None

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a completion; None where the folder names none."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def chat(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text that the chat template makes of messages; encode it without special tokens. Raises ConfigError."""
        if self._template is None:
            self._template = self._compile_template()
        tokens = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **tokens, **variables
            )
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat template of {self.folder} refuses the messages: {error}") from None

    def _compile_template(self) -> jinja2.Template:
        path = self.folder / "chat_template.jinja"
        source = path.read_text() if path.exists() else self._config.get("chat_template")
        if isinstance(source, list):  # several by name
            source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
        if not isinstance(source, str):
            hint = "rows with `messages` need one, rows with `prompt` don't"
            raise ConfigError(f"tokenizer {self.folder} has no chat template: {hint}.")
        # the switches and globals that published templates are written for
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.globals.update(raise_exception=_raise, strftime_now=lambda form: time.strftime(form))
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, **options
        )
        return environment.from_string(source)

    def _eos_token_ids(self) -> list[int]:
        found = [] if not self.eos_token else [self._tokenizer.token_to_id(self.eos_token)]
        for name in ("generation_config.json", "config.json"):
            value = self._json(name).get("eos_token_id")
            found += value if isinstance(value, list) else [value]
        return list(dict.fromkeys(token for token in found if token is not None))

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ConfigError(f"{path} is no JSON: {error}") from None


def _content(token: Any) -> str:
    return (token.get("content") if isinstance(token, dict) else token) or ""


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
