"""Engines with compiled layers against engines without. Compilers other than `inductor` stand in where the
compiled code does not matter: it takes seconds to make.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_rows import some_rows
from engine_weights import whole_weights
from small_engines import assert_close, config_of
from torch._dynamo.backends.debugging import aot_eager
from torch._inductor.utils import fresh_cache

from hpc_rl.config.options.training import FSDPEngineConfig, MicroBatchSpec
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.engines.megatron.engine import MegatronEngine
from hpc_rl.engines.shared import compiled
from hpc_rl.engines.shared.mesh import Mesh
from hpc_rl.trainers.supervised import compute_sequence_loss

# PyTorch shows this warning to nobody, unless warnings are errors
pytestmark = [
    pytest.mark.waits,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
RECOMPUTE = {"gradient_checkpointing": True}
OFFLOAD = {**RECOMPUTE, "fsdp": FSDPEngineConfig(offload_activations=True)}


@pytest.fixture(autouse=True)
def uncompiled():
    """Other tests have compiled the same functions."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiler:
    """A backend of torch.compile that leaves graphs as they are."""

    num_graphs = num_passes = 0

    def __call__(self, graph, inputs):
        self.num_graphs += 1
        run = aot_eager(graph, inputs)

        def count(*args):
            self.num_passes += 1
            return run(*args)

        return count


@pytest.fixture
def compiler(monkeypatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(compiled, "BACKEND", made)
    monkeypatch.setattr(compiled, "check", lambda device: None)
    return made


def engines_of(path: Path, layout=None, **changes) -> list[FSDPEngine]:
    """An engine without compiled layers, and one with them."""
    engines = []
    for compiles in (False, True):
        config = config_of(path, init_from_scratch=True, enable_torch_compile=compiles, **changes)
        engine = FSDPEngine(config, layout=layout)
        engine.initialize(10)
        engines.append(engine)
    return engines


def train(engine: FSDPEngine, lengths=(9, 7, 30, 12, 20)) -> dict[str, float]:
    return engine.train_batch(some_rows(lengths), compute_sequence_loss, 60.0, 0.9)


def compare(plain: FSDPEngine, other: FSDPEngine) -> None:
    """Compare log-probabilities, and loss and gradients of an update; moments hold the gradients."""
    rows = some_rows((9, 7, 30, 12, 20))
    assert_close(other.logprobs(rows, 0.9), plain.logprobs(rows, 0.9), 1e-5)
    assert train(other) == pytest.approx(train(plain), rel=1e-5)
    for name, moments in plain.optimizer.moments.items():
        torch.testing.assert_close(other.optimizer.moments[name][0], moments[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        pytest.param("padded", {}, id="plain"),
        pytest.param("packed", RECOMPUTE, id="recomputed"),
        pytest.param("padded", OFFLOAD, id="offloaded"),
        pytest.param("packed", {**RECOMPUTE, "use_lora": True, "lora_rank": 4}, id="adapter"),
    ],
)
def test_results_equal_those_of_layers_that_are_not_compiled(model_dir, compiler, layout, changes) -> None:
    compare(*engines_of(model_dir, layout, **changes))
    assert compiler.num_passes


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_compiler_of_trials_computes_the_same(model_dir, layout) -> None:
    plain, other = engines_of(model_dir, layout, **RECOMPUTE)
    compare(plain, other)
    assert torch._dynamo.utils.counters["inductor"], "nothing was compiled"


def test_layers_share_a_graph_for_all_sizes_of_micro_batches(model_dir, compiler) -> None:
    _, engine = engines_of(model_dir, "padded", mb_spec=MicroBatchSpec(max_tokens_per_mb=120), **RECOMPUTE)
    rng = np.random.default_rng(0)
    train(engine, (8, 8, 8))
    assert len(engine.model.blocks()) == 2 and compiler.num_graphs == 1
    train(engine, (8,))  # a single row has code of its own
    for lengths in ((8, 8, 8), (8,)):
        engine.logprobs(some_rows(lengths), 1.0)
    known = compiler.num_graphs
    for _ in range(8):
        lengths = tuple(rng.integers(3, 60, size=rng.integers(2, 9)))
        train(engine, lengths)
        engine.logprobs(some_rows(lengths), 1.0)
    assert compiler.num_graphs == known


def test_packed_rows_need_no_graph_of_their_own(model_dir, compiler) -> None:
    _, engine = engines_of(model_dir, "packed", **RECOMPUTE)
    train(engine, (8, 9))
    known = compiler.num_graphs
    for lengths in ((5, 6, 7), (30,), (4,) * 9):
        train(engine, lengths)
    assert compiler.num_graphs == known


def test_the_backward_pass_runs_layers_again_only_where_it_recomputes(model_dir, compiler) -> None:
    passes = []
    for changes in ({}, RECOMPUTE):
        _, engine = engines_of(model_dir, **changes)
        before = compiler.num_passes
        train(engine, (8, 8, 8))
        passes.append(compiler.num_passes - before)
    assert passes == [2, 4]  # of two layers


def test_two_engines_in_one_process(model_dir, compiler) -> None:
    config = config_of(model_dir, init_from_scratch=True, enable_torch_compile=True, **RECOMPUTE)
    frozen = FSDPEngine(config, frozen=True)
    frozen.initialize(0)
    plain, other = engines_of(model_dir, **RECOMPUTE)
    rows = some_rows()
    assert_close(frozen.logprobs(rows, 0.8), plain.logprobs(rows, 0.8), 1e-5)
    compare(plain, other)
    torch.testing.assert_close(whole_weights(other), whole_weights(plain), atol=1e-4, rtol=0)


def test_a_machine_without_a_compiler_is_refused(model_dir) -> None:
    compiled.check.cache_clear()
    config = config_of(model_dir, init_from_scratch=True, enable_torch_compile=True)
    missing = {"cpp.cxx": (None, "no-such-compiler"), "force_disable_caches": True}
    with torch._inductor.config.patch(missing), pytest.raises(ConfigError) as caught:
        FSDPEngine(config)
    [refusal] = caught.value.refusals
    assert (refusal.option, refusal.kind) == ("enable_torch_compile", Kind.MACHINE)
    assert "g++" in refusal.why and "enable_torch_compile false" in refusal.use


def test_a_compiler_that_fails_is_refused_with_its_own_words(tmp_path) -> None:
    program = tmp_path / "g++"
    said = "omp.h: No such file or directory"
    program.write_text(
        f"#!/bin/sh\ncase $* in *--version*) echo g++ 12; exit 0;; esac\necho '{said}' >&2\nexit 1\n"
    )
    program.chmod(0o755)
    compiled.check.cache_clear()
    broken = torch._inductor.config.patch({"cpp.cxx": (str(program),)})
    with broken, fresh_cache(), pytest.raises(ConfigError) as caught:
        compiled.check("cpu")
    [refusal] = caught.value.refusals
    assert refusal.why.endswith(said) and refusal.use.startswith("correct its installation")


def test_a_directory_that_can_not_be_written_is_not_blamed_on_the_compiler(monkeypatch) -> None:
    compiled.check.cache_clear()
    problem = OSError(28, "No space left on device")

    def fail(graph, inputs):
        raise problem

    monkeypatch.setattr(compiled, "BACKEND", fail)
    with pytest.raises(OSError, match="No space left"):
        compiled.check("cpu")


def test_what_can_not_be_compiled_is_refused(model_dir) -> None:
    config = config_of(model_dir, init_from_scratch=True, enable_torch_compile=True)
    with pytest.raises(ConfigError, match=r"enable_torch_compile.*t2"):
        FSDPEngine(config, Mesh(0, 2, tensor=2))
    with pytest.raises(ConfigError, match="enable_torch_compile"):
        MegatronEngine(config)
    with pytest.raises(ConfigError, match="declare its layers"):
        compiled.compile_layers([])
