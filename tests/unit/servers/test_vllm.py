"""What becomes of the configuration and of requests in front of vLLM."""

import dataclasses
import os
import stat
import tempfile
from pathlib import Path

import pytest

from hpc_rl.config.load.load import load
from hpc_rl.config.options.inference import VLLMConfig
from hpc_rl.config.rules.check import check
from hpc_rl.config.vllm_versions import FLAGS, NO_FLAGS
from hpc_rl.core.errors import RequestRefused
from hpc_rl.servers.server_process import choose_table, make_arguments
from hpc_rl.servers.vllm import (
    convert_to_native,
    is_checkpoint,
    make_private_socket,
    make_sampling,
    make_settings,
)
from hpc_rl.servers.wire import NativeRequest

SWITCHES = [field.name for field in dataclasses.fields(VLLMConfig) if field.default is False]
VALUES = {
    "dtype": ("bfloat16", "--dtype"),
    "max_model_len": ("4096", "--max-model-len"),
    "gpu_memory_utilization": ("0.5", "--gpu-memory-utilization"),
    "kv_cache_memory_bytes": ("1000", "--kv-cache-memory-bytes"),
    "kv_cache_dtype": ("fp8", "--kv-cache-dtype"),
    "block_size": ("32", "--block-size"),
    "max_num_seqs": ("64", "--max-num-seqs"),
    "max_num_batched_tokens": ("2048", "--max-num-batched-tokens"),
    "attention_backend": ("FLASH_ATTN", "--attention-backend"),
    "cpu_offload_gb": ("2", "--cpu-offload-gb"),
    "uvicorn_log_level": ("info", "--uvicorn-log-level"),
}


def flags_of(device, config=None, index=0, tensor_parallel_size=1):
    settings = make_settings(config or VLLMConfig(), device, tensor_parallel_size, index)
    return make_arguments(settings, ["--x"], FLAGS["0.32.0"])


def value(argv, flag):
    return argv[argv.index(flag) + 1]


def test_a_gpu_replica_gets_what_the_configuration_says():
    argv = flags_of("cuda", VLLMConfig(seed=10), index=3, tensor_parallel_size=4)
    assert (value(argv, "--seed"), value(argv, "--tensor-parallel-size")) == ("13", "4")
    assert value(argv, "--gpu-memory-utilization") == "0.9" and argv[-1] == "--x"
    assert not {"--kv-cache-memory-bytes", "--enforce-eager", "None"} & set(argv)


def test_a_cpu_replica_is_bounded_and_compiles_nothing():
    words = ["experiment_name=e", "trial_name=t", "train_dataset.path=/d", "actor.path=/m"]
    words += ["cluster.n_gpus_per_node=0", "allocation_mode=vllm:d1+fsdp:d1", "actor.ppo_n_minibatches=1"]
    argv = flags_of("cpu", check(load([], words), files=False).config.vllm)
    assert (value(argv, "--dtype"), value(argv, "--kv-cache-memory-bytes")) == ("float32", str(4 << 30))
    assert "--enforce-eager" in argv and "--gpu-memory-utilization" not in argv


def test_log_probabilities_are_at_the_temperature_and_nothing_is_taken_from_the_model():
    argv = flags_of("cuda")
    assert value(argv, "--logprobs-mode") == "processed_logprobs" and "--enable-scale-out" in argv
    assert value(argv, "--generation-config") == "vllm"


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_becomes_its_flag(name):
    off, on = flags_of("cuda"), flags_of("cuda", VLLMConfig(**{name: True}))
    assert [word for word in on if word not in off] == [f"--{name.replace('_', '-')}"]


@pytest.mark.parametrize("name", VALUES)
def test_a_value_becomes_its_flag(name):
    text, flag = VALUES[name]
    given = float(text) if "." in text else int(text) if text.isdigit() else text
    assert value(flags_of("cuda", VLLMConfig(**{name: given})), flag) == text


def test_every_option_is_a_flag_or_says_why_not():
    own = {field.name for field in dataclasses.fields(VLLMConfig)}
    assert own == {*SWITCHES, *VALUES, "seed"} | NO_FLAGS
    assert own - NO_FLAGS <= set(FLAGS["0.32.0"])
    assert choose_table(FLAGS, "vLLM", "0.32.0+cpu", "0.32.0") == (FLAGS["0.32.0"], "")
    assert not any("key" in flag for flag in FLAGS["0.32.0"].values())


def sampled(with_logprobs=True, ids=(1, 2), **sampling):
    return make_sampling(NativeRequest(list(ids), "", sampling), with_logprobs)


def test_sampling_parameters_get_vllms_names():
    made = sampled(
        max_new_tokens=7, min_new_tokens=2, temperature=0.5, stop_token_ids=[3], top_k=-1, top_p=1.0
    )
    assert made | {"max_tokens": 7, "min_tokens": 2, "stop_token_ids": [3], "logprobs": 0} == made
    assert made["detokenize"] is False and sampled(stop=["x"])["detokenize"] is True
    assert sampled()["max_tokens"] == 128 and "logprobs" not in sampled(with_logprobs=False)
    assert "stop_token_ids" not in sampled(ignore_eos=True, stop_token_ids=[3])
    penalties = {"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.5}
    assert made | penalties == sampled(max_new_tokens=7, min_new_tokens=2, temperature=0.5,
                                       stop_token_ids=[3], top_k=-1, top_p=1.0, **penalties)  # fmt: skip


def test_a_sequence_that_goes_on_has_other_random_numbers():
    seeds = [sampled(ids=ids, sampling_seed=7)["seed"] for ids in ([1, 2], [3, 4], [1, 2, 3])]
    assert seeds[0] == seeds[1] != seeds[2] and all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"max_tokens": 4}, "unknown sampling key 'max_tokens'; did you mean 'max_new_tokens'"),
        ({"top_p": 0.9}, "'top_p': with 0.9 vLLM's log-probabilities would leave tokens out"),
        ({"top_k": 5}, "'top_k'"),
        ({"min_p": 0.1, "temperature": 0.5}, "'min_p'"),
    ],
)
def test_what_would_be_wrong_is_refused(sampling, words):
    with pytest.raises(RequestRefused) as caught:
        sampled(**sampling)
    assert words in str(caught.value)


def test_what_leaves_tokens_out_is_served_where_it_changes_no_log_probability():
    assert sampled(with_logprobs=False, top_p=0.9)["top_p"] == 0.9
    assert sampled(temperature=0.0, top_p=0.9)["top_p"] == 0.9


def test_answers_say_which_weights_made_which_token():
    choice = {"token_ids": [5, 1], "finish_reason": "stop", "stop_reason": None}
    choice["logprobs"] = {"content": [{"logprob": -0.5}, {"logprob": -0.25}]}
    choice["weight_versions"] = [
        {"version": "0.1", "start": 0, "end": 1},
        {"version": "0.2", "start": 1, "end": 2},
    ]
    (made,) = convert_to_native("r", {"choices": [choice], "usage": {"prompt_tokens": 4}}, "0.3")
    assert made["output_ids"] == [5, 1] and made["meta_info"]["weight_version"] == "0.2"
    assert made["meta_info"]["output_token_logprobs"] == [[-0.5, 5, None], [-0.25, 1, None]]
    assert made["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}
    nothing = {"token_ids": [], "finish_reason": "abort", "stop_reason": None}
    nothing |= {"logprobs": None, "weight_versions": None}
    (made,) = convert_to_native("r", {"choices": [nothing], "usage": {"prompt_tokens": 4}}, "0.3")
    assert made["meta_info"]["weight_version"] == "0.3" and made["meta_info"]["weight_versions"] == []


@pytest.mark.parametrize("folder", ["", "a-directory-of-a-long-name" * 4])
def test_the_socket_is_in_a_private_folder(tmp_path, monkeypatch, folder):
    (tmp_path / folder).mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folder))
    socket = make_private_socket()
    try:
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        assert len(os.fsencode(socket)) <= 107
    finally:
        socket.parent.rmdir()


def test_a_folder_without_weights_is_no_checkpoint(tmp_path: Path):
    assert not is_checkpoint(tmp_path / "nowhere") and not is_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert is_checkpoint(tmp_path)
