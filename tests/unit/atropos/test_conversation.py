"""Several turns as one token sequence."""

import pytest

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.types import Turn
from hpc_rl.rollout.conversation import Conversation


def sampler(tokenizer, replies, end=True):
    asked = []

    async def sample(input_ids):
        asked.append(list(input_ids))
        ids = tokenizer.encode(replies[len(asked) - 1], add_special_tokens=False)
        ids += tokenizer.eos_token_ids[:1] if end else []
        return Turn(ids, [-1.0] * len(ids), [("0.1", 0, len(ids))], "stop" if end else "length")

    return sample, asked


async def test_a_chat_has_the_tokens_of_its_template(chat_tokenizer):
    sample, asked = sampler(chat_tokenizer, ["5", "6"])
    first = [{"role": "system", "content": "be short"}, {"role": "user", "content": "2+3"}]
    conversation = Conversation(chat_tokenizer, sample, first)
    assert await conversation.reply() == "5"
    conversation.say("no")
    assert await conversation.reply() == "6"
    # the model was asked with the very text that the template makes of the whole conversation
    whole = [*first, {"role": "assistant", "content": "5"}, {"role": "user", "content": "no"}]
    expected = chat_tokenizer.encode(chat_tokenizer.chat(whole), add_special_tokens=False)
    assert asked[1] == expected
    assert conversation.messages == [*whole, {"role": "assistant", "content": "6"}]
    assert conversation.ids == expected + conversation.turns[1][1].output_ids


async def test_a_reply_that_was_cut_off_is_ended_by_the_template(chat_tokenizer):
    sample, asked = sampler(chat_tokenizer, ["5", "6"], end=False)
    conversation = Conversation(chat_tokenizer, sample, [{"role": "user", "content": "2+3"}])
    await conversation.reply()
    assert conversation.was_cut_off
    conversation.say("go on")
    await conversation.reply()
    text = chat_tokenizer.decode(asked[1], skip_special_tokens=False)
    assert text.endswith("5<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")


async def test_what_was_sampled_is_never_tokenized_again(chat_tokenizer):
    odd = [chat_tokenizer.encode("4", add_special_tokens=False)[0]] * 3  # no template would write it so

    async def sample(input_ids):
        return Turn(odd, [-1.0] * 3, [("0.1", 0, 3)], "stop")

    conversation = Conversation(chat_tokenizer, sample, [{"role": "user", "content": "?"}])
    await conversation.reply()
    conversation.say("again")
    await conversation.reply()
    contexts = [context for context, _ in conversation.turns]
    assert conversation.ids == contexts[0] + odd + contexts[1] + odd


async def test_plain_text_goes_on_without_a_template(chat_tokenizer):
    sample, asked = sampler(chat_tokenizer, ["5", "6"])
    conversation = Conversation(chat_tokenizer, sample, input_ids=chat_tokenizer.encode("2+3="))
    await conversation.reply()
    conversation.say(" no; 2+4=")
    await conversation.reply()
    assert chat_tokenizer.decode(asked[1]) == "2+3=5 no; 2+4="


async def test_a_template_that_refuses_says_so(chat_tokenizer, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise ConfigError("chat template refuses the messages: no tool role")

    sample, _ = sampler(chat_tokenizer, ["5"])
    conversation = Conversation(chat_tokenizer, sample, [{"role": "tool", "content": "?"}])
    monkeypatch.setattr(chat_tokenizer, "chat", refuse)
    with pytest.raises(ConfigError, match="tool role"):
        await conversation.reply()
