"""Chat: messages to token ids and back, with the `tokenizers` library and the checkpoint's own Jinja template. No torch.

The template runs in Jinja's immutable sandbox: it comes with the model. Left out: tools, images, streaming.
"""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from hpc_rl.errors import RequestRefused
from hpc_rl.trial import read_json

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "n": "n",
    "seed": "sampling_seed",
}
_SAMPLING |= {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
_SAME = ("min_p", "stop_token_ids", "ignore_eos", "min_new_tokens", "frequency_penalty", "presence_penalty")
_SAMPLING |= {key: key for key in _SAME}
_PLAIN = {"model", "messages", "stop", "user", "metadata", "store"}
_REFUSED_UNLESS = {
    "stream": (False, None),
    "logprobs": (False, None),
    "top_logprobs": (0, None),
    "tools": ([], None),
}


class ChatTokenizer:
    """Tokenizer and chat template of a checkpoint directory. Raises OSError, ValueError."""

    def __init__(self, path: str | Path) -> None:
        folder = Path(path)
        if not (folder / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{folder / 'tokenizer.json'} does not exist")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = read_json(folder / "tokenizer_config.json") or {}
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        self._special = {name: _text(config[name]) for name in names if config.get(name)}
        source = _template_source(folder, config)
        self._template = _environment().from_string(source) if source else None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """Raises RequestRefused where there is no template, or where it refuses the messages."""
        if self._template is None:
            raise RequestRefused("the model has no chat template: use /generate")
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special
            )
        except jinja2.TemplateError as error:
            raise RequestRefused(f"the chat template refuses these messages: {error}") from error


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for trainers; here it does nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    loops = "jinja2.ext.loopcontrols"
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loops, _GenerationTag]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: time.strftime(form)
    return environment


def _template_source(folder: Path, config: dict[str, Any]) -> str:
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text()
    source = config.get("chat_template") or ""
    if isinstance(source, list):
        named = {item["name"]: item["template"] for item in source}
        source = named.get("default") or ""
    return source


def _text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def to_generate(
    body: dict[str, Any], tokenizer: ChatTokenizer, context_length: int
) -> tuple[dict[str, Any], list[str]]:
    """An OpenAI chat request as a /generate request, and its stop strings. Raises RequestRefused."""
    sampling: dict[str, Any] = {}
    for key, value in body.items():
        if key in _SAMPLING:
            if value is not None:
                sampling[_SAMPLING[key]] = value
        elif key in _REFUSED_UNLESS:
            if value not in _REFUSED_UNLESS[key]:
                raise RequestRefused(
                    f"chat key {key!r}: the embedded engine does not serve it, got {value!r}"
                )
        elif key not in _PLAIN:
            raise RequestRefused(
                f"unknown chat key {key!r}; known are {', '.join(sorted({*_SAMPLING, *_PLAIN}))}"
            )
    messages = body.get("messages")
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(message, dict) for message in messages)
    ):
        raise RequestRefused("messages must be a list of objects, at least one")
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else list(stop)
    ids = tokenizer.encode(tokenizer.render(messages))
    sampling.setdefault("max_new_tokens", max(0, context_length - len(ids)))
    return {"input_ids": ids, "sampling_params": sampling, "return_logprob": False}, stops


def to_completion(
    body: dict[str, Any], answers: list[dict[str, Any]], tokenizer: ChatTokenizer, stops: list[str]
) -> dict[str, Any]:
    """The OpenAI answer. Stop strings are cut out of what was made: the tokens behind them were made in vain."""
    choices, metas = [], [answer["meta_info"] for answer in answers]
    for index, answer in enumerate(answers):
        ids, reason = answer["output_ids"], answer["meta_info"]["finish_reason"]
        matched = reason.get("matched")
        text = tokenizer.decode(ids[:-1] if matched is not None else ids)
        finish = reason["type"]
        cut = min(((text.find(s), s) for s in stops if s and s in text), default=None)
        if cut:
            text, finish, matched = text[: cut[0]], "stop", cut[1]
        message = {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": None,
                "finish_reason": finish,
                "matched_stop": matched,
            }
        )
    prompt, made = metas[0]["prompt_tokens"], sum(meta["completion_tokens"] for meta in metas)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model") or "default",
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made},
        "metadata": {
            "weight_version": metas[-1]["weight_version"],
            "weight_versions": metas[-1]["weight_versions"],
        },
    }
