"""The command line's front door: runs a command and turns whatever goes wrong into one line and an exit code.

Imports nothing at the top: an engine's process imports the parent's main module, this one, once more.
"""


def main() -> None:
    """The `nemolocal` command."""
    import sys

    from nemolocal.cli import output

    output.prepare_streams()
    sys.excepthook = output.report_bug
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command. Returns 0 for good, 1 for failed, 2 for wrong usage, 130 for Ctrl-C."""
    import sys

    from typer.exceptions import Abort, TyperException

    from nemolocal.cli import output
    from nemolocal.cli.commands import app
    from nemolocal.errors import NemoLocalError, UsageError

    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("--help", "-h", "--version")):
        arguments = ["ui", *arguments]
    try:
        code = app(args=arguments, prog_name="nemolocal", standalone_mode=False)
        sys.stdout.flush()
    except TyperException as error:
        if error.format_message():  # empty where a group without a command has just printed its help
            output.error(output.describe_usage(error))
        return error.exit_code
    except NemoLocalError as error:
        output.error(str(error))
        return 2 if isinstance(error, UsageError) else 1
    except (Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        output.drop_stdout()
        return 1
    except OSError as error:
        output.error(output.describe_os_error(error))
        return 1
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    main()
