"""The command line: good commands print, bad input ends with one message on stderr, exit code 2 and no traceback."""

import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from passes.lower import PASSES
from planner.commands.command_group import App, Commands
from runtime.cli import app
from runtime.commands.evaluate import evaluate_command
from runtime.commands.train import train_command
from tests.tools.commands import python
from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT

GPT, GPT_SPEC = f"{ROOT / 'examples' / 'gpt.py'}:build", str(ROOT / "examples" / "gpt.yaml")

AUTO = (
    "mesh: auto\nbatch: {global: 8, micro: auto}\ncluster: dgx-h100\ndevices: 2\n"
    "inputs: {input_ids: {shape: [16], dtype: int64, high: 256}, targets: {like: input_ids}}\n"
)
ADVISED = """
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils.logging import get_logger

logger = get_logger("transformers.advice")


class Advised(GPT2LMHeadModel):
    def forward(self, input_ids, labels):
        logger.warning("advice in the forward")
        return super().forward(input_ids, labels=labels)


def build():
    logger.warning("advice in the constructor")
    return Advised(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64, n_positions=16))
"""


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def spec_with(tmp_path, old, new):
    path = tmp_path / "spec.yaml"
    text = Path(GPT_SPEC).read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


def assert_bad_input(result, *words):
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize(
    "command", ["plan", "verify", "memory", "train", "groups", "schedule", "search", "schema", "diff"]
)
def test_help_shows_an_example(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "meshwright" in result.stdout


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["groups", "--world-size", 15, "--tp", 4], ["PlanError: world size 15 is not divisible by", "fix:"]),
        (["groups", "--world-size", 8, "--order", "tp-xp"], ["PlanError", "xp"]),
        (["groups", "--world-size", 0], ["PlanError"]),
        (["groups", "--world-size", "many"], ["--world-size"]),
        (["schedule", "--pp", 4, "--microbatches", 2, "--vpp", 2], ["needs at least 4 microbatches", "fix:"]),
        (["schedule", "--pp", 2, "--microbatches", 4, "--kind", "zigzag"], ["unknown schedule `zigzag`"]),
        (["search", GPT, GPT_SPEC], ["no axis of the mesh is auto", "fix: write mesh: auto"]),
        (["plan", GPT, "no_such.yaml"], ["no_such.yaml"]),
        (["plan", GPT, GPT_SPEC, "--rank", 1], ["--rank selects a rank for --passes", "fix: add --passes"]),
        (["plan", GPT, GPT_SPEC, "--passes", "--format", "json"], ["--passes prints text, not json", "fix:"]),
        (["plan", "no_such_file.py:build", GPT_SPEC], ["no file no_such_file.py"]),
        (["plan", f"{GPT}s", GPT_SPEC], ["no 'builds'", "build"]),
        (["verify", GPT, "no_such.yaml"], ["no_such.yaml"]),
        (["memory", GPT, "no_such.yaml"], ["no_such.yaml"]),
        (["train", GPT, GPT_SPEC], ["no text to train on", "data: {mixture: {PATH: 1}}"]),
        (["train", GPT, GPT_SPEC, "--data", "no_such_text"], ["no file or directory no_such_text"]),
        (["train", GPT, GPT_SPEC, "--data", "stdlib", "--nproc", 3], ["--nproc 3", "the mesh needs 4 processes"]),
        (["train", GPT, GPT_SPEC, "--data", "stdlib", "--plan", "no.pt"], ["--format pt -o FILE"]),
        (
            ["train", GPT, GPT_SPEC, "--data", "stdlib", "--resume", "docs"],
            ["the directory has no saves", "train --save"],
        ),
        (["generate", GPT, GPT_SPEC, "--load", "docs", "--prompt", "a", "--top-p", 7], ["at:  --top-p"]),
        (["nonsense"], ["No such command"]),
        (["groups", "--world-size", "9" * 30], ["groups of 999999999999999999999999999999 ranks", "131072 or less"]),
        (["groups", "--world-size", "9" * 5000], ["--world-size"]),
        (["groups", "--world-size", 8, "--tp", "9" * 30], ["tp is more than 1048576"]),
        (["schedule", "--pp", 10**9, "--microbatches", 10**9], ["1f1b: pp 1000000000", "more than 262144 actions"]),
        (["plan", GPT, "/dev/full"], ["the spec /dev/full is a device, not a regular file", "fix:"]),
        (["verify", GPT, GPT_SPEC, "--tolerance", "nan"], ["a tolerance of nan compares nothing"]),
        (["verify", GPT, GPT_SPEC, "--tolerance", "-1"], ["a tolerance of -1.0 compares nothing"]),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments, words):
    assert_bad_input(run(*arguments), *words)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("mesh:", "#", ["mesh is missing", "fix: add `mesh: {tp: 2, pp: 2}` or `mesh: auto`"]),
        ("tp: 2", "tp: 3", ["4 query heads not divisible by tp = 3", "gpt.py:26", "fix: choose tp from {2, 4}"]),
    ],
)
def test_bad_spec_names_line_and_fix(tmp_path, old, new, words):
    assert_bad_input(run("plan", GPT, spec_with(tmp_path, old, new)), *words)


def test_all_that_is_wrong_with_a_spec_is_one_message(tmp_path):
    path = spec_with(tmp_path, "tp: 2", "tp: two")
    path.write_text(path.read_text().replace("global:", "golbal:"))
    result = run("plan", GPT, path)
    assert_bad_input(
        result, "SpecError: 2 errors in the spec", "mesh.tp must be", "spec.yaml:2", "did you mean 'global'?"
    )
    assert (result.stderr.count("Error:"), result.stderr.count("  fix: ")) == (1, 2)


def test_plan_as_json_round_trips_and_lists_every_parameter(tmp_path):
    from examples.gpt import build
    from planner.frozen_plan import Plan

    file = tmp_path / "plan.json"
    assert run("plan", GPT, GPT_SPEC, "--format", "json", "-o", file).exit_code == 0
    values = json.loads(file.read_text())
    assert json.loads(json.dumps(Plan.load(file).to_dict())) == values
    assert {p["name"] for p in values["parameters"]} == {name for name, _ in build().named_parameters()}
    assert all(p["reason"] for p in values["parameters"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("format", "words"), [("table", "tokens.weight"), ("yaml", "parameters:"), ("html", "<!doctype html>")]
)
def test_plan_prints_in_every_format(format, words):
    result = run("plan", GPT, GPT_SPEC, "--format", format)
    assert result.exit_code == 0, result.output
    assert words in result.stdout


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "written"),
    [
        (["-o", "found.txt"], {"found.txt": "The fastest layouts"}),
        (["-o", "found.yaml"], {"found.yaml": "mesh: {"}),  # as it was before --best
        (["-o", "found.yaml", "--best", "best.yaml"], {"found.yaml": "The fastest layouts", "best.yaml": "mesh: {"}),
        (["-o", "found.json", "--format", "json"], {"found.json": '"best": ['}),
    ],
)
def test_o_of_search_is_the_report_and_best_the_spec(tmp_path, monkeypatch, options, written):
    monkeypatch.chdir(tmp_path)
    Path("auto.yaml").write_text(AUTO)
    result = run("search", GPT, "auto.yaml", "--top", 1, *options)
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {"auto.yaml", *written}
    for name, words in written.items():
        assert words in Path(name).read_text()
    assert ("The fastest layouts" in result.stdout) == (list(written) == ["found.yaml"])


def test_version_and_flags_take_no_value():
    from meshwright import __version__

    assert run("--version").stdout == f"meshwright {__version__}\n"
    for command in ("plan", "train", "verify", "schema"):
        assert "<bool>" not in run(command, "--help").stdout
    assert "<bool>" not in run("--help").stdout


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("report LONG", []),
        ("checkpoint LONG", []),
        ("diff LONG LONG", []),
        ("plan LONG.py:build SPEC", ["no file nnn"]),
        ("plan MODEL LONG", ["cannot read the spec", "File name too long"]),
        ("search hf:LONG SPEC", ["cannot read the config", "File name too long"]),
        ("train MODEL SPEC --data LONG", []),
        ("train MODEL SPEC --data stdlib --resume LONG", []),
        ("evaluate MODEL SPEC --data stdlib --load LONG", []),
        ("prepare LONG -o x", []),
    ],
)
def test_a_name_that_no_file_can_have_is_one_error(given, words):
    known = {"LONG": "n" * 5000, "MODEL": GPT, "SPEC": GPT_SPEC}
    assert_bad_input(run(*re.sub("|".join(known), lambda m: known[m[0]], given).split()), "fix: ", *words)


def test_the_experts_own_tensor_axis_is_called_etp():
    lines = run("groups", "--world-size", 8, "--tp", 2, "--ep", 2, "--etp", 1).stdout.partition("expert groups")[2]
    axes = [line.split()[0] for line in lines.strip().splitlines()[2:]]
    assert axes == ["etp", "ep", "edp", "pp", "etp-ep", "etp-ep-pp", "ep-edp"]


@pytest.mark.parametrize("command", [train_command, evaluate_command])
def test_torchrun_takes_no_option_of_ours_for_its_own(command):
    """It abbreviates: `--log` behind the script is ambiguous to it, and it ends."""
    from torch.distributed.run import get_args_parser

    app = typer.Typer()
    app.command()(command)
    for option in (p for p in typer.main.get_command(app).params if p.opts[0].startswith("--")):
        if option.name == "nproc":  # under torchrun, torchrun says how many
            continue
        assert any(_is_left_alone(get_args_parser(), name) for name in option.opts), option.opts


def _is_left_alone(parser, option):
    try:
        return parser.parse_args(["-m", "runtime.cli", option, "x"]).training_script_args == [option, "x"]
    except SystemExit:
        return False


def test_the_help_of_train_names_the_spelling_for_torchrun():
    assert "Under torchrun: --log-file" in " ".join(run("train", "--help").stdout.replace("│", " ").split())


def test_a_name_of_the_hub_is_not_looked_up_and_the_message_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("plan", "hf:meta/tiny-2", GPT_SPEC)
    assert_bad_input(
        result, "names on the Hugging Face Hub are not supported", "hf download meta/tiny-2 --local-dir tiny-2"
    )


@pytest.mark.thorough
def test_advice_of_transformers_does_not_come_between_our_lines(tmp_path):
    model, spec = tmp_path / "advised.py", tmp_path / "spec.yaml"
    model.write_text(ADVISED)
    spec.write_text(
        "mesh: {tp: 1}\nbatch: {global: 2, micro: 1}\n"
        "inputs: {input_ids: {shape: [16], dtype: int64, high: 64}, labels: {like: input_ids}}\n"
    )
    done = python("-m", "runtime.cli", "plan", f"{model}:build", spec, "--format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mesh"]["tp"] == 1
    assert "advice" not in done.stderr


@pytest.mark.thorough
def test_plan_shows_what_every_pass_changes_for_a_rank():
    result = run("plan", GPT, GPT_SPEC, "--passes", "--rank", 2)
    assert result.exit_code == 0, result.output
    first, *rest = result.stdout.splitlines()
    assert first == "stage 1 of rank 2"
    names = [line.split()[0] for line in rest if line.startswith("  ") and not line.startswith("   ")]
    assert names == ["extract", *(step.name for step in PASSES)]
    assert "       2 ×  + view_6 = aten.reshape(getitem_6, [4, 64, 2, 32])" in rest


@pytest.mark.thorough
def test_passes_of_a_rank_that_is_not_there_are_bad_input():
    assert_bad_input(run("plan", GPT, GPT_SPEC, "--passes", "--rank", 4), "there is no rank 4", "from 0 to 3")


def test_plan_into_a_missing_directory_is_bad_input(tmp_path):
    assert_bad_input(run("plan", GPT, GPT_SPEC, "-o", tmp_path / "no" / "plan.txt"), "cannot write")


@pytest.mark.slow
def test_verify_of_the_plain_gpt_is_green():
    result = run("verify", GPT, GPT_SPEC)
    assert result.exit_code == 0, result.output


@pytest.mark.thorough
@pytest.mark.slow
def test_verify_turns_red_without_a_collective():
    result = run("verify", GPT, GPT_SPEC, "--remove-collective", 3)
    assert result.exit_code == 1, result.output
    assert "DIFFERENT from one process" in result.stdout


@pytest.mark.slow
def test_train_follows_one_process_and_logs_every_step(tmp_path):
    log, files = tmp_path / "log.jsonl", [tmp_path / name for name in ("loss.svg", "trace.json", "board")]
    given = ["--data", "stdlib", "--steps", 3, "--nproc", 4, "--compare", "--log", log]
    shown = ["--plot", files[0], "--profile", 2, "--profile-to", files[1], "--tensorboard", files[2]]
    result = run("train", GPT, GPT_SPEC, *given, *shown)
    assert result.exit_code == 0, result.output
    assert all(file.exists() for file in files)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(abs(row["loss"] - row["one_process_loss"]) < 1e-5 * row["loss"] for row in rows)
    told = ("grad_norm", "tokens_per_s", "step_seconds", "data_share", "flops_per_s", "memory_bytes", "planned_bubble")
    assert all(row[key] > 0 for row in rows for key in told)
    assert all(0 < row["bubble"] < 1 for row in rows)
    assert {row["peak_share"] for row in rows} == {None}


@pytest.mark.thorough
@pytest.mark.slow
def test_train_works_under_torchrun(tmp_path):
    log = tmp_path / "log.jsonl"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4, "-m", "runtime.cli"]
    done = python(*launcher, "train", GPT, GPT_SPEC, "--data", "stdlib", "--steps", 2, "--log-file", log, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(log.read_text().splitlines()) == 2


def test_too_many_open_files_are_no_fault_of_a_file():
    full = App(cls=Commands)

    @full.command("read")
    @full.command("connect")
    def fails(file: str = "") -> None:
        raise OSError(errno.EMFILE, "Too many open files", file or None)

    for arguments in (["read", "--file", "tokens.bin"], ["connect"]):
        assert_bad_input(CliRunner().invoke(full, arguments), "Too many open files", "ulimit -n 1024")


STREAMS = {
    "closed output": (">&-", 0, ""),
    "all closed": ("<&- >&- 2>&-", 0, ""),
    "a full disk": (">/dev/full", 2, "No space left on device\n  at:  the standard output"),
    "a full disk for errors": ("--nonsense 2>/dev/full", 2, "No such option: --nonsense"),
    "a full disk for an error of ours": ("--tp 3 2>/dev/full", 2, "  fix: "),
}


@pytest.mark.thorough
@pytest.mark.sampled(2)
@pytest.mark.parametrize("redirected", STREAMS)
def test_streams_that_cannot_be_written_end_in_no_traceback(redirected):
    redirection, code, words = STREAMS[redirected]
    command = f"exec '{sys.executable}' -m meshwright groups --world-size 4 {redirection}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=HANG_SECONDS)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert words in done.stdout + done.stderr
