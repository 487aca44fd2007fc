"""Ape-X: distributed prioritized experience replay (Horgan et al. 2018), in JAX.

                 weights, on request
      +-----------------------------------------------+
      v                                               |
    actor x N --- segments ---> replay server --- segments, once each ---> learner
    EnvPool,      with initial  sum-tree over     --- index batches ------> frame store on its device,
    exploration   priorities    compressed                                  one jitted update
    ladder                      segments          <--- priorities --------
      |                                               |
      +--- statistics ---> metrics <--- evaluator <---+ weights

    types            the records that modules exchange, and the axis legend
    segment_codec    segments <-> bytes
    item_codec       items of a program of your own <-> segments
    config           every key of a run, with its meaning, unit and range, which config_key defines; config_agent has
                     those of algorithm and network, config_services of addresses, storage, security and metrics
    config_rules     rules that relate several keys
    settings         YAML and key=value -> a checked Config
    command_line     argv -> a checked Config, and the action to take with it

    agent/           the algorithms: arrays in, arrays out
      algorithm      the interface to the workers: init, act, update, acting_params, exploration
      registry       the algorithms by name
      networks       observations -> q-values; observations -> actions and their values
      space_to_depth their first convolution on blocks of pixels, for GPUs
      losses         the paper's equations
      dqn            Ape-X DQN, for discrete actions
      estimator      what the outputs of its network mean and learn, by the options:
      munchausen     an option of DQN: soft targets with a bonus for the probability of the action
      value_rescaling  an option of DQN: h, which makes large values smaller
      quantiles      an option of DQN: the loss of quantiles of the return
      dpg            Ape-X DPG, for continuous actions
      training       parts common to their updates: optimizer, target copies, several updates in one call
      moments        running mean and variance of observations
      frozen_policy  a trained policy as one function of observations, for export
      exploration    the ladders of epsilon and of noise
      segments       steps of environments -> segments with n-step transitions
      frame_store    segments on the learner's device -> batches by index
      devices        updates on several devices, each with its own segments

    replay/          the replay and its journal: no socket, no clock
      sum_tree       draws in proportion to a value
      replay         the modules below as one object
      buffer         ring of encoded segments, prioritized draws, priority updates
      shares         batches over several replay servers, and importance weights
      rate_limiter   keeps the ratio of transitions drawn to transitions stored
      ledger         the outcome of every transition
      journal        records every event, and restores the replay from these records
      segment_log    the journal's log of events, in append-only files
      snapshots      the journal's snapshots of priorities and counters, and the head of each of its files

    transport/       bytes between processes
      params_codec   parameters of a network <-> bytes
      messages       the records sent between processes
      wire           messages <-> frames, every field checked
      sockets        the three links and their options
      security       authentication and encryption: CURVE, and the keys that are accepted; keys reads them,
                     keys_command is `python main.py keys`
      monitor        logs and counts refused keys and failed handshakes
      addresses      parses addresses, resolves host names
      http_link      a small HTTP server; status_link serves a process's status with it

    host/            the machine, and this program on it
      errors         the errors that users see, one line each, and the argument parser that raises them
      program        how this program was started: from a checkout, or installed
      disk           regular files only, atomic and durable writes, and locks on directories
      machine        the cores and memory that a process may use
      device         the device of a process: CPU or GPU
      compiled       the decorator that compiles numeric loops
      output         keeps the program running if standard output or error fails

    run/             the records of a run
      identity       which run a directory belongs to
      compatibility  compares configurations of processes, checkpoints and journals, and describes their differences
      provenance     command, commit, versions, machine of each start
      checkpoint     the learner's state on disk
      best           the params of the best evaluation
      interface      the task's observations and actions, stored for policy
      evaluations    the evaluator's games; params_file reads and writes params as safetensors
      metrics        TensorBoard and JSON lines; loggers passes them on to wandb, trackio and their like
      storage        a copy of the run on object storage

    environments/    the tasks that are learned
      environment    the environments of a run, with the beginning and end of every episode marked
      task           what a task returns and accepts
      envpool_tasks, gymnasium_tasks     tasks of EnvPool, and any environment of Gymnasium
      gymnasium_pool environments of Gymnasium, many at once; gymnasium_processes are the processes in which they run
      observations   observations of several parts -> vectors
      images         observations of Gymnasium -> pixels, by their layout
      tasks          which tasks can be trained; operations/tasks_command lists them
      atari_scores   random, human and Ape-X scores of 57 games
      stage          an episode of a continuous task in its original simulator, with its screens; stage_process
                     is the process of that simulator

    plotting/        the results of a run
      curves         metrics of runs -> curves, and runs that are seeds of the same
      packed_runs    many small runs in one file
      statistics     interquartile mean, bootstrap intervals
      plot           curves -> pictures and a table; plot_command is `python main.py plot`
      video          frames -> .mp4 and .gif

    links/           the protocol of each link, both ends; no maths (transport/ moves the bytes)
      experience_client, experience_server   run in an actor and in the replay server
      outbox         an actor's segments until they are stored
      membership     the connected actors, and the order in which their segments are stored
      sampling_client, sampling_server       run in the learner and in the replay server
      shards         the sampling clients of several replay servers as one stream
      weights_client, weights_server         run in actors and evaluator, and in the learner
      client, server parts common to the three clients and to the three servers
      connection     of a client: hellos, heartbeats, whether the server is joined or lost
      episode_means  returns of the actors' games between two reports
      limited_log    a log about actors, limited in its rate

    policy           a trained agent in a program of your own: `apex_jax.load_policy`
    replay_client    the replay server alone, from a program of your own: `apex_jax.ReplayClient`
    export/          a trained policy as files that others can use
      folder         the files of an exported policy; export_command is `python main.py export`
      programs       the policy as StableHLO and ONNX; onnx_graph makes the ONNX from JAX's own trace
      check          compares them with the policy itself
      model_card     the page of an exported policy on the Hugging Face hub

    process          signals, seeds, log, hosts of a process

    operations/      the operator's view of a run
      progress       the progress of a run; diagnosis finds its problems, live_view shows both
      run_page       the page of a local run, served and as report.html; page_data is what it shows, page.html how
      stopping       the lines printed when a user stops a run, with what a stop without saving loses
      status_page    the status of a process; status_command is `python main.py status`, status_summary its first
                     lines
      watch          finds roles that are alive but make no progress; watchdog does the same for systemd
      storage_copy   keeps the copy on object storage up to date; storage_command is `python main.py storage`

    workers/         the processes: loops around the modules above
      actor          acts
      replay_server  serves the buffer
      learner        updates; learner_metrics, run_counters and saver belong to it
      role           parts common to these processes: status page, metrics, sockets, copy of the run
      evaluator      evaluates the newest params, or those of a checkpoint; evaluation plays its games, recording films
                     one, and draws the run's curves
      local          all roles on this machine, supervised; role_process is one of them, series runs several seeds one
                     after the other

    main             the program: main.py, apex-jax and python -m apex_jax

Imports run one way: types, config_key, config_agent, config_services, config -> host -> segment_codec, config_rules ->
item_codec, settings -> run -> agent, environments, replay, transport (none of which imports another) -> plotting,
process, policy -> export, links, operations -> replay_client, workers -> main. Beside that, settings -> command_line ->
main.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apex_jax.policy import load_policy as load_policy
    from apex_jax.replay_client import ReplayClient as ReplayClient

__version__ = "0.2.0"


_MODULES = {"load_policy": "apex_jax.policy", "ReplayClient": "apex_jax.replay_client"}
"""By the name that is imported when it is used: JAX takes a second, and `ReplayClient` does without it."""


def __getattr__(name: str) -> Any:
    """Imports and returns a name of `_MODULES`."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
