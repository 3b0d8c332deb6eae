"""Which commands are recognised, what is added to them, and what is refused."""

import sys

import pytest

from fairseq_tutel.launch.commands import (
    check_user_dir,
    parse_command,
    rank_options,
    use_cpu,
    with_options,
)

STAY_HERE = ["hydra.run.dir=.", "hydra.output_subdir=null",
             "hydra.job_logging.handlers.file.filename=/dev/null"]  # fmt: skip
TWO = {"rank": 1, "world_size": 2, "device": 1, "shared_node": True, "cpu": True}
ONE = {"rank": 0, "world_size": 1, "device": 0, "shared_node": False, "cpu": True}
GPU = {"cpu": False}
MEET = "--distributed-init-method env:// --distributed-rank 1 --distributed-no-spawn"
IN_HYDRA = "distributed_training"


@pytest.fixture
def command_of(tmp_path):
    """Parses words; the PATH has fairseq's commands and an interpreter, all empty files."""
    programs = ["train", "eval-lm", "validate", "hydra-train", "generate", "interactive"]
    for name in (*(f"fairseq-{name}" for name in programs), "python", "mytool"):
        (tmp_path / name).touch(mode=0o755)
    return lambda text: parse_command(text.split(), str(tmp_path))


@pytest.mark.parametrize(
    ("text", "name", "program_words"),
    [
        ("fairseq-train data --lr 1", "fairseq-train", 1),
        ("fairseq-hydra-train --config-path x", "fairseq-hydra-train", 1),
        ("python -m fairseq_cli.train data", "fairseq-train", 3),
        ("python -u -X dev -m fairseq_cli.eval_lm data", "fairseq-eval-lm", 6),
        ("python /src/fairseq_cli/hydra_train.py a=1", "fairseq-hydra-train", 2),
        ("python -m fairseq_cli.preprocess data", None, 1),
        ("python -m my.fairseq_cli.train", None, 1),
        ("mytool fairseq-train", None, 1),
    ],
)
def test_recognition(command_of, text, name, program_words):
    command = command_of(text)
    assert (command.name, len(command.program)) == (name, program_words)
    assert list(command.program[1:]) + list(command.arguments) == text.split()[1:]


def test_a_script_runs_with_this_interpreter(tmp_path):
    script = tmp_path / "fairseq_cli" / "train.py"
    script.parent.mkdir()
    script.touch()
    command = parse_command([str(script), "data"], "")
    assert command.name == "fairseq-train" and command.program == (sys.executable, str(script))


@pytest.mark.parametrize(
    ("text", "place", "added"),
    [
        ("train data", TWO, f"--distributed-world-size 2 --device-id 1 {MEET} "
         "--distributed-backend gloo --cpu"),
        ("train data", TWO | GPU, f"--distributed-world-size 2 --device-id 1 {MEET} "
         "--distributed-backend nccl"),
        # fairseq 0.12.2 makes a process group of the rank that RANK and WORLD_SIZE tell of
        ("eval-lm data", ONE, "--distributed-world-size 1 --device-id 0 --cpu "
         "--distributed-backend gloo"),
        ("validate data", ONE | GPU, "--distributed-world-size 1 --device-id 0"),
        ("generate data --path m.pt", TWO, "--distributed-world-size 2 --distributed-rank 1 --cpu"),
        ("generate d --results-path o", ONE | GPU, "--distributed-world-size 1 "
         "--distributed-rank 0"),
        ("interactive data", ONE, "--distributed-world-size 1 --cpu --distributed-backend gloo"),
        # the user's options win
        ("train --distributed-backend=gloo --distributed-init-method tcp://h:1 --cpu "
         "--distributed-world-size 02", TWO, "--device-id 1 --distributed-rank 1 "
         "--distributed-no-spawn"),
    ],
)  # fmt: skip
def test_what_a_rank_gets(command_of, text, place, added):
    command = command_of(f"fairseq-{text}")
    assert with_options(command, rank_options(command, **place))[1:] == [
        *text.split()[1:], *added.split()
    ]  # fmt: skip
    script = command_of("mytool --distributed-world-size 7")
    assert rank_options(script, **place) == {} and with_options(script, {})[1:] == [
        "--distributed-world-size", "7"
    ]  # fmt: skip


def test_hydra_overrides_join_the_users_block(command_of):
    def words_of(text):
        command = command_of(f"fairseq-hydra-train {text}")
        return with_options(command, rank_options(command, **TWO))[1:]

    added = f"""{IN_HYDRA}.distributed_world_size=2 {IN_HYDRA}.device_id=1
        {IN_HYDRA}.distributed_init_method=env:// {IN_HYDRA}.distributed_rank=1
        {IN_HYDRA}.distributed_no_spawn=true {IN_HYDRA}.distributed_backend=gloo common.cpu=true
        {" ".join(STAY_HERE)}""".split()
    assert words_of("task.data=x m.y=2 --job n") == ["task.data=x", "m.y=2", *added, "--job", "n"]
    # without overrides, and with a flag's value like one
    assert words_of("--job a=b") == ["--job", "a=b", *added]
    assert words_of("x=1 --job a=b") == ["x=1", *added, "--job", "a=b"]
    # what only Hydra can resolve
    assert words_of(f"{IN_HYDRA}.distributed_world_size=${{x}}")[1:] == added[1:]


@pytest.mark.parametrize(
    ("words", "config", "added"),
    [
        ("", "common:\n  dir: x\nhydra:\n  verbose: true\n", STAY_HERE),
        ("", "hydra:\n  run:\n    dir: /elsewhere\n", []),
        ("", "hydra:\n  # why\n  job:\n    chdir: true\n", []),
        ("", "defaults:\n- hydra/job_logging: none\n", STAY_HERE[:2]),
        ("hydra.run.dir=/d", "{}", []),
        ("+hydra.job.chdir=true", "{}", []),
        ("--multirun model.x=1,2", "{}", []),
        ("hydra.output_subdir=log", "{}", STAY_HERE[::2]),
    ],
)
def test_hydra_stays_in_its_directory_unless_the_user_chose_one(
    command_of, tmp_path, words, config, added
):
    """Hydra's own default is a directory of its own for every rank."""
    (tmp_path / "own.yaml").write_text(config)
    text = f"--config-dir {tmp_path} --config-name own {words}"
    got = with_options(command_of(f"fairseq-hydra-train {text}"), {})[1:]
    assert [word for word in got if word not in text.split()] == added


CONFIGS = {"small": "common:\n  cpu: true\nmodel:\n  cpu: false\n", "torn": "model: [",
           "big": "common:\n  cpu: false\nother:\n  cpu: true\n"}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "gpus", "cpu"),
    [
        ("train d", 8, False),
        ("train d", 0, True),
        ("train d --cpu", 8, True),
        ("train --cpu d", 8, True),
        ("hydra-train common.cpu=True", 8, True),
        ("hydra-train --config-dir={} -cn small", 8, True),
        ("hydra-train --config-dir={} -cn small common.cpu=false", 8, False),
        ("hydra-train --config-dir={} -cn big", 8, False),
        ("hydra-train --config-dir={} -cn big", 0, True),
        ("hydra-train --config-name tiny_cpu", 8, True),  # a shipped one
        # Hydra's to find
        ("hydra-train --config-dir pkg://a --config-name b", 8, False),
        ("hydra-train --config-path a --config-name b", 8, False),
    ],
)
def test_cpu_or_gpu(command_of, tmp_path, text, gpus, cpu):
    for name, config in CONFIGS.items():
        (tmp_path / f"{name}.yaml").write_text(config)
    assert use_cpu(command_of(f"fairseq-{text.format(tmp_path)}"), gpus) is cpu


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no command given"),
        ("no-such-tool", "cannot find the command 'no-such-tool'"),
        ("train --distributed-world-size x", "--distributed-world-size x: not a number"),
        ("train --distributed-world-size 4",
         "--distributed-world-size=4 contradicts the number of ranks started (2)"),
        ("train --distributed-rank=0",
         "--distributed-rank=0 contradicts the rank of this process (1)"),
        ("train --device-id 0", "--device-id=0 contradicts the GPU of this rank"),
        ("train --local_rank 0", "--device-id=0 contradicts the GPU of this rank"),
        (f"hydra-train {IN_HYDRA}.distributed_world_size=4", "distributed_world_size=4 contradic"),
        (f"hydra-train ++{IN_HYDRA}.distributed_no_spawn=false", "no_spawn=false contradicts"),
        ("generate --distributed-world-size 3", "=3 contradicts"),
        ("generate d --results-path out", "--results-path out is one file, which each of 2 ranks"),
        ("interactive data", "fairseq-interactive runs in one process"),
        ("hydra-train common.cpu=false", "common.cpu=false, but this machine has no usable GPU"),
        ("train d --user-dir fairseq_tutl", "--user-dir fairseq_tutl: there is no such folder"),
        ("train d --user-dir examples/none", "no such folder"),
        ("train d --arch transformer_lm_gpt_moe", "add --user-dir fairseq_tutel"),
        ("hydra-train --config-dir . --config-name big", "such file in . (there are: torn"),
        ("hydra-train --config-name nosuch", "--config-name nosuch: no such file in "),
        ("hydra-train --config-dir /nosuch", "--config-dir /nosuch: there is no such folder"),
        ("hydra-train --config-dir . -cn torn", "torn.yaml: while parsing"),
        ("train --distributed-no-spawn d", ""),
        ("train d --user-dir mine --arch transformer_lm_gpt_moe", ""),
        ("train d --user-dir fairseq_tutel --arch transformer_moe_base", ""),
    ],
)  # fmt: skip
def test_refused(command_of, tmp_path, monkeypatch, text, message):
    (tmp_path / "mine").mkdir()
    (tmp_path / "torn.yaml").write_text(CONFIGS["torn"])
    monkeypatch.chdir(tmp_path)
    text = f"fairseq-{text}" if text and text != "no-such-tool" else text
    said = ""
    try:
        command = command_of(text)
        check_user_dir(command)
        command.number("distributed_world_size")
        use_cpu(command, 0)
        rank_options(command, **(TWO | GPU))
    except ValueError as error:
        said = str(error)
    assert message in said and bool(said) == bool(message), said
