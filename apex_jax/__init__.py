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

    types            the records that cross a border between modules, and the axis legend
    segment_codec    segments <-> bytes
    config           every key of a run, with its meaning, unit and range; config_key holds these
    config_rules     keys that must fit each other
    settings         YAML and key=value -> a checked Config
    command_line     argv -> a checked Config, and what is to be done with it

    agent/           the algorithms: arrays in, arrays out
      algorithm      what workers know of one: init, act, update, acting_params, exploration
      registry       which there are
      networks       observations -> q-values; observations -> actions and their values
      losses         the paper's equations
      dqn            Ape-X DQN, for discrete actions
      dpg            Ape-X DPG, for continuous actions
      training       what their updates share: optimizer, target copies, several updates in one call
      moments        running mean and variance of observations
      exploration    the ladders of epsilon and of noise
      segments       steps of environments -> segments with n-step transitions
      frame_store    segments on the learner's device -> batches by index

    replay/          the replay and its journal: no socket, no clock
      sum_tree       draws in proportion to a value
      replay         all of the below as one object
      buffer         ring of encoded segments, prioritized draws, priority updates
      rate_limiter   transitions drawn per transition stored
      ledger         what became of every transition
      journal        writes down what is stored, and reads it back
      segment_log    its log: what was stored, in files that are only appended to
      snapshots      its snapshots: priorities and counters, whole or not at all; saved_state is what they hold
      file_heads     how each of these files begins, and of which configuration it is

    transport/       bytes between processes
      params_codec   parameters of a network <-> bytes
      messages       the records that travel between processes
      wire           messages <-> frames, every field checked
      sockets        the three links and their options
      security       who may talk to whom: CURVE and the keys let in; keys reads them, keys_command is
                     `python main.py keys`
      monitor        refused keys and failed handshakes, told and counted
      addresses      addresses taken apart, hosts looked up
      status_link    a process's status, over HTTP

    host/            the machine, and this program on it
      errors         what a user is told in one line, and the parser that does so
      program        how this program was started: from a checkout, or installed
      disk           what must outlast a loss of power, and directories that one process has
      machine        how many cores and how much memory a process may use
      device         what a process computes on
      compiled       the decorator of loops that are compiled
      output         standard output and error that may go away

    run/             what a run keeps
      identity       which run a directory belongs to
      compatibility  what processes, checkpoints and journal must have in common, and how a difference is told
      provenance     command, commit, versions, machine of each start
      checkpoint     the learner's state on disk
      metrics        TensorBoard and JSON lines
      storage        a copy of the run on object storage

    environments/    what the agent learns
      environment    EnvPool, with every question about episodes answered
      observations   observations of several parts -> vectors
      tasks          which tasks can be trained; operations/tasks_command lists them
      atari_scores   random, human and Ape-X scores of 57 games
      stage          an episode of a continuous task in its original simulator, with its screens; stage_process
                     is the process of that simulator

    plotting/        what a run leaves to look at
      curves         metrics of runs -> curves, and runs that are seeds of the same
      packed_runs    many small runs in one file
      statistics     interquartile mean, bootstrap intervals
      plot           curves -> pictures and a table; plot_command is `python main.py plot`
      video          frames -> .mp4 and .gif
      files          pictures that are written whole

    links/           the protocol of each link, both ends; no maths (transport/ moves the bytes)
      experience_client, experience_server   an actor's end, and the replay server's
      outbox         an actor's segments until they are stored
      membership     who the actors are, and whose segment is stored next
      sampling_client, sampling_server       the learner's end, and the replay server's
      weights_client, weights_server         that of actors and evaluator, and the learner's
      connection     what the three clients share: hellos, heartbeats, and what has become of the server
      episode_means  returns of the actors' games between two reports
      limited_log    lines about actors, not more than a reader can use

    policy           a trained agent in a program of your own: `apex_jax.load_policy`
    process          signals, seeds, log, hosts of a process

    operations/      what an operator sees and asks for
      progress       how far a run is; diagnosis what is wrong with it, live_view shows both
      stopping       what a person is told who stops a run, and what a stop without saving loses
      status_page    what a process tells of itself; status_command is `python main.py status`, status_summary its
                     first lines
      watch          finds roles that live and do nothing; watchdog is the same for systemd
      storage_copy   keeps the copy on object storage up to date; storage_command is `python main.py storage`

    workers/         the processes: loops around all that
      actor          acts
      replay_server  serves the buffer
      learner        updates; learner_metrics, run_counters and saver belong to it
      role           what the process of each of these has: status page, metrics, sockets, copy of the run
      evaluator      plays full games; recording films one, and draws the run's curves
      local          all roles on this machine, supervised

    main             the program: main.py, apex-jax and python -m apex_jax

Imports run one way: types, config_key, config -> host -> segment_codec, config_rules -> settings -> run -> agent,
environments, replay, transport (none of which imports another) -> plotting, process, policy -> links, operations ->
workers -> main. Beside that, settings -> command_line -> main.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apex_jax.policy import load_policy as load_policy

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Imports `load_policy` when it is used, because JAX takes a second."""
    if name != "load_policy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from apex_jax.policy import load_policy

    return load_policy
