"""Which commands are recognised, what is added to them, and what is refused."""

import sys

import pytest

from fairseq_tutel.launch.fairseq_commands import (
    check_experts,
    parse_command,
    rank_options,
    use_cpu,
    with_options,
)

STAY_HERE = [
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra.job_logging.handlers.file.filename=/dev/null",
]


@pytest.fixture
def path(tmp_path):
    """A PATH with fairseq's commands and an interpreter, all empty files."""
    for name in (
        "fairseq-train",
        "fairseq-eval-lm",
        "fairseq-validate",
        "fairseq-hydra-train",
        "fairseq-generate",
        "fairseq-interactive",
        "python",
        "mytool",
    ):
        (tmp_path / name).touch(mode=0o755)
    return str(tmp_path)


def command_of(text, path):
    return parse_command(text.split(), path)


def options(command, rank=1, world_size=2, device=1, shared_node=True, cpu=True):
    return rank_options(
        command, rank=rank, world_size=world_size, device=device, shared_node=shared_node, cpu=cpu
    )


@pytest.mark.parametrize(
    "text, name, program_words",
    [
        ("fairseq-train data --lr 1", "fairseq-train", 1),
        ("fairseq-hydra-train --config-name x", "fairseq-hydra-train", 1),
        ("python -m fairseq_cli.train data", "fairseq-train", 3),
        ("python -u -X dev -m fairseq_cli.eval_lm data", "fairseq-eval-lm", 6),
        ("python /src/fairseq_cli/hydra_train.py a=1", "fairseq-hydra-train", 2),
        ("python -m fairseq_cli.preprocess data", None, 1),
        ("python -m my.fairseq_cli.train", None, 1),
        ("python script.py fairseq-train", None, 1),
        ("python -c pass", None, 1),
        ("mytool fairseq-train", None, 1),
    ],
)
def test_recognition(path, text, name, program_words):
    command = command_of(text, path)
    assert command.name == name
    assert len(command.program) == program_words
    assert list(command.program[1:]) + list(command.arguments) == text.split()[1:]


def test_a_script_path_runs_under_this_interpreter(tmp_path):
    script = tmp_path / "fairseq_cli" / "train.py"
    script.parent.mkdir()
    script.touch()
    command = parse_command([str(script), "data"], "")
    assert command.name == "fairseq-train"
    assert command.program == (sys.executable, str(script))


def test_fairseqs_commands_need_no_console_scripts(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    command = parse_command(["fairseq-eval-lm", "data"], "")
    assert command.name == "fairseq-eval-lm" and command.arguments == ("data",)
    assert command.program[1:] == ("-c", "from fairseq_cli.eval_lm import cli_main; cli_main()")


def test_unknown_and_missing_commands():
    with pytest.raises(ValueError, match="cannot find the command 'no-such-tool'"):
        parse_command(["no-such-tool"], "")
    with pytest.raises(ValueError, match="no command given"):
        parse_command([], "")


def test_train_on_the_cpu(path):
    command = command_of("fairseq-train data --lr 0.1", path)
    assert with_options(command, options(command))[1:] == [
        "data",
        "--lr",
        "0.1",
        "--distributed-world-size",
        "2",
        "--device-id",
        "1",
        "--distributed-init-method",
        "env://",
        "--distributed-rank",
        "1",
        "--distributed-no-spawn",
        "--distributed-backend",
        "gloo",
        "--cpu",
    ]


def test_train_on_gpus(path):
    given = options(command_of("fairseq-train data", path), cpu=False)
    assert given["distributed_backend"] == "nccl" and "cpu" not in given


@pytest.mark.parametrize("name", ["fairseq-train", "fairseq-hydra-train", "fairseq-eval-lm"])
def test_one_rank_on_the_cpu_asks_for_no_nccl(path, name):
    """fairseq 0.12.2 makes a process group of the rank that RANK and WORLD_SIZE tell of."""
    given = options(command_of(f"{name} data", path), rank=0, world_size=1, device=0,
                    shared_node=False)  # fmt: skip
    assert given == {
        "distributed_world_size": "1", "device_id": "0", "cpu": None,
        "distributed_backend": "gloo",
    }  # fmt: skip
    given = options(command_of(f"{name} data", path), rank=0, world_size=1, device=0, cpu=False,
                    shared_node=False)  # fmt: skip
    assert given == {"distributed_world_size": "1", "device_id": "0"}


def test_hydra_overrides_join_the_users_block(path):
    command = command_of(
        "fairseq-hydra-train --config-dir c task.data=x model.y=2 --config-name n", path
    )
    words = with_options(command, options(command))[1:]
    first, last = words.index("model.y=2"), words.index("--config-name")
    assert words[:first] == ["--config-dir", "c", "task.data=x"]
    assert words[last:] == ["--config-name", "n"]
    assert words[first + 1 : last] == [
        "distributed_training.distributed_world_size=2",
        "distributed_training.device_id=1",
        "distributed_training.distributed_init_method=env://",
        "distributed_training.distributed_rank=1",
        "distributed_training.distributed_no_spawn=true",
        "distributed_training.distributed_backend=gloo",
        "common.cpu=true",
        *STAY_HERE,
    ]


def test_hydra_stays_in_its_directory_unless_the_user_chose_one(path, tmp_path):
    """Hydra's own default is a directory of its own for every rank."""
    for name, text in (
        ("own", "hydra:\n  run:\n    dir: /elsewhere\n"),
        ("flag", "hydra:\n  # why\n  job:\n    chdir: true\n"),
        ("plain", "common:\n  dir: x\nhydra:\n  verbose: true\n"),
    ):
        (tmp_path / f"{name}.yaml").write_text(text)

    def added(words):
        command = command_of("fairseq-hydra-train " + words, path)
        return with_options(command, {})[1 + len(words.split()) :]

    file = f"--config-dir {tmp_path} --config-name"
    for words in (file + " plain", "--config-name absent", "task.data=d"):
        assert added(words) == STAY_HERE
    for words in (
        file + " own",
        file + " flag",
        "hydra.run.dir=/d",
        "+hydra.job.chdir=true",
        "--multirun model.x=1,2",
    ):
        assert added(words) == []
    assert added("hydra.output_subdir=log") == [STAY_HERE[0], STAY_HERE[2]]


def test_hydra_without_overrides_and_with_a_flags_value_like_one(path):
    command = command_of("fairseq-hydra-train --config-name n --config-dir a=b", path)
    words = with_options(command, options(command))
    assert words[1:5] == ["--config-name", "n", "--config-dir", "a=b"] and len(words) > 5
    command = command_of("fairseq-hydra-train x=1 --config-dir a=b", path)
    words = with_options(command, options(command))
    assert words[1] == "x=1" and words[-2:] == ["--config-dir", "a=b"]


def test_generate_shards_the_data_without_a_process_group(path):
    given = options(command_of("fairseq-generate data --path m.pt", path))
    assert given == {"distributed_world_size": "2", "distributed_rank": "1", "cpu": None}
    to_a_file = command_of("fairseq-generate data --path m.pt --results-path out", path)
    with pytest.raises(ValueError, match="--results-path out is one file, .* 2 ranks"):
        options(to_a_file)
    assert options(to_a_file, 0, 1, 0)["distributed_world_size"] == "1"


def test_interactive_is_one_process(path):
    command = command_of("fairseq-interactive data", path)
    assert options(command, 0, 1, 0) == {
        "distributed_world_size": "1", "cpu": None, "distributed_backend": "gloo"
    }  # fmt: skip
    with pytest.raises(ValueError, match="fairseq-interactive .* 2 ranks"):
        options(command)


def test_scripts_are_left_alone(path):
    command = command_of("mytool --distributed-world-size 7", path)
    assert options(command) == {}
    assert with_options(command, {})[1:] == ["--distributed-world-size", "7"]


def test_the_users_options_win(path):
    command = command_of(
        "fairseq-train d --distributed-backend=gloo --distributed-init-method tcp://h:1 --cpu "
        "--distributed-world-size 2",
        path,
    )
    given = options(command, cpu=True)
    assert set(given) == {"device_id", "distributed_rank", "distributed_no_spawn"}


@pytest.mark.parametrize(
    "text, cpu, message",
    [
        (
            "fairseq-train --distributed-world-size 4",
            True,
            r"--distributed-world-size=4 contradicts the number of ranks started \(2\)",
        ),
        (
            "fairseq-train --distributed-rank=0",
            True,
            r"--distributed-rank=0 contradicts the rank of this process \(1\)",
        ),
        ("fairseq-train --device-id 0", False, r"--device-id=0 contradicts the GPU of this rank"),
        ("fairseq-train --local_rank 0", False, r"--device-id=0 contradicts the GPU of this rank"),
        (
            "fairseq-hydra-train distributed_training.distributed_world_size=4",
            True,
            "distributed_training.distributed_world_size=4 contradicts",
        ),
        (
            "fairseq-hydra-train ++distributed_training.distributed_no_spawn=false",
            True,
            "distributed_no_spawn=false contradicts",
        ),
        ("fairseq-generate --distributed-world-size 3", True, "=3 contradicts"),
    ],
)
def test_contradictions_name_both_sides(path, text, cpu, message):
    with pytest.raises(ValueError, match=message):
        options(command_of(text, path), cpu=cpu)


def test_interpolations_are_left_to_hydra(path):
    command = command_of(
        "fairseq-hydra-train distributed_training.distributed_world_size=${x}", path
    )
    assert "distributed_world_size" not in options(command)


def test_cpu_or_gpu(path):
    assert use_cpu(command_of("fairseq-train d", path), 0)
    assert not use_cpu(command_of("fairseq-train d", path), 8)
    assert use_cpu(command_of("fairseq-train d --cpu", path), 8)
    assert use_cpu(command_of("fairseq-hydra-train common.cpu=True", path), 8)
    for text, gpus, message in (
        ("fairseq-train --distributed-backend nccl", 0, "nccl contradicts this machine has no"),
        ("fairseq-train --cpu --distributed-backend nccl", 8, "nccl contradicts --cpu"),
        ("fairseq-hydra-train common.cpu=false", 0, "common.cpu=false, but this machine"),
    ):
        with pytest.raises(ValueError, match=message):
            use_cpu(command_of(text, path), gpus)


@pytest.mark.parametrize("experts, world_size", [(8, 8), (8, 2), (2, 8), (512, 64), (64, 512)])
def test_experts_that_fit(path, experts, world_size):
    check_experts(command_of(f"fairseq-train --moe-expert-count {experts}", path), world_size)


@pytest.mark.parametrize(
    "text",
    [
        "fairseq-train --moe-expert-count 6",
        "fairseq-train --moe-expert-count=6 --moe-freq 2",
        "fairseq-hydra-train model.moe_expert_count=6",
    ],
)
def test_experts_that_do_not_fit(path, text):
    with pytest.raises(ValueError, match=r"moe.expert.count=6 and a world size of 4: neither"):
        check_experts(command_of(text, path), 4)


def test_ranks_that_hold_all_experts(path, tmp_path):
    grouped = "fairseq-train --moe-expert-count 6 --moe-expert-parallel-size"
    check_experts(command_of(f"{grouped} 2", path), 4)
    check_experts(command_of("fairseq-train --moe-expert-parallel-size 2", path), 4)
    with pytest.raises(ValueError, match=r"size=4 must divide .* of 4 and --moe-expert-count=6"):
        check_experts(command_of(f"{grouped} 4", path), 4)
    (tmp_path / "big.yaml").write_text("model:\n  moe_expert_parallel_size: 8\n")
    text = f"fairseq-hydra-train --config-dir {tmp_path} --config-name big"
    check_experts(command_of(text, path), 16)
    with pytest.raises(ValueError, match=r"size in .*big.yaml=8 must divide the world size of 4"):
        check_experts(command_of(text, path), 4)


def test_cpu_of_a_config_file(path, tmp_path):
    (tmp_path / "small.yaml").write_text(
        "# x\ncommon:\n  fp16: false\n\n  # why\n  cpu: true  # here\nmodel:\n  cpu: false\n"
    )
    (tmp_path / "big.yaml").write_text("common:\n  cpu: false\nother:\n  cpu: true\n")
    for name, cpu in (("small", True), ("big", False), ("absent", False)):
        command = command_of(
            f"fairseq-hydra-train --config-dir {tmp_path} --config-name {name}", path
        )
        assert use_cpu(command, 8) is cpu
        assert use_cpu(command, 0)
    command = command_of(
        f"fairseq-hydra-train common.cpu=false --config-dir={tmp_path} -cn small", path
    )
    assert not use_cpu(command, 8)


def test_experts_of_a_config_file(path, tmp_path):
    (tmp_path / "big.yaml").write_text("model:\n  moe_freq: 2\n  moe_expert_count: 6  # why\n")
    text = f"fairseq-hydra-train --config-dir {tmp_path} --config-name big"
    check_experts(command_of(text, path), 3)
    with pytest.raises(ValueError, match=r"moe_expert_count in .*big.yaml=6 and a world size of 4"):
        check_experts(command_of(text, path), 4)
    check_experts(command_of(text + " model.moe_expert_count=8", path), 4)
    check_experts(command_of(text + " model.moe_freq=0", path), 4)


def test_experts_that_are_not_used(path):
    for text in (
        "fairseq-train --moe-expert-count 6 --moe-freq 0",
        "mytool --moe-expert-count 6",
        "fairseq-train",
        "fairseq-train --moe-expert-count 0",
    ):
        check_experts(command_of(text, path), 4)


def test_fairseqs_parsers_have_every_added_option(path):
    """The names above are fairseq's, with the types it expects."""
    fairseq_options = pytest.importorskip("fairseq.options")
    for text, get_parser in (
        ("fairseq-train", fairseq_options.get_training_parser),
        ("fairseq-validate", fairseq_options.get_validation_parser),
        ("fairseq-eval-lm", fairseq_options.get_eval_lm_parser),
        ("fairseq-generate", fairseq_options.get_generation_parser),
        ("fairseq-interactive", fairseq_options.get_interactive_generation_parser),
    ):
        command = command_of(text, path)
        ranks = (0, 1, 0) if text == "fairseq-interactive" else (3, 4, 1)
        words = with_options(command, options(command, *ranks))[1:]
        parsed, unknown = get_parser().parse_known_args(words)
        assert unknown == []
        assert parsed.cpu is True and parsed.distributed_world_size == ranks[1]
        if command.kind == "grouped":
            assert parsed.distributed_init_method == "env://"
            assert parsed.distributed_no_spawn is True
            assert (parsed.distributed_rank, parsed.device_id) == (3, 1)
            assert parsed.distributed_backend == "gloo"


def test_fairseqs_configuration_and_hydras_parser_have_every_override(path):
    configs = pytest.importorskip("fairseq.dataclass.configs")
    hydra_utils = pytest.importorskip("hydra._internal.utils")
    command = command_of("fairseq-hydra-train task.data=d --config-dir c --config-name n", path)
    words = with_options(command, options(command, 3, 4, 1))[1:]
    overrides = hydra_utils.get_args_parser().parse_args(words).overrides
    assert len(overrides) == 11 and overrides[8:] == STAY_HERE
    sections = {
        "distributed_training": configs.DistributedTrainingConfig,
        "common": configs.CommonConfig,
    }
    for override in overrides[1:8]:
        section, key = override.split("=")[0].split(".")
        assert key in sections[section].__dataclass_fields__
