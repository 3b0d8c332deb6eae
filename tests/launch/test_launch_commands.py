"""Which commands are recognised, what is added to them, and what is refused."""

import sys

import pytest

from fairseq_tutel.launch import commands

STAY = ["hydra.run.dir=.", "hydra.output_subdir=null",
        "hydra.job_logging.handlers.file.filename=/dev/null"]  # fmt: skip
TWO = {"rank": 1, "world_size": 2, "device": 1, "shared_node": True, "cpu": True}
ONE = {"rank": 0, "world_size": 1, "device": 0, "shared_node": False, "cpu": True}
GPU = {"cpu": False}
MEET = "--distributed-init-method env:// --distributed-rank 1 --distributed-no-spawn"
H = "distributed_training.distributed"
MEET_IN_HYDRA = f"""distributed_training.device_id=1 {H}_init_method=env:// {H}_rank=1
    {H}_no_spawn=true {H}_backend=gloo common.cpu=true {" ".join(STAY)}"""
HYDRA, OWN = f"{H}_world_size=2 {MEET_IN_HYDRA}", "hydra-train --config-dir . -cn"
CONFIGS = {
    "small": "common:\n  cpu: true\n  dir: x\nmodel:\n  cpu: false\nhydra:\n  verbose: true\n",
    "big": "common:\n  cpu: false\nother:\n  cpu: true\n",
    "away": "hydra:\n  run:\n    dir: /elsewhere\n",
    "moved": "hydra:\n  # why\n  job:\n    chdir: true\n",
    "quiet": "defaults:\n- hydra/job_logging: none\n",
    "torn": "model: [",
}


@pytest.fixture
def command_of(tmp_path, monkeypatch):
    """Parses words where the configs are; the PATH has empty files as commands."""
    programs = ("train", "eval-lm", "validate", "hydra-train", "generate", "interactive", "mytool")
    for name in (*(f"fairseq-{name}" for name in programs), "python"):
        (tmp_path / name).touch(mode=0o755)
    for folder in ("fairseq_cli", "mine"):
        (tmp_path / folder).mkdir()
    (tmp_path / "fairseq_cli" / "train.py").touch()
    for name, config in CONFIGS.items():
        (tmp_path / f"{name}.yaml").write_text(config)
    monkeypatch.chdir(tmp_path)
    return lambda text: commands.parse_command(text.split(), str(tmp_path))


def test_recognition(command_of):
    for text, name, program_words in (
        ("fairseq-train data --lr 1", "fairseq-train", 1),
        ("fairseq-hydra-train --config-path x", "fairseq-hydra-train", 1),
        ("python -m fairseq_cli.train data", "fairseq-train", 3),
        ("python -u -X dev -m fairseq_cli.eval_lm data", "fairseq-eval-lm", 6),
        ("python /src/fairseq_cli/hydra_train.py a=1", "fairseq-hydra-train", 2),
        ("python -m fairseq_cli.preprocess data", None, 1),
        ("python -m my.fairseq_cli.train", None, 1),
        ("fairseq-mytool fairseq-train", None, 1),
        ("fairseq_cli/train.py data", "fairseq-train", 2),  # with this interpreter
    ):
        command, words = command_of(text), text.split()
        script = command.program[0] == sys.executable
        assert (command.name, len(command.program)) == (name, program_words), text
        assert [*command.program[1:], *command.arguments] == words[0 if script else 1 :], text
        assert script == text.startswith("fairseq_cli"), text


@pytest.mark.parametrize(
    ("text", "place", "added"),
    [
        ("train data {}", TWO, f"--distributed-world-size 2 --device-id 1 {MEET} "
         "--distributed-backend gloo --cpu"),
        ("train data {}", TWO | GPU, f"--distributed-world-size 2 --device-id 1 {MEET} "
         "--distributed-backend nccl"),
        # fairseq 0.12.2 makes a process group of the rank that RANK and WORLD_SIZE tell of
        ("eval-lm data {}", ONE, "--distributed-world-size 1 --device-id 0 --cpu "
         "--distributed-backend gloo"),
        ("validate data {}", ONE | GPU, "--distributed-world-size 1 --device-id 0"),
        ("generate data {}", TWO, "--distributed-world-size 2 --distributed-rank 1 --cpu"),
        ("generate d --results-path o {}", ONE | GPU, "--distributed-world-size 1 "
         "--distributed-rank 0"),
        ("interactive d {}", ONE, "--distributed-world-size 1 --cpu --distributed-backend gloo"),
        # the user's options win
        ("train --distributed-backend=gloo --distributed-init-method tcp://h:1 --cpu "
         "--distributed-world-size 02 {}", TWO, "--device-id 1 --distributed-rank 1 "
         "--distributed-no-spawn"),
        ("mytool --distributed-world-size 7 {}", TWO, ""),
        # Hydra takes one block of overrides, and a flag's value can look like one
        ("hydra-train task.data=x m.y=2 {} --job n", TWO, HYDRA),
        ("hydra-train --job a=b {}", TWO, HYDRA),
        ("hydra-train x=1 {} --job a=b", TWO, HYDRA),
        (f"hydra-train {H}_world_size=${{{{x}}}} {{}}", TWO, MEET_IN_HYDRA),  # Hydra's to resolve
        # Hydra's own default is a directory of its own for every rank
        (f"{OWN} small {{}}", None, " ".join(STAY)),
        (f"{OWN} away {{}}", None, ""),
        (f"{OWN} moved {{}}", None, ""),
        (f"{OWN} quiet {{}}", None, " ".join(STAY[:2])),
        (f"{OWN} small hydra.run.dir=/d {{}}", None, ""),
        (f"{OWN} small +hydra.job.chdir=true {{}}", None, ""),
        (f"{OWN} small --multirun model.x=1,2 {{}}", None, ""),
        (f"{OWN} small hydra.output_subdir=log {{}}", None, " ".join(STAY[::2])),
    ],
)  # fmt: skip
def test_what_a_rank_gets(command_of, text, place, added):
    command = command_of(f"fairseq-{text.format('')}")
    options = commands.rank_options(command, **place) if place else {}
    assert commands.with_options(command, options)[1:] == text.format(added).split()[1:]


def test_cpu_or_gpu(command_of):
    on_cpu = ["train d --cpu", "train --cpu d", "hydra-train common.cpu=True", f"{OWN} small",
              "hydra-train --config-name tiny_cpu"]  # fmt: skip
    on_gpu = ["train d", f"{OWN} small common.cpu=false", f"{OWN} big",
              # Hydra's to find
              "hydra-train --config-dir pkg://a --config-name b",
              "hydra-train --config-path a --config-name b"]  # fmt: skip
    for text in on_cpu + on_gpu:
        command = command_of(f"fairseq-{text}")
        assert commands.use_cpu(command, 8) is (text in on_cpu), text
        assert "=false" in text or commands.use_cpu(command, 0), text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no command given"),
        ("no-such-tool", "cannot find the command 'fairseq-no-such-tool'"),
        ("train --distributed-world-size x", "--distributed-world-size x: not a number"),
        ("train --distributed-world-size 4",
         "--distributed-world-size=4 contradicts the number of ranks started (2)"),
        ("train --distributed-rank=0",
         "--distributed-rank=0 contradicts the rank of this process (1)"),
        ("train --device-id 0", "--device-id=0 contradicts the GPU of this rank"),
        ("train --local_rank 0", "--device-id=0 contradicts the GPU of this rank"),
        (f"hydra-train {H}_world_size=4", "distributed_world_size=4 contradic"),
        (f"hydra-train ++{H}_no_spawn=false", "no_spawn=false contradicts"),
        ("generate --distributed-world-size 3", "=3 contradicts"),
        ("generate d --results-path out", "--results-path out is one file, which each of 2 ranks"),
        ("interactive data", "fairseq-interactive runs in one process"),
        ("hydra-train common.cpu=false", "common.cpu=false, but this machine has no usable GPU"),
        ("train d --user-dir fairseq_tutl", "--user-dir fairseq_tutl: there is no such folder"),
        ("train d --user-dir examples/none", "no such folder"),
        ("train d --arch transformer_lm_gpt_moe", "add --user-dir fairseq_tutel"),
        (f"{OWN} huge", "such file in . (there are: away, big, moved, quiet, small, torn)"),
        ("hydra-train --config-name nosuch", "--config-name nosuch: no such file in "),
        ("hydra-train --config-dir /nosuch", "--config-dir /nosuch: there is no such folder"),
        (f"{OWN} torn", "torn.yaml: while parsing"),
        ("train --distributed-no-spawn d", ""),
        ("train d --user-dir mine --arch transformer_lm_gpt_moe", ""),
        ("train d --user-dir fairseq_tutel --arch transformer_moe_base", ""),
    ],
)  # fmt: skip
def test_refused(command_of, text, message):
    said = ""
    try:
        command = command_of(text and f"fairseq-{text}")
        commands.check_user_dir(command)
        command.number("distributed_world_size")
        commands.use_cpu(command, 0)
        commands.rank_options(command, **(TWO | GPU))
    except ValueError as error:
        said = str(error)
    assert message in said and bool(said) == bool(message), said
