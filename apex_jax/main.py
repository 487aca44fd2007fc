"""The program: trains, or runs one role of a fleet; or one of the commands plot, status, keys, storage, tasks, check,
export, film."""

import errno
import importlib
import os
import sys

from apex_jax.host.errors import RunError, UsageError, first_line
from apex_jax.host.machine import FIX_OF_THREADS
from apex_jax.host.output import outlast_full_disk, printed
from apex_jax.host.program import CHECKOUT, NAME

COMMANDS = {  # they train nothing, and each has a command line of its own
    "plot": "apex_jax.plotting.plot",
    "keys": "apex_jax.transport.keys",
    "status": "apex_jax.operations.status_command",
    "storage": "apex_jax.operations.storage_copy",
    "tasks": "apex_jax.operations.tasks_command",
    "check": "apex_jax.operations.check_command",
    "export": "apex_jax.export.export_command",
    "film": "apex_jax.workers.film_command",
}
OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EISDIR}
MODULES = {"replay": "replay_server"}  # in apex_jax.workers; the other roles are named like their modules
FIRST_COMMANDS = """Try one of these, or --help:
  apex-jax --config walker                                two legs learn to walk, in two minutes
  apex-jax environment.task=Breakout-v5 total_minutes=15  a game of Atari
  apex-jax environment.task=gymnasium:my_file:MyEnv       your own environment"""


def main() -> int:
    """Returns the exit code: 0 done, 1 failed, 2 wrong usage, 130, 141, 143 as after SIGINT, SIGPIPE, SIGTERM."""
    outlast_full_disk()
    try:
        if NAME == "apex-jax" and len(sys.argv) == 1:
            print(FIRST_COMMANDS)
            return printed(0)
        if module := COMMANDS.get("".join(sys.argv[1:2])):
            return printed(int(importlib.import_module(module).run(sys.argv[2:])))
        from apex_jax.config.command_line import parse  # not at the top, so that Ctrl-C during the import is caught
        from apex_jax.config.load import to_yaml

        presets = "apex_jax.environments.preset"  # imported only if a task is given
        command = parse(sys.argv[1:], lambda given: importlib.import_module(presets).preset_of(given))
        if command.why:
            print(command.why, file=sys.stderr, flush=True)
        if command.action == "print_config":
            print(to_yaml(command.config), end="")
            return printed(0)
        if command.role in ("local", "learner"):
            from apex_jax.run.provenance import check_resumable  # this module needs no JAX, whose import takes a second

            check_resumable(command.config)
        from apex_jax import device, process  # imported after the command was checked

        # Evaluating a checkpoint writes no metrics, and a supervisor has checked for its roles.
        if not command.config.evaluator.checkpoint and not os.environ.get(process.SUPERVISED):
            from apex_jax.run.loggers import check_loggers

            check_loggers(command.config)
        process.start_log(command.name)
        stop = process.StopSignal()
        stop.install()
        process.check_hosts(command.role, command.config)
        role = "one_process" if command.role == "local" and command.config.processes == "one" else command.role
        device.choose_device(role, command.config)
        device.keep_compiled_programs()
        device.check_device(role, command.config)
        if command.seeds:
            series = importlib.import_module("apex_jax.workers.series")
            return int(series.run(command.config, command.seeds, command.name, stop))
        worker = importlib.import_module(f"apex_jax.workers.{MODULES.get(role, role)}")
        exit_code = int(worker.run(command.config, command.name, stop))
        return printed(exit_code) if command.config.evaluator.checkpoint else exit_code
    except KeyboardInterrupt:  # before the signal handler is installed
        return 130
    except ImportError as error:
        if str(error.name).partition(".")[0] == "apex_jax":
            raise
        advice = "run `. .venv/bin/activate`, which `make train` makes, or `python -m pip install -r requirements.txt`"
        if CHECKOUT is None:
            advice = "run `python -m pip install apex-jax` again: it installs what this program needs"
        problem = f"has no package {str(error.name).partition('.')[0]}"
        if not isinstance(error, ModuleNotFoundError):  # such as a version that needs libraries of the system
            problem = f"cannot load {error.path or error.name} ({first_line(error)})"
        print(f"error: {sys.executable} {problem}: {advice}", file=sys.stderr)
        return 1
    except (UsageError, RunError) as error:
        print(f"{error.prefix}{error}", file=sys.stderr)
        return error.exit_code
    except RuntimeError as error:
        if str(error) != "can't start new thread":
            raise
        print(f"error: {error}; {FIX_OF_THREADS}", file=sys.stderr)
        return 1
    except OSError as error:  # such as a full disk or missing permissions
        advice = "; make room, or choose another run_directory" if error.errno in OF_THE_DISK else ""
        print(f"error: {error}{advice}", file=sys.stderr)
        return 1
