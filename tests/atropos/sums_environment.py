"""Sums of digits as an environment of atroposlib: nothing here knows hpc-rl. Run by atroposlib's interpreter."""

import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem


class Sums(BaseEnv):
    name = "sums"

    @classmethod
    def config_init(cls):
        # sizes of its own author; the URLs are those of no server
        config = BaseEnvConfig(
            group_size=4,
            max_token_length=32,
            ensure_scores_are_not_same=False,
            steps_per_eval=10,
            use_wandb=False,
            total_steps=-1,
        )
        return config, [APIServerConfig(base_url="http://localhost:1/v1", api_key="x", server_type="sglang")]

    async def setup(self):
        self.random = random.Random(0)
        self.scores = []

    async def get_next_item(self):
        digits = [self.random.randrange(10) for _ in range(3)]
        return {"prompt": "+".join(map(str, digits)) + "=", "answer": str(sum(digits))}

    async def collect_trajectory(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.completion(prompt=item["prompt"], n=1, max_tokens=6, temperature=1.0)
            node = managed.get_state()["nodes"][0]
        score = float(answer.choices[0].text.strip() == item["answer"])
        self.scores.append(score)
        return ScoredDataItem(tokens=node.tokens, masks=node.masked_tokens, scores=score), []

    async def evaluate(self, *args, **kwargs):
        await self.evaluate_log({"eval/score": sum(self.scores) / max(1, len(self.scores))})


if __name__ == "__main__":
    Sums.cli()
