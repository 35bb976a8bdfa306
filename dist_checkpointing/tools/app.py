"""The program ``dckpt``: its commands, each imported when it is called, and its exit codes."""

from __future__ import annotations

import dataclasses
import io
import os
import pkgutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, NoReturn

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from dist_checkpointing import __version__
from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.tools.report import EXIT_INTERRUPTED, fail, print_json
from dist_checkpointing.tools.torchrun import IS_SILENT

EXIT_BAD_INPUT: Final = 2

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "ls": ("ls:ls", "List a checkpoint, or the steps of a run; follow its saves."),
    "show": ("show:show", "Show one tensor, object or value."),
    "stats": ("stats:stats", "Count files, bytes, dtypes and tensors."),
    "verify": ("verify:verify", "Read everything and name what is damaged."),
    "diff": ("diff:diff", "Compare two checkpoints."),
    "convert": ("convert_command:convert", "Convert it into another format."),
    "plan": ("plan:plan", "Forecast a load on many ranks."),
    "rm-prefix": ("rm_prefix:rm_prefix", "Remove tensors for good."),
    "selftest": ("selftest:selftest", "Try this machine with a small checkpoint."),
}
"""Every command: its module and function, and what it does in a few words."""

_EXPECTED: Final = (
    CheckpointingException,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    ValueError,
)
"""Errors that are printed as one line, without a traceback."""

# typer 0.29 has its own copy of click, older ones import it.
_UsageError: Final[Any] = typer.BadParameter.__base__


class _Program(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run the command. Interrupts and closed pipes are handled here, before typer sees them."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except EOFError as error:
            # typer would take it for the end of the input, and only print "Aborted".
            raise OSError(f"a file ended early: {error}") from error
        except KeyboardInterrupt as error:
            fail(": ".join(["interrupted", *map(str, error.args)]))
            sys.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            # The reader of the output (head, less) has ended.
            _discard_output()
            sys.exit(0)


class _Command(TyperCommand):
    """A command whose module is imported when it is called, because many import torch."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        function = pkgutil.resolve_name(f"dist_checkpointing.tools.{COMMANDS[str(self.name)][0]}")
        loaded = typer.Typer(add_completion=False, rich_markup_mode=None)
        loaded.command(self.name)(function)
        return typer.main.get_command(loaded).make_context(info_name, args, parent, **extra)


app: typer.Typer = typer.Typer(
    cls=_Program,
    name="dckpt",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, (_place, _what) in COMMANDS.items():
    app.command(_name, cls=_Command, short_help=_what)(lambda: None)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"dckpt {__version__}\n")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool,
        Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    debug: Annotated[bool, Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Inspect, verify, compare and convert distributed checkpoints.

    Works on one machine, without a process group, for every backend, also
    for checkpoints of Megatron-Core and torch.distributed.checkpoint.

    Exit code: 2 if a command cannot do what it was asked; some use 1 to
    answer (see their own --help).
    """
    # Used by the callback of the option, and by ``main``, which prints errors.
    del version, debug


def main() -> None:
    debug = "--debug" in sys.argv
    _prepare_output()
    # Allowed anywhere, also after the command.
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        sys.exit(app(arguments, standalone_mode=False) or 0)
    except typer.Abort:
        fail("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except _UsageError as error:
        if not arguments:
            error.show()  # the help
            sys.exit(EXIT_BAD_INPUT)
        text = message = error.format_message()
        if error.ctx is not None:
            text += f"\n{error.ctx.get_usage()}\nTry '{error.ctx.command_path} --help'."
        _fail("UsageError", message, text)
    except _EXPECTED as error:
        if debug:
            raise
        text = _text(error)
        if isinstance(error, CheckpointingException):
            _fail(type(error).__name__, error.message, text, error.findings)
        _fail(type(error).__name__, text, text)


def _fail(kind: str, message: str, text: str, findings: Sequence[Finding] = ()) -> NoReturn:
    if IS_SILENT:
        sys.exit(EXIT_BAD_INPUT)
    # The output itself may be what fails, such as on a full disk.
    try:
        if "--json" in sys.argv:
            # Scripts read the standard output, people the line below.
            rows = list(map(dataclasses.asdict, findings))
            print_json({"error": {"type": kind, "message": message, "findings": rows}})
        sys.stdout.flush()
    except OSError:
        _discard_output()
    with suppress(OSError):
        fail(text)
    sys.exit(EXIT_BAD_INPUT)


def _prepare_output() -> None:
    """Let keys and paths of any characters be printed, and a closed output be no error."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            devnull = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(devnull, "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if IS_SILENT:
        _discard_output()


def _discard_output() -> None:
    """Drop what is still to be written, which would fail again at the end of the process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _text(error: Exception) -> str:
    """The text of an error: one line, and a line for each finding if there are several."""
    if isinstance(error, CheckpointingException) and len(error.findings) == 1:
        return f"{error.message.rstrip('.:')}: {error.findings[0]}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    if isinstance(error, MemoryError | RecursionError):
        return f"{type(error).__name__}: {error}"
    # The text of a KeyError is the repr of its message.
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


if __name__ == "__main__":
    main()
