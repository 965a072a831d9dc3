"""SGLang's command line: what the configuration becomes, and what a CPU needs besides."""

from __future__ import annotations

from hpc_rl.config.generation import SGLangConfig
from hpc_rl.servers.sglang_flags import FLAGS, arguments, settings_of, table_for


def flags_of(device, config=None, index=0, tensor_parallel_size=1):
    settings = settings_of(config or SGLangConfig(), device, tensor_parallel_size, index)
    argv = arguments(settings, ["--x"], FLAGS["0.5.23"])
    assert argv[:2] == ["-m", "sglang.launch_server"] and argv[-1] == "--x"
    return argv


def value(argv, flag):
    return argv[argv.index(flag) + 1]


def test_a_gpu_replica_gets_what_the_configuration_says():
    argv = flags_of("cuda", SGLangConfig(random_seed=10, mem_fraction_static=0.8), index=3, tensor_parallel_size=4)
    assert (value(argv, "--random-seed"), value(argv, "--tp-size"), value(argv, "--mem-fraction-static")) == ("13", "4", "0.8")
    assert value(argv, "--host") == "127.0.0.1" and value(argv, "--attention-backend") == "fa3"
    assert "--device" not in argv and "--max-total-tokens" not in argv and "None" not in argv


def test_a_cpu_replica_is_bounded_and_takes_native_paths():
    argv = flags_of("cpu", SGLangConfig(dtype="float32", attention_backend="torch_native"))
    assert (value(argv, "--device"), value(argv, "--sampling-backend")) == ("cpu", "pytorch")
    assert value(argv, "--max-total-tokens") == "65536" and "--disable-overlap-schedule" in argv
    assert "--mem-fraction-static" not in argv
    assert value(flags_of("cpu", SGLangConfig(max_total_tokens=100)), "--max-total-tokens") == "100"


def test_what_a_request_omits_does_not_come_from_the_models_generation_config():
    assert value(flags_of("cuda"), "--sampling-defaults") == "openai"


def test_unknown_version_takes_the_newest_table_and_says_so():
    flags, warning = table_for("0.9.1")
    assert flags is FLAGS["0.5.23"] and "0.9.1" in warning
    assert table_for("0.5.23") == (FLAGS["0.5.23"], "")


def test_no_secret_can_be_a_flag():
    assert not any("key" in flag for flag in FLAGS["0.5.23"].values())
