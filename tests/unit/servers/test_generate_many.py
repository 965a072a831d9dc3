"""Several requests in one call: each has its own turn, and what is interrupted goes on by itself."""

from hpc_rl.servers.client import GenerateRequest, HttpServerClient
from hpc_rl.servers.wire import Part


class Scripted(HttpServerClient):
    """Answers calls from a list."""

    def __init__(self, *answers) -> None:
        super().__init__(None, "http://x", "data")
        self.answers, self.requests, self._channel = list(answers), [], self

    async def ask(self, request, take):
        self.requests.append(request)
        take(self.answers.pop(0))
        return 200, None


def made(index, ids, reason, version="0.1"):
    logprobs = [-float(token) for token in ids]
    return Part(index, ids, logprobs, [(version, 0, len(ids))], {"type": reason}, len(ids))


def requests(count):
    return [
        GenerateRequest([1], {"max_new_tokens": 5, "sampling_seed": i}, f"rid{i}", "0.1")
        for i in range(count)
    ]


async def test_one_call_makes_all_turns():
    client = Scripted([made(0, [2], "stop"), made(1, [3, 4], "length")])
    turns = await client.generate_many(requests(2))
    assert [(turn.output_ids, turn.finish_reason) for turn in turns] == [([2], "stop"), ([3, 4], "length")]
    assert turns[1].output_logprobs == [-3.0, -4.0] and turns[1].versions == [("0.1", 0, 2)]
    (request,) = client.requests
    body = request.body
    assert body["input_ids"] == [[1], [1]] and body["rid"] == ["rid0", "rid1"]
    assert [sampling["sampling_seed"] for sampling in body["sampling_params"]] == [0, 1]
    assert (request.least, request.exact) == ("0.1", False)


async def test_an_interrupted_one_goes_on_alone():
    client = Scripted([made(0, [2], "stop"), made(1, [3], "abort")], [made(0, [4], "stop", "0.2")])
    turns = await client.generate_many(requests(2))
    assert turns[1].output_ids == [3, 4] and turns[1].versions == [("0.1", 0, 1), ("0.2", 1, 2)]
    body = client.requests[1].body
    assert body["input_ids"] == [[1, 3]] and body["sampling_params"][0]["max_new_tokens"] == 4
