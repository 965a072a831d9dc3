"""Converts OpenAI chat requests to native requests, and native answers to OpenAI's.

Tools, images and streaming are not supported. No torch.
"""

import time
import uuid
from typing import Any

from hpc_rl.core.errors import ConfigError, RequestRefused
from hpc_rl.datasets.tokenizer import Tokenizer

# sampling keys of OpenAI, vLLM and SGLang -> names in a native request
SAMPLING = {
    "seed": "sampling_seed",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
}
_SAME = ("temperature", "top_p", "top_k", "n", "min_p", "stop_token_ids", "ignore_eos", "min_new_tokens")
SAMPLING |= {key: key for key in (*_SAME, "frequency_penalty", "presence_penalty")}
_PLAIN = {"model", "messages", "stop", "user", "metadata", "store"}
_REFUSED_UNLESS = {
    "stream": (False, None),
    "logprobs": (False, None),
    "top_logprobs": (0, None),
    "tools": ([], None),
}


def convert_request(
    body: dict[str, Any], tokenizer: Tokenizer, context_length: int
) -> tuple[dict[str, Any], list[str]]:
    """Convert an OpenAI chat request to a /generate request and its stop strings. Raises RequestRefused."""
    sampling: dict[str, Any] = {}
    for key, value in body.items():
        if key in SAMPLING:
            if value is not None:
                sampling[SAMPLING[key]] = value
        elif key in _REFUSED_UNLESS:
            if value not in _REFUSED_UNLESS[key]:
                raise RequestRefused(f"the embedded engine can't serve chat key {key!r} {value!r}: remove it")
        elif key not in _PLAIN:
            known = ", ".join(sorted({*SAMPLING, *_PLAIN}))
            raise RequestRefused(f"unknown chat key {key!r}; known are {known}")
    messages = body.get("messages")
    is_list = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    if not is_list or not messages:
        raise RequestRefused("messages must be a list of at least one object, such as {role, content}")
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise RequestRefused(f"stop must be a string or a list of strings, got {stop!r}")
    try:
        ids = tokenizer.encode(tokenizer.chat(messages), add_special_tokens=False)
    except ConfigError as error:
        raise RequestRefused(str(error)) from error
    sampling.setdefault("max_new_tokens", max(0, context_length - len(ids)))
    return {"input_ids": ids, "sampling_params": sampling, "return_logprob": False}, stops


def convert_answers(
    body: dict[str, Any], answers: list[dict[str, Any]], tokenizer: Tokenizer, stops: list[str]
) -> dict[str, Any]:
    """Convert native answers to an OpenAI answer. Cuts the text at the first stop string."""
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
        ending = {"finish_reason": finish, "matched_stop": matched}
        choices.append({"index": index, "message": message, "logprobs": None, **ending})
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
