"""Which commands are recognised, what is added to them, and what is refused."""

import contextlib
import sys

import pytest
from helpers.programs import ROOT

from fairseq_tutel.launch.commands import (
    check_user_dir,
    parse_command,
    rank_options,
    use_cpu,
    with_options,
)

STAY_HERE = ["hydra.run.dir=.", "hydra.output_subdir=null",
             "hydra.job_logging.handlers.file.filename=/dev/null"]  # fmt: skip


@pytest.fixture
def path(tmp_path):
    """A PATH with fairseq's commands and an interpreter, all empty files."""
    programs = ["train", "eval-lm", "validate", "hydra-train", "generate", "interactive"]
    for name in (*(f"fairseq-{name}" for name in programs), "python", "mytool"):
        (tmp_path / name).touch(mode=0o755)
    return str(tmp_path)


@pytest.fixture
def command_of(path):
    return lambda text: parse_command(text.split(), path)


def options(command, rank=1, world_size=2, device=1, **given):
    place = {"rank": rank, "world_size": world_size, "device": device}
    return rank_options(command, **place, **{"shared_node": True, "cpu": True, **given})


def words_of(command, *place):
    return with_options(command, options(command, *place))[1:]


@pytest.mark.parametrize(
    "text, name, program_words",
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
    assert command.name == name
    assert len(command.program) == program_words
    assert list(command.program[1:]) + list(command.arguments) == text.split()[1:]


def test_script_paths_and_unknown_and_missing_commands(tmp_path):
    script = tmp_path / "fairseq_cli" / "train.py"
    script.parent.mkdir()
    script.touch()
    command = parse_command([str(script), "data"], "")
    assert command.name == "fairseq-train"
    assert command.program == (sys.executable, str(script))  # this interpreter
    with pytest.raises(ValueError, match="cannot find the command 'no-such-tool'"):
        parse_command(["no-such-tool"], "")
    with pytest.raises(ValueError, match="no command given"):
        parse_command([], "")
    with pytest.raises(ValueError, match="--distributed-port x: not a number"):
        parse_command([str(script), "--distributed-port", "x"]).number("distributed_port")


def test_train_on_the_cpu(command_of):
    command = command_of("fairseq-train data --lr 0.1")
    assert " ".join(words_of(command)) == (
        "data --lr 0.1 --distributed-world-size 2 --device-id 1 --distributed-init-method env:// "
        "--distributed-rank 1 --distributed-no-spawn --distributed-backend gloo --cpu"
    )
    given = options(command, cpu=False)
    assert given["distributed_backend"] == "nccl" and "cpu" not in given


@pytest.mark.parametrize("name", ["fairseq-train", "fairseq-hydra-train", "fairseq-eval-lm"])
def test_one_rank_on_the_cpu_asks_for_no_nccl(command_of, name):
    """fairseq 0.12.2 makes a process group of the rank that RANK and WORLD_SIZE tell of."""
    command, one = command_of(f"{name} data"), {"distributed_world_size": "1", "device_id": "0"}
    given = options(command, 0, 1, 0, shared_node=False)
    assert given == {**one, "cpu": None, "distributed_backend": "gloo"}
    assert options(command, 0, 1, 0, shared_node=False, cpu=False) == one


def test_hydra_overrides_join_the_users_block(command_of):
    text = "fairseq-hydra-train --config-path c task.data=x model.y=2 --config-name n"
    where = "distributed_training"
    assert " ".join(words_of(command_of(text))) == (
        f"--config-path c task.data=x model.y=2 {where}.distributed_world_size=2 "
        f"{where}.device_id=1 {where}.distributed_init_method=env:// {where}.distributed_rank=1 "
        f"{where}.distributed_no_spawn=true {where}.distributed_backend=gloo common.cpu=true "
        f"{' '.join(STAY_HERE)} --config-name n"
    )
    # without overrides, and with a flag's value like one
    words = words_of(command_of("fairseq-hydra-train --job a=b"))
    assert words[:2] == ["--job", "a=b"] and len(words) > 2
    words = words_of(command_of("fairseq-hydra-train x=1 --job a=b"))
    assert words[0] == "x=1" and words[-2:] == ["--job", "a=b"]


def test_hydra_stays_in_its_directory_unless_the_user_chose_one(command_of, tmp_path):
    """Hydra's own default is a directory of its own for every rank."""
    for name, text in (
        ("own", "hydra:\n  run:\n    dir: /elsewhere\n"),
        ("flag", "hydra:\n  # why\n  job:\n    chdir: true\n"),
        ("plain", "common:\n  dir: x\nhydra:\n  verbose: true\n"),
    ):
        (tmp_path / f"{name}.yaml").write_text(text)

    def added(words):
        command = command_of("fairseq-hydra-train " + words)
        return with_options(command, {})[1 + len(words.split()) :]

    file = f"--config-dir {tmp_path} --config-name"
    for words in (file + " plain", "--config-name config", "task.data=d"):
        assert added(words) == STAY_HERE
    own = "hydra.run.dir=/d", "+hydra.job.chdir=true", "--multirun model.x=1,2"
    for words in (file + " own", file + " flag", *own):
        assert added(words) == []
    assert added("hydra.output_subdir=log") == [STAY_HERE[0], STAY_HERE[2]]


def test_generate_shards_the_data_and_interactive_is_one_process(command_of):
    given = options(command_of("fairseq-generate data --path m.pt"))
    assert given == {"distributed_world_size": "2", "distributed_rank": "1", "cpu": None}
    to_a_file = command_of("fairseq-generate data --path m.pt --results-path out")
    with pytest.raises(ValueError, match="--results-path out is one file, .* 2 ranks"):
        options(to_a_file)
    assert options(to_a_file, 0, 1, 0)["distributed_world_size"] == "1"
    command = command_of("fairseq-interactive data")
    given = {"distributed_world_size": "1", "cpu": None, "distributed_backend": "gloo"}
    assert options(command, 0, 1, 0) == given
    with pytest.raises(ValueError, match="fairseq-interactive runs in one process"):
        options(command)


def test_scripts_are_left_alone_and_the_users_options_win(command_of):
    command = command_of("mytool --distributed-world-size 7")
    assert options(command) == {}
    assert with_options(command, {})[1:] == ["--distributed-world-size", "7"]
    own = "--distributed-backend=gloo --distributed-init-method tcp://h:1 --cpu"
    given = options(command_of(f"fairseq-train d {own} --distributed-world-size 2"), cpu=True)
    assert set(given) == {"device_id", "distributed_rank", "distributed_no_spawn"}


@pytest.mark.parametrize(
    "text, message",
    [
        ("train --distributed-world-size 4",
         r"--distributed-world-size=4 contradicts the number of ranks started \(2\)"),
        ("train --distributed-rank=0",
         r"--distributed-rank=0 contradicts the rank of this process \(1\)"),
        ("train --device-id 0", "--device-id=0 contradicts the GPU of this rank"),
        ("train --local_rank 0", "--device-id=0 contradicts the GPU of this rank"),
        ("hydra-train {}.distributed_world_size=4", "{}.distributed_world_size=4 contradicts"),
        ("hydra-train ++{}.distributed_no_spawn=false", "distributed_no_spawn=false contradicts"),
        ("generate --distributed-world-size 3", "=3 contradicts"),
    ],
)  # fmt: skip
def test_contradictions_name_both_sides(command_of, text, message):
    text, message = (x.format("distributed_training") for x in (text, message))
    with pytest.raises(ValueError, match=message):
        options(command_of(f"fairseq-{text}"), cpu="GPU" not in message)


def test_interpolations_are_left_to_hydra(command_of):
    text = "fairseq-hydra-train distributed_training.distributed_world_size=${x}"
    assert "distributed_world_size" not in options(command_of(text))


def test_cpu_or_gpu(command_of, tmp_path):
    (tmp_path / "small.yaml").write_text("common:\n  cpu: true\nmodel:\n  cpu: false\n")
    (tmp_path / "big.yaml").write_text("common:\n  cpu: false\nother:\n  cpu: true\n")
    file = f"hydra-train --config-dir={tmp_path} -cn"
    for text, cpu in (
        ("train d", False),
        ("train d --cpu", True),
        ("hydra-train common.cpu=True", True),
        (f"{file} small", True),
        (f"{file} small common.cpu=false", False),
        (f"{file} big", False),
        ("hydra-train --config-name tiny_cpu", True),  # a shipped one
    ):
        assert use_cpu(command_of(f"fairseq-{text}"), 8) is cpu, text
    for text in ("train d", f"{file} big"):
        assert use_cpu(command_of(f"fairseq-{text}"), 0)
    with pytest.raises(ValueError, match="common.cpu=false, but this machine"):
        use_cpu(command_of("fairseq-hydra-train common.cpu=false"), 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fairseq-train DATA --user-dir fairseq_tutl", "--user-dir fairseq_tutl: .*no such folder"),
        ("fairseq-train DATA --arch transformer_lm_gpt_moe", "add --user-dir fairseq_tutel"),
        ("fairseq-train DATA --user-dir mine --arch transformer_lm_gpt_moe", ""),
        ("fairseq-train DATA --user-dir fairseq_tutel --arch transformer_moe_base", ""),
        ("fairseq-train DATA --user-dir examples/none", "no such folder"),
        ("mytool --user-dir fairseq_tutl", ""),
    ],
)
def test_user_dirs_that_fairseq_would_not_find(command_of, tmp_path, monkeypatch, text, message):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        check_user_dir(command_of(text))


def test_configs_that_are_not_there(command_of, tmp_path):
    (tmp_path / "torn.yaml").write_text("model: [")
    for words, message in (
        (f"--config-dir {tmp_path} --config-name big", "--config-name big: .*there are: torn"),
        ("--config-name nosuch", "--config-name nosuch: .*there are: .*meta_1.1t"),
        ("--config-dir /nosuch", "--config-dir /nosuch: there is no such folder"),
        (f"--config-dir {tmp_path} --config-name torn", "torn.yaml: while parsing"),
    ):
        with pytest.raises(ValueError, match=message):
            command_of(f"fairseq-hydra-train {words}")
    for words in ("--config-dir pkg://a --config-name b", "--config-path a --config-name b"):
        assert not command_of(f"fairseq-hydra-train {words}").config  # Hydra's to find


def test_ranks_and_restarts_of_hydra_save_into_one_directory(tmp_path, programs):
    """Which is relative; of a config that tells Hydra nothing."""
    text = (ROOT / "configs" / "tiny_cpu.yaml").read_text()
    (tmp_path / "own.yaml").write_text(text[text.index("common:") :])
    words = f"fairseq-hydra-train --config-dir {tmp_path} --config-name own model.decoder_layers=2"
    words += " task.dataset_size=200 checkpoint.save_dir=saved optimization.max_update="
    for updates in (2, 4):
        done = programs.run(f"{words}{updates}".split(), ranks=2, cwd=tmp_path, timeout=120)
        assert done.status == 0, done.text[-3000:]
    assert "(epoch 1 @ 2 updates)" in done.text
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {f"checkpoint_last-{part}.pt" for part in ("shared", "rank-0", "rank-1")} <= names
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "own.yaml"}
