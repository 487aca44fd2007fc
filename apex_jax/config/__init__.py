"""Configuration: every key of a run once, with its default, meaning, unit and range; files and arguments -> `Config`.

keys          `Config` and its groups: the definition of each key
rules         rules that relate several keys
load          YAML and key=value -> a checked `Config`; settings that name code of the user
command_line  argv -> a checked `Config`, and the action to take with it
"""

from apex_jax.config.keys import IMPALA_OUTPUTS as IMPALA_OUTPUTS
from apex_jax.config.keys import ActorConfig as ActorConfig
from apex_jax.config.keys import AddressConfig as AddressConfig
from apex_jax.config.keys import AlgorithmConfig as AlgorithmConfig
from apex_jax.config.keys import Config as Config
from apex_jax.config.keys import EnvironmentConfig as EnvironmentConfig
from apex_jax.config.keys import EvaluatorConfig as EvaluatorConfig
from apex_jax.config.keys import LearnerConfig as LearnerConfig
from apex_jax.config.keys import MetricsConfig as MetricsConfig
from apex_jax.config.keys import NetworkConfig as NetworkConfig
from apex_jax.config.keys import ReplayConfig as ReplayConfig
from apex_jax.config.keys import SecurityConfig as SecurityConfig
from apex_jax.config.keys import StorageConfig as StorageConfig
