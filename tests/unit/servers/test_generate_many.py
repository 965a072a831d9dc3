"""Several requests in one call: each has its own turn, and what is interrupted goes on by itself."""

from hpc_rl.servers.client import GenerateRequest, HttpServerClient


class Scripted(HttpServerClient):
    """Answers calls from a list."""

    def __init__(self, *answers) -> None:
        super().__init__(None, "http://x", "data")
        self.answers, self.bodies, self.headers = list(answers), [], []

    async def _call(self, path, body, headers, timeout_s=None, take_parts=None):
        self.bodies.append(body)
        self.headers.append(headers)
        return self.answers.pop(0)


def made(ids, reason, version="0.1"):
    logprobs = [[-float(token), token, None] for token in ids]
    meta = {"finish_reason": {"type": reason}, "output_token_logprobs": logprobs, "weight_version": version}
    return {"output_ids": ids, "meta_info": meta}


def requests(count):
    return [
        GenerateRequest([1], {"max_new_tokens": 5, "sampling_seed": i}, f"rid{i}", "0.1")
        for i in range(count)
    ]


async def test_one_call_makes_all_turns():
    client = Scripted([made([2], "stop"), made([3, 4], "length")])
    turns = await client.generate_many(requests(2))
    assert [(turn.output_ids, turn.finish_reason) for turn in turns] == [([2], "stop"), ([3, 4], "length")]
    assert turns[1].output_logprobs == [-3.0, -4.0] and turns[1].versions == [("0.1", 0, 2)]
    (body,) = client.bodies
    assert body["input_ids"] == [[1], [1]] and body["rid"] == ["rid0", "rid1"]
    assert [sampling["sampling_seed"] for sampling in body["sampling_params"]] == [0, 1]
    assert client.headers[0]["X-Hpc-Rl-Min-Version"] == "0.1"


async def test_an_interrupted_one_goes_on_alone():
    client = Scripted([made([2], "stop"), made([3], "abort")], made([4], "stop", "0.2"))
    turns = await client.generate_many(requests(2))
    assert turns[1].output_ids == [3, 4] and turns[1].versions == [("0.1", 0, 1), ("0.2", 1, 2)]
    assert (
        client.bodies[1]["input_ids"] == [1, 3] and client.bodies[1]["sampling_params"]["max_new_tokens"] == 4
    )
