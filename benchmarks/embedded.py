"""Tokens per second of the embedded engine against `model.generate` of transformers, batch 64, interleaved
pairs.

    python benchmarks/embedded.py [--pairs 7] [--out benchmarks/results/embedded.json]

Both sides run in this process, on the same weights, prompts and lengths, sampling at temperature 1. Ours
answers through its backend's request call, one for each group as the rollout role sends them, with
log-probabilities; the peer returns tokens only. A ratio is ours / peer, of wall-clock and of CPU seconds; the
median of the pairs counts. Two shapes: `batch` (32 tokens in, 128 out, 64 rows) is the one of the stated
goal, `toy` is the quickstart's (6 in, 6 out, 256 rows in groups of 8).
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from run_record import describe_run, spread, write_record
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hpc_rl.config.options.inference import EmbeddedConfig
from hpc_rl.servers.embedded.backend import EmbeddedBackend


@dataclass(frozen=True)
class Shape:
    """A model and a load."""

    name: str
    layers: int
    hidden: int
    vocabulary: int
    prompt_tokens: int
    new_tokens: int
    rows: int
    group: int  # rows with the same prompt


SHAPES = [Shape("batch", 4, 128, 512, 32, 128, 64, 1), Shape("toy", 2, 64, 16, 6, 6, 256, 8)]


def make_model(shape: Shape, folder: Path) -> None:
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=shape.hidden // 4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def prompts_of(shape: Shape) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    size = (shape.rows // shape.group, shape.prompt_tokens)
    distinct = torch.randint(3, shape.vocabulary, size, generator=generator).tolist()
    return [prompt for prompt in distinct for _ in range(shape.group)]


def peer(model: Any, shape: Shape, prompts: list[list[int]]) -> None:
    ids = torch.tensor(prompts)
    with torch.no_grad():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            min_new_tokens=shape.new_tokens,
            max_new_tokens=shape.new_tokens,
        )
    assert made.shape == (shape.rows, shape.prompt_tokens + shape.new_tokens)


async def ours(backend: EmbeddedBackend, shape: Shape, prompts: list[list[int]]) -> None:
    sampling = {"max_new_tokens": shape.new_tokens, "ignore_eos": True, "temperature": 1.0}
    groups = [prompts[at : at + shape.group] for at in range(0, len(prompts), shape.group)]
    bodies = [{"input_ids": group, "sampling_params": sampling, "return_logprob": True} for group in groups]
    answers = await asyncio.gather(*(backend.request("/generate", body) for body in bodies))
    assert all(len(one["output_ids"]) == shape.new_tokens for _, answer in answers for one in answer)


async def measure(shape: Shape, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        make_model(shape, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        backend = EmbeddedBackend(EmbeddedConfig(max_running_requests=512))
        await backend.start(folder, "0.0")
        prompts = prompts_of(shape)
        tokens = shape.rows * shape.new_tokens
        rows = []
        for pair in range(pairs + 1):
            times = {}
            for side in ("ours", "peer") if pair % 2 else ("peer", "ours"):
                wall, cpu = time.perf_counter(), time.process_time()
                await ours(backend, shape, prompts) if side == "ours" else peer(model, shape, prompts)
                times[side] = (time.perf_counter() - wall, time.process_time() - cpu)
            if pair:  # the first one warms up
                rows.append(times)
        await backend.stop()
    wall = [row["peer"][0] / row["ours"][0] for row in rows]
    cpu = [row["peer"][1] / row["ours"][1] for row in rows]
    return {
        "shape": shape.__dict__,
        "ratio_wall": spread(wall),
        "ratio_cpu": spread(cpu),
        "tokens_per_s": {
            side: statistics.median(tokens / row[side][0] for row in rows) for side in ("ours", "peer")
        },
        "cpu_ms_per_request": {
            side: statistics.median(1e3 * row[side][1] / shape.rows for row in rows)
            for side in ("ours", "peer")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "embedded.json")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    transformers.logging.set_verbosity_error()
    about = describe_run("torch", "transformers")
    results = [asyncio.run(measure(shape, args.pairs)) for shape in SHAPES]
    record = {"pairs": args.pairs, "threads": torch.get_num_threads(), "results": results}
    write_record(args.out, {**about, **record})
    for result in results:
        print(
            f"{result['shape']['name']}: {result['ratio_wall']['median']:.2f} x the peer's tokens/s "
            f"({result['ratio_cpu']['median']:.2f} by CPU time); "
            f"ours {result['tokens_per_s']['ours']:.0f}/s, {result['cpu_ms_per_request']['ours']:.3f} ms CPU per request"
        )


if __name__ == "__main__":
    main()
