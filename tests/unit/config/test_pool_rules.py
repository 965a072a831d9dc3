"""Rules about pools and about teaching a student refuse before submission, with a remedy."""

import json

import pytest
from command_line import NO_TENSORS

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.config.rules.file_rules import find_context
from hpc_rl.config.rules.generation_rules import BUILT_IN
from hpc_rl.config.rules.pool_rules import check_options
from hpc_rl.config.rules.teacher_rules import REWARD_PARTS
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind
from hpc_rl.plan.plan import make_plan

CPU = "cluster.n_gpus_per_node=0"
GRPO = [
    "experiment_name=e",
    "trial_name=t",
    "train_dataset.path=/d",
    "actor.path=/m",
    "gconfig.n_samples=4",
    CPU,
]
ASKS = "rollout.workflow=my.workflows:ask"
STUDENT = "pools.student.path=/s"
TWO = "allocation_mode=embedded[teacher]:d1+embedded[student]:d1+fsdp:d1"
TEACHER = [*GRPO, "trainer=teacher", STUDENT, TWO]


def collect_refusals(*words: str, base: list[str] = GRPO, files: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(load([], [*base, *words], profiles=[]), files=files)
    return str(caught.value).splitlines()


def load_checked(*words: str, base: list[str] = GRPO):
    return check(load([], [*base, *words], profiles=[]), files=False)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            [STUDENT, "pools.student.url=http://h/v1", TWO],
            "pools.student.path and pools.student.url are both set",
        ),
        (["pools.judge={}"], "pools.judge needs pools.judge.path, the model of its servers, or pools.judge.url"),
        ([STUDENT, TWO, "pools.student.model=m"], "pools.student.model has no effect without pools.student.url"),
        (
            ["pools.judge.url=http://h/v1", "pools.judge.options={max_running_requests: 2}"],
            "pools.judge.options has no effect with pools.judge.url",
        ),
        ([STUDENT, TWO, "pools.student.python=/x/python"], "pools.student.python has no effect, because embedded servers"),
        (["pools.judge.url=host:8000"], "pools.judge.url 'host:8000' can't be used; allowed: a URL such as http"),
        (["pools.judge.url=http://h/v1?key=abc"], "can't be used; allowed: a URL such as http://host:8000/v1, without ? or #."),
        (["pools.judge.url=http://h?key=abc"], "can't be used; allowed: a URL such as http"),
        (["pools.judge.url=http://h/v1#top"], "can't be used; allowed: a URL such as http"),
        (["pools.judge.url=http://me:key@host/v1"], "can't be used; allowed: a URL such as http"),
        (
            ["pools.judge-2.url=http://h/v1", "pools.judge-2.api_key_env=sk-123"],
            "pools.judge-2.api_key_env must be the name of an environment variable, not the key that it holds. "
            "(command line: pools.judge-2.api_key_env)",
        ),
        (
            [STUDENT],
            "pools.student.path: allocation_mode, which is derived, has no servers for this pool; "
            "use embedded:d1+embedded[student]:d1+fsdp:d1.",
        ),
        (
            [STUDENT, "allocation_mode=embedded[teacher]:d2+fsdp:d1"],
            "pools.student.path: allocation_mode embedded[teacher]:d2+fsdp:d1 has no servers for this pool; "
            "use embedded[teacher]:d2+embedded[student]:d1+fsdp:d1.",
        ),
        (
            ["pools.student.url=http://h/v1", TWO],
            "allocation_mode embedded[teacher]:d1+embedded[student]:d1+fsdp:d1 has servers for pool student, but "
            "pools.student.url names an endpoint that runs already; use embedded[teacher]:d1+fsdp:d1.",
        ),
        ([TWO], "set pools.teacher.path or pools.student.path."),
        (
            [STUDENT, "allocation_mode=embedded[student]:d1+fsdp:d1"],
            "must have exactly one pool that is not in section pools",
        ),
    ],
)  # fmt: skip
def test_what_a_pool_is_made_of(words, line):
    (found,) = collect_refusals(ASKS, *words)
    assert line in found


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            "{max_runing_requests: 2}",
            ".max_runing_requests: embedded has no such option. Did you mean max_running_req",
        ),
        (
            "{max_running_requests: 0}",
            "max_running_requests '0' can't be used; allowed: an integer, at least 1.",
        ),
        ("{max_running_requests: many}", "max_running_requests 'many' can't be used; allowed: an integer"),
        ("{batch_invariant: 'yes'}", "batch_invariant 'yes' can't be used; allowed: true, false."),
        (
            "{dtype: float64}",
            "dtype 'float64' can't be used; allowed: bfloat16, float32. Did you mean bfloat16?",
        ),
    ],
)
def test_options_of_one_pool_have_the_types_of_the_section(options, line):
    (found,) = collect_refusals(ASKS, STUDENT, TWO, f"pools.student.options={options}")
    assert "pools.student.options" in found and line in found


def test_options_of_one_pool_are_given_together():
    lines = collect_refusals(ASKS, STUDENT, TWO, "pools.student.options.max_running_requests=2")
    assert lines == [
        "unknown key pools.student.options.max_running_requests (command line: "
        "pools.student.options.max_running_requests): pools.student.options has no keys to set one by "
        "one; give it as a whole, as pools.student.options='{max_running_requests: …}'."
    ]


@pytest.mark.parametrize(("size", "allowed"), [(63, True), (64, False)])
def test_the_name_of_a_pool_has_a_largest_length(size, allowed):
    name = "s" * size
    words = [ASKS, f"pools.{name}.url=http://h/v1"]
    if allowed:
        load_checked(*words)
    else:
        assert "a letter, then up to 62 letters, digits, _ or -" in "".join(collect_refusals(*words))


def test_options_of_one_pool_are_kept_as_text_and_reach_its_servers(tmp_path):
    from hpc_rl.config.pool_view import view_pool

    path = tmp_path / "a.yaml"
    path.write_text(
        "pools: {student: {options: {disable_radix_cache: true, context_length: null, max_total_tokens: 10000, "
        "extra_args: [--log-level-http, info]}}}\n"
    )
    sglang = TWO.replace("embedded", "sglang")
    loaded = load([path], [*GRPO, ASKS, STUDENT, sglang], profiles=[])
    assert loaded.config.pools["student"].options == {
        "disable_radix_cache": "true",
        "context_length": "null",
        "max_total_tokens": "10000",
        "extra_args": '["--log-level-http", "info"]',
    }
    (found,) = (
        line
        for line in collect_refusals(
            *GRPO[2:], ASKS, STUDENT, sglang, base=[*GRPO[:2], *_list_options(loaded)]
        )
    )
    assert "pools.student.options: sglang.extra_args: --log-level-http can't be given" in found
    own = view_pool(loaded.config, "student").sglang
    assert (own.disable_radix_cache, own.context_length, own.max_total_tokens) == (True, None, 10_000)
    assert loaded.config.sglang.context_length == 32768


def test_servers_of_a_pool_may_have_an_interpreter_of_their_own():
    from hpc_rl.config.pool_view import view_pool

    vllm = ["pools.student.python=/vllm/bin/python", "launcher.inference_server_python=/sglang/bin/python"]
    mixed = "allocation_mode=sglang[teacher]:d1+vllm[student]:d1+fsdp:d1"
    config = load([], [*GRPO, ASKS, STUDENT, mixed, *vllm], profiles=[]).config
    pythons = [view_pool(config, name).launcher.inference_server_python for name in ("teacher", "student")]
    assert pythons == ["/sglang/bin/python", "/vllm/bin/python"]


def _list_options(loaded) -> list[str]:
    return [f"pools.student.options={json.dumps(loaded.config.pools['student'].options)}"]


def test_options_that_only_the_trial_sets_are_refused_for_a_pool_too():
    sglang = TWO.replace("embedded", "sglang")
    for options, words in (
        ("{model_path: /x}", "model_path can't be given, because it is pools.student.path"),
        ("{dp_size: 2}", "sglang.dp_size 2 can't be used: allocation_mode sets the number of servers"),
        ("{attention_backend: fa3}", "sglang.attention_backend fa3 can't be used without GPUs"),
    ):
        (found,) = collect_refusals(ASKS, STUDENT, sglang, f"pools.student.options={options}")
        assert found.startswith("pools.student.options: ") and words in found


def test_a_refused_option_of_a_pool_keeps_its_kind_and_remedy():
    sglang = TWO.replace("embedded", "sglang")
    option = "pools.student.options"
    found = []
    for given in ("{dp_size: 2}", "{dtype: float16}"):
        loaded = load([], [*GRPO, ASKS, STUDENT, sglang, f"{option}={given}"], profiles=[])
        found += check_options(loaded.config, loaded.explicit)
    unsupported, without_gpus = found
    assert (unsupported.option, unsupported.kind) == (option, Kind.UNSUPPORTED)
    assert unsupported.related == ("sglang.dp_size", "allocation_mode")
    assert (without_gpus.option, without_gpus.kind) == (option, Kind.MACHINE)
    assert without_gpus.related == ("sglang.dtype", "cluster.n_gpus_per_node")
    assert without_gpus.use == "allowed: bfloat16, float32"


def test_a_pool_that_nobody_asks_is_refused():
    (found,) = collect_refusals(STUDENT, TWO)
    assert (
        "pools.student has no effect: rollout.workflow single_turn and rollout.reward_fn exact_match" in found
    )
    load_checked(STUDENT, TWO, ASKS)
    load_checked("pools.judge.url=http://host/v1", "rollout.reward_fn=my.rewards:judged")


def test_sections_of_all_pools_have_an_effect_and_the_trained_one_decides():
    mixed = "allocation_mode=sglang[student]:d1+embedded[teacher]:d1+fsdp:d1"
    loaded = load_checked(
        STUDENT, mixed, ASKS, "embedded.max_running_requests=4", "vllm.seed=2", "sglang.random_seed=3"
    )
    notes = [note for note in map(str, loaded.notes) if "has no effect" in note]
    assert notes == ["vllm has no effect: the trial has sglang and embedded servers."]
    assert any(note.startswith("sglang.dtype is float32") for note in map(str, loaded.notes))
    (found,) = collect_refusals(STUDENT, mixed, ASKS, "gconfig.min_p=0.5")
    assert "gconfig.min_p 0.5 can't be used with embedded servers" in found


def test_servers_of_a_pool_sample_as_they_can():
    vllm = TWO.replace("embedded[student]", "vllm[student]")
    (found,) = collect_refusals(STUDENT, vllm, ASKS, "pools.student.top_p=0.5")
    assert (
        "pools.student.top_p 0.5 can't be used with vllm servers; use sglang servers: with this option"
        in found
    )
    assert "vllm returns log-probabilities of the filtered tokens" in found
    load_checked(STUDENT, vllm, ASKS, "pools.student.temperature=0.5")
    load_checked(STUDENT, TWO, ASKS, "pools.student.top_p=0.5")


def test_the_context_of_a_pool_is_that_of_its_model_and_servers(tmp_path):
    for name, limit in (("m", 512), ("s", 256)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"max_position_embeddings": limit}))
    words = [f"actor.path={tmp_path}/m", f"pools.student.path={tmp_path}/s", ASKS, TWO]
    config = load([], [*GRPO, *words], profiles=[]).config
    assert (find_context(config), find_context(config, "student")) == (512, 256)
    sglang = "allocation_mode=embedded:d1+sglang[student]:d1+fsdp:d1"
    shorter = [*words, sglang, "pools.student.options={context_length: 128}"]
    config = load([], [*GRPO, *shorter], profiles=[]).config
    assert (find_context(config), find_context(config, "student")) == (512, 128)


def test_the_model_of_a_pool_is_a_checkpoint_with_a_tokenizer(tmp_path):
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "1"}\n')
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).write_bytes(NO_TENSORS if name.startswith("model") else b"")
    base = [*GRPO, f"train_dataset.path={data}", f"actor.path={model}", "gconfig.max_new_tokens=8", TWO, ASKS]
    base.append(f"cluster.fileroot={tmp_path}")
    (found,) = collect_refusals("pools.student.path=org/name", base=base, files=True)
    assert "org/name is not a directory: it must be a Hugging Face checkpoint" in found
    student = tmp_path / "s"
    student.mkdir()
    (student / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    lines = collect_refusals(f"pools.student.path={student}", base=base, files=True)
    assert [line.partition(" (")[0] for line in lines] == [
        f"pools.student.path {student} contains no weights",
        f"pools.student.path {student} has no tokenizer.json: set pools.student.tokenizer_path to a directory that "
        "has one.",
        "pools.student.max_new_tokens 1024 leaves no room for a prompt, because the model's context",
    ]
    (student / "model.safetensors").write_bytes(NO_TENSORS)
    words = [f"pools.student.path={student}", f"pools.student.tokenizer_path={model}"]
    check(load([], [*base, *words, "pools.student.max_new_tokens=8"], profiles=[]))


def test_a_teacher_without_a_student_is_refused_with_what_it_needs():
    assert collect_refusals("trainer=teacher") == [
        "trainer teacher needs a pool student, the model that is taught: set pools.student.path and "
        "allocation_mode embedded:d1+embedded[student]:d1+fsdp:d1, or pools.student.url of an endpoint. "
        "(command line: trainer)"
    ]
    (found,) = collect_refusals("trainer=teacher", TWO)
    assert "set pools.student.path, or pools.student.url of an endpoint." in found
    load_checked("trainer=teacher", "pools.student.url=http://host:8000/v1")


def test_a_teacher_has_a_workflow_and_a_reward_of_its_own():
    loaded = load_checked(base=TEACHER)
    assert (loaded.config.rollout.workflow, loaded.config.rollout.reward_fn) == ("teacher", "final_answer")
    assert not any(
        "rollout.workflow" in note or "rollout.reward_fn" in note for note in map(str, loaded.notes)
    )
    own = load_checked(
        "rollout.workflow=my.own:Teacher", "rollout.reward_fn=exact_match", base=TEACHER
    ).config.rollout
    assert (own.workflow, own.reward_fn) == ("my.own:Teacher", "exact_match")
    plan = make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="local")
    assert (plan.trainer, [pool.name for pool in plan.pools]) == ("teacher", ["teacher", "student"])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["rollout.workflow=single_turn"], "rollout.workflow single_turn can't teach a student; remove it"),
        (["environments.own_prompts=true"], "environments can't be used with trainer teacher"),
        (["teacher.reward_parts=[]"], "teacher.reward_parts is empty, so every reward would be 0"),
        (
            ["teacher.reward_parts=[gian, leak]"],
            "teacher.reward_parts 'gian' is not known; allowed: gain, solved",
        ),
        (["teacher.reward_parts=[gain, my.parts:gain]"], "teacher.reward_parts has gain twice"),
        (
            ["teacher.reward_parts=[gain]", "teacher.efficiency_weight=2"],
            "teacher.efficiency_weight has no effect without efficiency in teacher.reward_parts",
        ),
        (
            ["teacher.templates.with_teaching='{question} {teaching} {ground_truth}'"],
            "teacher.templates.with_teaching: {ground_truth} would tell the student the right answer",
        ),
        (
            ["teacher.templates.baseline=Answer in \\boxed{}."],
            "teacher.templates.baseline must contain {question}, in the place where that text belongs.",
        ),
        (
            ["teacher.templates.with_teaching='{question} {approach}'"],
            "teacher.templates.with_teaching must contain {teaching}",
        ),
        (
            ["teacher.templates.diagnostic='{question} {teaching}'"],
            "teacher.templates.diagnostic: this template can't contain {teaching}; known: {question}.",
        ),
        (
            ["saver.keep_best.metric=eval_loss"],
            "trainer teacher measures eval_accuracy_delta, eval_reward, eval_stud",
        ),
    ],
)
def test_what_a_teacher_can_not_do(words, line):
    base = [*TEACHER, "valid_dataset.path=/v"]
    (found,) = collect_refusals(*words, base=base)
    assert line in found


def test_grpo_has_no_workflow_teacher():
    (found,) = collect_refusals("rollout.workflow=teacher")
    assert "rollout.workflow teacher needs trainer teacher" in found


def test_the_best_teacher_is_kept_by_what_it_measures():
    for metric in ("eval_accuracy_delta", "eval_reward", "eval_student_accuracy", "eval_reward_leak"):
        load_checked(f"saver.keep_best.metric={metric}", "valid_dataset.path=/v", base=TEACHER)
    load_checked("teacher.reward_parts=[my.parts:kind]", "saver.keep_best.metric=eval_reward_kind", "valid_dataset.path=/v",
            base=TEACHER)  # fmt: skip


def test_names_in_templates_are_variables_or_columns_of_the_rows(tmp_path):
    data = tmp_path / "d.jsonl"
    data.write_text('\n{"prompt": "1", "answer": "2", "level": "easy"}\n')
    words = [f"train_dataset.path={data}", f"cluster.fileroot={tmp_path}"]
    lines = collect_refusals(
        *words,
        r"teacher.templates.baseline='{question} at {level} {lvel} \frac{a}{b}'",
        "teacher.templates.adaptive='{question} {aproach}'",
        base=TEACHER,
        files=True,
    )
    found = [line for line in lines if line.startswith("teacher.templates")]
    assert [line.partition(" (command")[0] for line in found] == [
        "teacher.templates.adaptive: {aproach} is neither a variable nor a column of train_dataset.path "
        "(answer, level, prompt). Did you mean approach?",
        "teacher.templates.baseline: {lvel} is neither a variable nor a column of train_dataset.path "
        "(answer, level, prompt). Did you mean level?",
    ]


def test_the_names_that_rules_know_are_those_of_the_tables():
    from hpc_rl.rollout.rewards import BUILTINS, LIMITED
    from hpc_rl.rollout.teacher.reward import PARTS
    from hpc_rl.rollout.workflows import WORKFLOWS

    assert (set(BUILT_IN["workflow"]), set(BUILT_IN["reward_fn"])) == (
        set(WORKFLOWS),
        {*BUILTINS, *LIMITED, "judge", "length"},
    )
    assert tuple(PARTS) == REWARD_PARTS


JUDGE = ["pools.grader.url=http://h/v1", "rollout.reward_fn=judge", "rollout.judge.pool=grader"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (JUDGE[:2], "rollout.reward_fn judge needs the section rollout.judge"),
        ([JUDGE[0], JUDGE[2]], "rollout.judge has no effect: rollout.reward_fn is exact_match"),
        (
            [*JUDGE, "rollout.judge.pool=greader"],
            "pool of section pools; there are: grader. Did you mean grader?",
        ),
        ([*JUDGE, "rollout.judge.template=Good?"], "rollout.judge.template must contain {completion}"),
        ([*JUDGE, "rollout.judge.temperatures=[]"], "rollout.judge.temperatures is empty"),
        ([*JUDGE, "pools.other.url=http://h/v1"], "pools.other has no effect"),
    ],
)
def test_what_a_judge_can_not_do(words, line):
    assert any(line in found for found in collect_refusals(*words))


SCORER = ["pools.liked.path=/r", "allocation_mode=sglang[a]:d1+embedded[liked]:d1+fsdp:d1"]
SCORED = [*SCORER, "rollout.reward_fn=liked,format"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (SCORER, "pools.liked has no effect: rollout.workflow single_turn and rollout.reward_fn exact_match"),
        (["rollout.reward_fn=reward_model"], "the name of a pool with a reward model (pools.NAME.path)"),
        ([*SCORED, "rollout.reward_fn=like"], "Did you mean liked?"),
        (["pools.liked.url=http://h/v1", SCORED[2]], "use pools.liked.path, and servers for it"),
        ([*SCORED, "pools.liked.max_new_tokens=9"], "pools.liked.max_new_tokens has no effect"),
        (
            [*SCORED, "rollout.reward_fn=liked,judge", "rollout.judge.pool=liked"],
            "make a second pool for the answers",
        ),
    ],
)
def test_what_a_reward_model_can_not_do(words, line):
    assert any(line in found for found in collect_refusals(*words))


def test_a_reward_model_and_a_model_that_writes_are_not_taken_for_each_other(tmp_path):
    words = [*SCORED, f"pools.liked.path={tmp_path}"]
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "model.safetensors").write_bytes(NO_TENSORS)
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "2"}]}\n')

    def problems(*more: str, **settings) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps(settings))
        return [
            line
            for line in collect_refusals(*words, *more, files=True)
            if str(tmp_path) in line and "liked" in line
        ]

    assert not problems(architectures=["Qwen3ForSequenceClassification"], id2label={"0": "a"})
    ((writes,), (two,)) = (
        problems(architectures=["Qwen3ForCausalLM"]),
        problems(architectures=["Qwen3ForSequenceClassification"]),
    )
    assert "(Qwen3ForCausalLM) can't be a reward model" in writes and "it has 2 labels" in two
    one = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "a"}}
    (other,) = problems("rollout.workflow=my:own", "rollout.reward_fn=format", **one)
    assert "is a reward model: it scores texts" in other
    (unasked,) = problems(f"train_dataset.path={chats}", **one)
    assert "has no chat template" in unasked


def test_a_judge_scores_in_grpo_and_for_a_teacher(tmp_path):
    assert load_checked(*JUDGE).config.rollout.judge.temperatures == [0.2, 0.5, 0.8]
    assert load_checked(*JUDGE, base=TEACHER).config.rollout.workflow == "teacher"
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "1", "answer": "2"}\n')
    words = [*JUDGE, f"train_dataset.path={data}", "rollout.judge.template='{completion} {anwser} {answer}'"]
    found = [line for line in collect_refusals(*words, files=True) if line.startswith("rollout.judge")]
    assert len(found) == 1 and "{anwser} is neither a variable" in found[0]
    assert "Did you mean answer?" in found[0]


def test_models_that_are_asked_by_chat_need_a_template(tmp_path):
    for name in ("teacher", "student", "judge"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").touch()
    pools = [f"pools.{name}.path={tmp_path / name}" for name in ("student", "judge")]
    base = [
        *TEACHER,
        *pools,
        f"actor.path={tmp_path / 'teacher'}",
        "rollout.reward_fn=judge",
        "rollout.judge={}",
    ]
    base.append(TWO.replace("+fsdp", "+embedded[judge]:d1+fsdp"))

    def without() -> list[str]:
        found = collect_refusals(base=base, files=True)
        return [
            line.split()[0]
            for line in found
            if "has no chat template, but this pool is asked with chat messages" in line
        ]

    assert without() == ["actor.path", "pools.student.path", "pools.judge.path"]
    (tmp_path / "teacher" / "chat_template.jinja").touch()
    (tmp_path / "student" / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert without() == ["pools.judge.path"]
