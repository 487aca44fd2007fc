"""Trains, or runs one role of a fleet; also plots, status, keys and copies of runs: `python main.py --help`."""

import errno
import importlib
import sys

from apex_jax.errors import RunError, UsageError
from apex_jax.output import end_output, outlast_lost_output

COMMANDS = {  # which train nothing, and bring a command line of their own
    "plot": "apex_jax.plotting.plot_command",
    "keys": "apex_jax.transport.keys_command",
    "status": "apex_jax.operations.status_command",
    "storage": "apex_jax.operations.storage_command",
}
OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EISDIR}
MODULES = {"replay": "replay_server"}  # of apex_jax.workers; the other roles have their module's name


def main() -> int:
    """Returns the exit code: 0 done, 1 failed, 2 wrong usage, 130 and 143 after SIGINT and SIGTERM."""
    outlast_lost_output()
    try:
        exit_code, prints_its_result = _run()
    except SystemExit as end:  # of --help
        exit_code, prints_its_result = int(end.code or 0), True
    ended = end_output(exit_code)
    return ended if prints_its_result else exit_code


def _run() -> tuple[int, bool]:
    """Returns the exit code, and whether the result is what was printed."""
    try:
        if module := COMMANDS.get("".join(sys.argv[1:2])):
            return int(importlib.import_module(module).run(sys.argv[2:])), True
        from apex_jax.command_line import parse, to_yaml  # not at the top: Ctrl-C may come as early as here

        command = parse(sys.argv[1:])
        if command.action == "print_config":
            print(to_yaml(command.config), end="")
            return 0, True
        if command.role in ("local", "learner"):
            from apex_jax.plotting.provenance import check_resumable  # which takes a second less than JAX

            check_resumable(command.config)
        from apex_jax import device, process  # not before the command is known to be sound

        process.start_log(command.name)
        stop = process.StopSignal()
        stop.install()
        process.check_hosts(command.role, command.config)
        device.choose_device(command.role, command.config)
        device.keep_compiled_programs()
        device.check_device(command.role, command.config)
        worker = importlib.import_module(f"apex_jax.workers.{MODULES.get(command.role, command.role)}")
        return int(worker.run(command.config, command.name, stop)), command.config.evaluator.checkpoint != ""
    except KeyboardInterrupt:  # before the signal was taken over
        return 130, False
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package == "apex_jax":
            raise
        advice = "run `. .venv/bin/activate`, which `make train` makes, or `python -m pip install -r requirements.txt`"
        print(f"error: {sys.executable} has no package {package}: {advice}", file=sys.stderr)
        return 1, False
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code, False
    except RunError as error:
        print(f"{error.prefix}{error}", file=sys.stderr)
        return error.exit_code, False
    except OSError as error:  # a full disk, a file that may not be written: of this machine, not of this program
        advice = "; make room, or choose another run_directory" if error.errno in OF_THE_DISK else ""
        print(f"error: {error}{advice}", file=sys.stderr)
        return 1, False


if __name__ == "__main__":
    sys.exit(main())
