"""The command ``meshwright``: the planner's commands, and those of runtime/commands."""

import sys
from io import TextIOWrapper

from planner.commands.cli import app
from planner.commands.command_group import BAD_INPUT, PROCESS
from planner.files.text import printable
from runtime.commands import (
    calibrate,
    checkpoint,
    diff,
    env,
    evaluate,
    export,
    fuzz,
    generate,
    memory,
    plan,
    prepare,
    report,
    train,
    verify,
)

app.command("plan", epilog=plan.EPILOG)(plan.plan_command)
app.command("verify", epilog=verify.EPILOG)(verify.verify_command)
app.command("memory", epilog=memory.EPILOG)(memory.memory_command)
app.command("train", epilog=train.EPILOG)(train.train_command)
app.command("prepare", epilog=prepare.EPILOG)(prepare.prepare_command)
app.command("evaluate", epilog=evaluate.EPILOG)(evaluate.evaluate_command)
app.command("generate", epilog=generate.EPILOG)(generate.generate_command)
app.command("checkpoint", epilog=checkpoint.EPILOG)(checkpoint.checkpoint_command)
app.command("export", epilog=export.EXPORT_EPILOG)(export.export_command)
app.command("import", epilog=export.IMPORT_EPILOG)(export.import_command)
app.command("diff", epilog=diff.EPILOG)(diff.diff_command)
app.command("calibrate", epilog=calibrate.EPILOG)(calibrate.calibrate_command)
app.command("report", epilog=report.EPILOG)(report.report_command)
app.command("fuzz", epilog=fuzz.EPILOG)(fuzz.fuzz_command)
app.command("env", epilog=env.EPILOG)(env.env_command)


def main() -> None:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal shows ? for × and ·
    try:
        app(prog_name="meshwright", obj=PROCESS)
    except OSError as error:
        try:
            print(file=sys.stderr, flush=True)
        except OSError:  # a full disk behind the error stream: the output has the message
            print(printable(str(error.__context__ or error)))
            raise SystemExit(BAD_INPUT) from None
        raise


if __name__ == "__main__":
    main()
