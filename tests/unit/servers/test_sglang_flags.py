"""SGLang's command line: what the configuration becomes, and what a CPU needs besides."""

import dataclasses

import pytest

from hpc_rl.config.load.load import load
from hpc_rl.config.options.inference import SGLangConfig
from hpc_rl.config.rules.check import check
from hpc_rl.config.sglang_versions import FLAGS
from hpc_rl.servers.server_process import choose_table, make_arguments
from hpc_rl.servers.sglang import NOT_FLAGS, make_settings


def flags_of(device, config=None, index=0, tensor_parallel_size=1):
    settings = make_settings(config or SGLangConfig(), device, tensor_parallel_size, index)
    argv = make_arguments(settings, ["--x"], FLAGS["0.5.23"])
    assert argv[-1] == "--x"
    return argv


def value(argv, flag):
    return argv[argv.index(flag) + 1]


def test_a_gpu_replica_gets_what_the_configuration_says():
    argv = flags_of(
        "cuda", SGLangConfig(random_seed=10, mem_fraction_static=0.8), index=3, tensor_parallel_size=4
    )
    for flag, given in (("--random-seed", "13"), ("--tp-size", "4"), ("--mem-fraction-static", "0.8")):
        assert value(argv, flag) == given
    assert value(argv, "--host") == "127.0.0.1" and value(argv, "--attention-backend") == "fa3"
    assert "--device" not in argv and "--max-total-tokens" not in argv and "None" not in argv


def test_a_cpu_replica_is_bounded_and_takes_native_paths():
    words = ["experiment_name=e", "trial_name=t", "train_dataset.path=/d", "actor.path=/m"]
    words.append("cluster.n_gpus_per_node=0")
    words += ["allocation_mode=sglang:d1+fsdp:d1", "actor.ppo_n_minibatches=1"]
    argv = flags_of("cpu", check(load([], words), files=False).config.sglang)
    assert (value(argv, "--device"), value(argv, "--sampling-backend")) == ("cpu", "pytorch")
    assert value(argv, "--max-total-tokens") == "65536" and "--disable-overlap-schedule" in argv
    assert not {"--mem-fraction-static", "--chunked-prefill-size", "--max-prefill-tokens"} & set(argv)
    assert value(flags_of("cpu", SGLangConfig(max_total_tokens=100)), "--max-total-tokens") == "100"


def test_what_a_request_omits_is_not_taken_from_the_model():
    assert value(flags_of("cuda"), "--sampling-defaults") == "openai"


def test_unknown_version_takes_the_newest_table_and_says_so():
    flags, warning = choose_table(FLAGS, "SGLang", "0.9.1", "")
    assert flags is FLAGS["0.5.23"] and "0.9.1" in warning


def test_a_version_that_is_not_the_configured_one_is_told():
    assert choose_table(FLAGS, "SGLang", "0.5.23", "0.5.23")[1] == ""
    other = choose_table(FLAGS, "SGLang", "0.5.23", "0.4.9")[1]
    assert "sglang.version is 0.4.9, so the options were checked for that" in other
    assert choose_table(FLAGS, "SGLang", "0.5.23+cpu", "") == (FLAGS["0.5.23"], "")


def test_no_secret_can_be_a_flag():
    assert not any("key" in flag for flag in FLAGS["0.5.23"].values())


SWITCHES = [
    field.name
    for field in dataclasses.fields(SGLangConfig)
    if field.default is False and field.name not in NOT_FLAGS
]
VALUES = {
    "torch_compile_max_bs": ("8", "--torch-compile-max-bs"),
    "cuda_graph_max_bs": ("16", "--cuda-graph-max-bs-decode"),
    "triton_attention_num_kv_splits": ("4", "--triton-attention-num-kv-splits"),
    "num_continuous_decode_steps": ("2", "--num-continuous-decode-steps"),
    "attention_backend": ("flashinfer", "--attention-backend"),
    "sampling_backend": ("pytorch", "--sampling-backend"),
    "context_length": ("4096", "--context-length"),
    "mem_fraction_static": ("0.5", "--mem-fraction-static"),
    "max_running_requests": ("64", "--max-running-requests"),
    "max_total_tokens": ("1000", "--max-total-tokens"),
    "chunked_prefill_size": ("2048", "--chunked-prefill-size"),
    "max_prefill_tokens": ("1024", "--max-prefill-tokens"),
    "schedule_policy": ("fcfs", "--schedule-policy"),
    "schedule_conservativeness": ("0.3", "--schedule-conservativeness"),
    "cpu_offload_gb": ("2", "--cpu-offload-gb"),
    "dtype": ("float32", "--dtype"),
    "kv_cache_dtype": ("fp8_e5m2", "--kv-cache-dtype"),
    "ep_size": ("2", "--ep-size"),
    "log_level": ("info", "--log-level"),
    "log_level_http": ("error", "--log-level-http"),
    "log_requests_level": ("1", "--log-requests-level"),
    "decode_log_interval": ("40", "--decode-log-interval"),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_becomes_its_flag(name):
    off, on = flags_of("cuda"), flags_of("cuda", SGLangConfig(**{name: True}))
    added = [word for word in on if word not in off]
    wanted = ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
    assert added == (wanted if name == "disable_cuda_graph" else [f"--{name.replace('_', '-')}"])


@pytest.mark.parametrize("name", VALUES)
def test_a_value_becomes_its_flag(name):
    text, flag = VALUES[name]
    kind = type(getattr(SGLangConfig(), name))
    number = float(text) if kind is float else int(text) if text.isdigit() else text
    assert value(flags_of("cuda", SGLangConfig(**{name: number})), flag) == text


def test_batch_sizes_with_a_cuda_graph_are_a_list_of_words():
    argv = flags_of("cuda", SGLangConfig(cuda_graph_bs=[1, 2, 4]))
    at = argv.index("--cuda-graph-bs-decode")
    assert argv[at + 1 : at + 4] == ["1", "2", "4"]


def test_metrics_are_on_and_can_be_switched_off():
    assert "--enable-metrics" in flags_of("cuda")
    assert "--enable-metrics" not in flags_of("cuda", SGLangConfig(enable_metrics=False))


def test_null_leaves_it_to_sglang():
    names = ["attention_backend", "context_length", "mem_fraction_static", "chunked_prefill_size"]
    names.append("log_level_http")
    argv = flags_of("cuda", SGLangConfig(**dict.fromkeys(names)))
    assert not {f"--{name.replace('_', '-')}" for name in names} & set(argv)


def test_every_option_is_a_flag_or_says_why_not():
    own = {field.name for field in dataclasses.fields(SGLangConfig)}
    tested = {*SWITCHES, *VALUES, "cuda_graph_bs", "enable_metrics", "random_seed"}
    assert own == tested | NOT_FLAGS
    for flags in FLAGS.values():
        assert own - NOT_FLAGS <= set(flags)
