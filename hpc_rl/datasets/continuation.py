"""Tokens of new messages after a reply of the model, whose own tokens stay as they were sampled.

Tokenizing the whole conversation again would not guarantee the same tokens: the log-probabilities of a
trajectory belong to exactly the tokens that the model saw.
"""

from collections.abc import Sequence
from typing import Any

from hpc_rl.core.errors import ConfigError
from hpc_rl.datasets.tokenizer import Tokenizer

# Stands for a reply in a rendering of the chat template; no template changes such a text.
REPLY = "hpc-rl-reply"


def encode_continuation(
    tokenizer: Tokenizer,
    before: Sequence[dict[str, Any]],
    new: Sequence[dict[str, Any]],
    reply_ids: Sequence[int],
    **variables: Any,
) -> list[int]:
    """Return the tokens between a reply and the next one: the end of the first, and the `new` messages.

    `before` are the messages before the reply, `reply_ids` its sampled tokens, `variables` values for the
    template. Raises ConfigError if the template refuses the messages, or does not show the reply once.
    """
    text = tokenizer.chat([*before, {"role": "assistant", "content": REPLY}, *new], **variables)
    if (times := text.count(REPLY)) != 1:
        raise ConfigError(
            f"the chat template of {tokenizer.folder} shows a reply of the assistant {times} times, but a "
            "conversation of several turns needs it exactly once: use a model with another chat template"
        )
    added = tokenizer.encode(text.rpartition(REPLY)[2], add_special_tokens=False)
    # the model may have made the token that ends a reply
    ended = bool(reply_ids) and reply_ids[-1] in tokenizer.eos_token_ids
    return added[1:] if ended and added[:1] == list(reply_ids[-1:]) else added
