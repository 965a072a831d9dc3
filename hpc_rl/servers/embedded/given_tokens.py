"""Log-probabilities of given tokens by forward passes of the embedded engine's model."""

from typing import Any

import torch

from hpc_rl.servers.embedded.model import Model
from hpc_rl.servers.wire import GivenTokens, make_given_answer

MAX_LOGITS = 64 << 20  # of a forward pass, 256 MiB in float32; a single longer input has its own pass


@torch.inference_mode()
def compute_logprobs(model: Model, inputs: list[GivenTokens], top_k: int) -> list[dict[str, Any]]:
    """Return the log-probabilities of each input's tokens from its start on, at temperature 1.

    With `top_k`, also the most likely tokens at each position, best first.
    """
    answers: list[dict[str, Any]] = [{}] * len(inputs)
    order = sorted(range(len(inputs)), key=lambda number: len(inputs[number].ids))
    while order:
        longest = len(inputs[order[-1]].ids)
        most = max(1, MAX_LOGITS // (longest * model.vocab_size))
        rows = [order.pop() for _ in range(min(len(order), most))]
        ids = torch.zeros(len(rows), longest, dtype=torch.long, device=model.device)
        for row, number in enumerate(rows):
            given = inputs[number].ids
            ids[row, : len(given)] = torch.tensor(given)
        # no attention mask: earlier tokens never see the padding on the right
        logits = model.decoder.compute_logits(ids)
        for row, number in enumerate(rows):
            start, end = inputs[number].start, len(inputs[number].ids)
            logprobs_TV = torch.log_softmax(logits[row, start - 1 : end - 1], dim=-1)
            own_T = logprobs_TV.gather(1, ids[row, start:end, None])[:, 0]
            top = logprobs_TV.topk(min(top_k, logprobs_TV.shape[1])) if top_k else None
            answers[number] = make_given_answer(
                own_T.tolist(),
                top.indices.tolist() if top else [],
                top.values.tolist() if top else [],
            )
    return answers
